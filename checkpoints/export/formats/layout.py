"""Config fields and tensors that serving engines expect of a draft, in all formats.

`EngineConfig` gives access to a config.json as an engine reads it, in any format. The tensor specs list every tensor with its
shape and the effect in an engine if it is missing.

Shapes: H hidden, I intermediate, V target vocabulary, U draft vocabulary, A = 3 feature levels.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from sage.drafts.registry import MODEL_TYPE_PREFIX
from sage.targets.rope import NOT_SCALING, RopeConfig

FEATURE_LEVELS = 3
DEFAULT_THETA = 10000.0  # LlamaConfig's default
LEVELS_KEY = "eagle_aux_hidden_state_layer_ids"


class Format(StrEnum):
    """Export formats."""

    eagle3 = "eagle3"
    speculators = "speculators"
    eagle = "eagle"


class Flavour(StrEnum):
    """Engines, whose `eagle` formats differ."""

    vllm = "vllm"
    sglang = "sglang"


EAGLE_CLASSES = {Flavour.vllm: "EagleLlamaForCausalLM", Flavour.sglang: "LlamaForCausalLMEagle"}
EAGLE3_CLASS = "LlamaForCausalLMEagle3"
SPECULATORS_CLASS = "Eagle3DraftModel"
EAGLE3_THIRD_PARTY_CLASSES = ("Eagle3LlamaForCausalLM", "LlamaForCausalLM")  # AngelSlim's and SafeAILab's


@dataclass(frozen=True)
class TensorSpec:
    """Expected shape and kind of dtype (`float`, `int64`, `bool`) of a tensor, and the effect in an engine if it is missing."""

    shape: tuple[int, ...]
    kind: str = "float"
    is_optional: bool = False
    effect_if_missing: str = "no engine reports it: the weight is left uninitialized, acceptance falls to 1.00"


TensorSpecs = dict[str, TensorSpec]


class EngineConfig:
    """A draft's config.json as an engine reads it, independent of the format.

    Args:
        raw: the content of config.json.

    Attributes:
        format, flavour: recognized by the class names; None if no engine would load it as a draft.
    """

    def __init__(self, raw: Mapping[str, Any]) -> None:
        self.raw = raw
        nested = raw.get("transformer_layer_config")
        self.layer: Mapping[str, Any] = nested if isinstance(nested, Mapping) else raw
        self.prefix = "transformer_layer_config." if self.layer is not raw else ""
        self.format, self.flavour = _recognize(self)

    def get(self, key: str, default: Any = None) -> Any:
        """Returns a field of the decoder layer, from the nested config or from the top level."""
        return self.layer.get(key, self.raw.get(key, default))

    def key_path(self, key: str) -> str:
        """Returns the dotted key of a field of the decoder layer, for messages."""
        return f"{self.prefix}{key}" if key in self.layer or key not in self.raw else key

    def size(self, key: str) -> int | None:
        """Returns a positive integer; None if the field is missing or anything else."""
        value = self.get(key)
        return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None

    @property
    def head_dim(self) -> int | None:
        hidden, heads = self.size("hidden_size"), self.size("num_attention_heads")
        return self.size("head_dim") or (hidden // heads if hidden and heads else None)

    @property
    def classes(self) -> list[str]:
        """The names in `architectures`; empty if that is not a list of names."""
        names = self.raw.get("architectures")
        return [name for name in names if isinstance(name, str)] if isinstance(names, list) else []

    @property
    def rope(self) -> RopeConfig:
        """The rope in `rope_parameters`, or in `rope_theta` and `rope_scaling`; theta is NaN if it is no number."""
        parameters, scaling = _as_mapping(self.get("rope_parameters")), _as_mapping(self.get("rope_scaling"))
        theta = parameters.get("rope_theta", self.get("rope_theta", DEFAULT_THETA))
        section = _as_list(parameters.get("mrope_section") or scaling.get("mrope_section"))
        rope_type = str(parameters.get("rope_type") or scaling.get("rope_type") or scaling.get("type") or "default")
        scaled = {key: value for key, value in (parameters or scaling).items() if key not in NOT_SCALING}
        is_number = isinstance(theta, (int, float)) and not isinstance(theta, bool)
        return RopeConfig(
            theta=float(theta) if is_number else float("nan"),
            section=section,
            scaled=None if rope_type in ("default", "mrope") else scaled | {"rope_type": rope_type},
            interleaved=bool(section) and bool(parameters.get("mrope_interleaved") or scaling.get("mrope_interleaved")),
        )

    @property
    def vllm_levels(self) -> list[Any] | None:
        """Indices k of the hidden_states[k] that vLLM feeds to the draft; None = the engine's default."""
        return _as_list(self.raw.get(LEVELS_KEY))

    @property
    def sglang_levels(self) -> list[Any] | None:
        """Indices k of the hidden_states[k] that SGLang feeds to the draft: the written ones plus one; None = its default."""
        value = _as_list(_as_mapping(self.raw.get("eagle_config")).get(LEVELS_KEY))
        return [k + 1 if isinstance(k, int) else k for k in value] if value else None


def _as_mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _as_list(value: Any) -> list[Any] | None:
    """A list unchanged, an empty value as None, any other value as a list of one."""
    if not value:
        return None
    return list(value) if isinstance(value, list) else [value]


def is_sage_draft(raw: Mapping[str, Any]) -> bool:
    """Returns whether it is the config.json of a draft of this package, which no engine loads."""
    return str(raw.get("model_type")).startswith(MODEL_TYPE_PREFIX)


def _recognize(config: EngineConfig) -> tuple[Format | None, Flavour | None]:
    names = config.classes
    if is_sage_draft(config.raw):
        return None, None
    if "speculators_model_type" in config.raw or SPECULATORS_CLASS in names:
        return Format.speculators, None
    for flavour, name in EAGLE_CLASSES.items():
        if name in names:
            return Format.eagle, flavour
    is_eagle3 = "draft_vocab_size" in config.raw or any("Eagle3" in name for name in names)
    return (Format.eagle3 if is_eagle3 else None), None


NO_LM_HEAD = "engines use the target's lm_head or a random one: acceptance 1.00, no error"
NO_D2T = "engines take draft ids for target ids and propose the wrong tokens: acceptance 1.00, no error"
NO_T2D = "speculators cannot train or verify the draft"
NO_BIAS = "SGLang's fc has a bias and keeps a random one: acceptance falls to 1.00"


def eagle3_tensor_specs(config: EngineConfig) -> TensorSpecs | None:
    """Returns the tensors of an EAGLE-3 draft under the names of its format; None if the config lacks sizes."""
    hidden, inner, vocab = (config.size(key) for key in ("hidden_size", "intermediate_size", "vocab_size"))
    heads, kv_heads, dim = config.size("num_attention_heads"), config.size("num_key_value_heads"), config.head_dim
    if not (hidden and inner and vocab and heads and kv_heads and dim):
        return None
    draft_vocab = config.size("draft_vocab_size") or vocab
    layer = "layers.0" if config.format == Format.speculators else "midlayer"
    norms = ("input_layernorm", "hidden_norm", "post_attention_layernorm")
    specs = {f"{layer}.{name}.weight": TensorSpec((hidden,)) for name in norms}
    specs |= _layer_specs(layer, hidden, inner, heads * dim, kv_heads * dim, attention_input=2 * hidden)
    specs |= {
        "fc.weight": TensorSpec((hidden, FEATURE_LEVELS * hidden)),
        "norm.weight": TensorSpec((hidden,)),
        "lm_head.weight": TensorSpec((draft_vocab, hidden), effect_if_missing=NO_LM_HEAD),
        "embed_tokens.weight": TensorSpec((vocab, hidden), is_optional=True),
    }
    return specs | _vocabulary_map_specs(config.format, vocab, draft_vocab)


def _vocabulary_map_specs(format_: Format | None, vocab: int, draft_vocab: int) -> TensorSpecs:
    is_full = vocab == draft_vocab
    needs_t2d = format_ == Format.speculators and not is_full
    return {
        "d2t": TensorSpec((draft_vocab,), "int64", is_optional=is_full, effect_if_missing=NO_D2T),
        "t2d": TensorSpec((vocab,), "bool", is_optional=not needs_t2d, effect_if_missing=NO_T2D),
    }


def eagle_tensor_specs(config: EngineConfig) -> TensorSpecs | None:
    """Returns the tensors of an EAGLE-1/2 draft in the flavour of its config; None if the config lacks sizes."""
    hidden, inner, vocab = (config.size(key) for key in ("hidden_size", "intermediate_size", "vocab_size"))
    heads, kv_heads, dim = config.size("num_attention_heads"), config.size("num_key_value_heads"), config.head_dim
    if not (hidden and inner and vocab and heads and kv_heads and dim):
        return None
    specs = _layer_specs("layers.0", hidden, inner, heads * dim, kv_heads * dim, attention_input=hidden)
    specs |= {
        "fc.weight": TensorSpec((hidden, 2 * hidden)),
        "layers.0.post_attention_layernorm.weight": TensorSpec((hidden,)),
        "embed_tokens.weight": TensorSpec((vocab, hidden), is_optional=True),
    }
    if config.flavour == Flavour.sglang:
        specs["fc.bias"] = TensorSpec((hidden,), effect_if_missing=NO_BIAS)
    return specs


def _layer_specs(layer: str, hidden: int, inner: int, queries: int, keys: int, attention_input: int) -> TensorSpecs:
    return {
        f"{layer}.self_attn.q_proj.weight": TensorSpec((queries, attention_input)),
        f"{layer}.self_attn.k_proj.weight": TensorSpec((keys, attention_input)),
        f"{layer}.self_attn.v_proj.weight": TensorSpec((keys, attention_input)),
        f"{layer}.self_attn.o_proj.weight": TensorSpec((hidden, queries)),
        f"{layer}.mlp.gate_proj.weight": TensorSpec((inner, hidden)),
        f"{layer}.mlp.up_proj.weight": TensorSpec((inner, hidden)),
        f"{layer}.mlp.down_proj.weight": TensorSpec((hidden, inner)),
    }


def default_levels(num_layers: int) -> list[int]:
    """Returns the indices k of hidden_states[k] that both engines use by default."""
    return [2, num_layers // 2, num_layers - 3]


def are_valid_levels(levels: list[Any], num_layers: int) -> bool:
    """Returns whether engines can capture these levels: three increasing indices of 0..num_layers - 1."""
    if len(levels) != FEATURE_LEVELS or not all(isinstance(level, int) for level in levels):
        return False
    is_increasing = all(later > earlier for earlier, later in zip(levels, levels[1:], strict=False))
    return is_increasing and levels[0] >= 0 and levels[-1] < num_layers
