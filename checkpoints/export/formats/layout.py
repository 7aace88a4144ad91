"""The tensors and config fields that serving engines expect of a draft, and the one reading of all their dialects.

A `Head` is a draft's config as an engine would read it, whichever format it is written in. The tables name every tensor with
its shape and with what an engine does when it is missing.

Shapes: H hidden, I intermediate, V target vocabulary, U draft vocabulary, A = 3 feature levels.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple

FEATURE_LEVELS = 3
DEFAULT_THETA = 10000.0  # what LlamaConfig assumes when a config does not say
LEVELS_KEY = "eagle_aux_hidden_state_layer_ids"


class Format(StrEnum):
    """The formats that can be written and checked."""

    eagle3 = "eagle3"
    speculators = "speculators"
    eagle = "eagle"


class Flavour(StrEnum):
    """The engines whose `eagle` differ."""

    vllm = "vllm"
    sglang = "sglang"


EAGLE_CLASSES = {Flavour.vllm: "EagleLlamaForCausalLM", Flavour.sglang: "LlamaForCausalLMEagle"}
EAGLE3_CLASS = "LlamaForCausalLMEagle3"
SPECULATORS_CLASS = "Eagle3DraftModel"
EAGLE3_ELSEWHERE = ("Eagle3LlamaForCausalLM", "LlamaForCausalLM")  # AngelSlim's and SafeAILab's


@dataclass(frozen=True)
class Tensor:
    """What a table says of one tensor: shape, kind of dtype (`float`, `int64`, `bool`), and what its absence does."""

    shape: tuple[int, ...]
    kind: str = "float"
    is_optional: bool = False
    missing: str = "neither engine notices: the weight keeps whatever memory held, acceptance falls to 1.00"


Table = dict[str, Tensor]


ROPE_ELSEWHERE = ("rope_theta", "mrope_section", "type")  # keys of rope_parameters that are not parameters of a scaled rope


class Rope(NamedTuple):
    """Rope of a draft's config.

    Attributes:
        theta: base of the frequencies; NaN if the config has no number there.
        section: frequencies per axis of M-RoPE; None = one axis.
        scaled: `rope_type` and parameters of a scaled rope; None = unscaled.
    """

    theta: float
    section: list[Any] | None
    scaled: dict[str, Any] | None


class Head:
    """A draft's config with its dialect taken away.

    Args:
        config: config.json as it is.

    Attributes:
        format, flavour: by its class names; None where nobody would load it as a draft.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.config = config
        nested = config.get("transformer_layer_config")
        self.layer: Mapping[str, Any] = nested if isinstance(nested, Mapping) else config
        self.prefix = "transformer_layer_config." if self.layer is not config else ""
        self.format, self.flavour = _recognise(self)

    def get(self, key: str, default: Any = None) -> Any:
        """A field of the decoder layer, wherever the format keeps it."""
        return self.layer.get(key, self.config.get(key, default))

    def name(self, key: str) -> str:
        """Where that field stands, for messages."""
        return f"{self.prefix}{key}" if key in self.layer or key not in self.config else key

    def size(self, key: str) -> int | None:
        """A positive whole number, or None where the field is missing or something else."""
        value = self.get(key)
        return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None

    @property
    def head_dim(self) -> int | None:
        hidden, heads = self.size("hidden_size"), self.size("num_attention_heads")
        return self.size("head_dim") or (hidden // heads if hidden and heads else None)

    @property
    def classes(self) -> list[str]:
        """Its class names; empty where they are no list of names."""
        names = self.config.get("architectures")
        return [name for name in names if isinstance(name, str)] if isinstance(names, list) else []

    @property
    def rope(self) -> Rope:
        """From `rope_parameters`, or from `rope_theta` with `rope_scaling`."""
        written, scaling = _mapping(self.get("rope_parameters")), _mapping(self.get("rope_scaling"))
        theta = written.get("rope_theta", self.get("rope_theta", DEFAULT_THETA))
        section = _listed(written.get("mrope_section") or scaling.get("mrope_section"))
        rope_type = str(written.get("rope_type") or scaling.get("rope_type") or scaling.get("type") or "default")
        scaled = {key: value for key, value in (written or scaling).items() if key not in ROPE_ELSEWHERE}
        is_number = isinstance(theta, (int, float)) and not isinstance(theta, bool)
        return Rope(
            theta=float(theta) if is_number else float("nan"),
            section=section,
            scaled=None if rope_type in ("default", "mrope") else scaled | {"rope_type": rope_type},
        )

    @property
    def levels_vllm(self) -> list[Any] | None:
        """k of the hidden_states[k] that vLLM feeds it; None = the engine's default."""
        return _listed(self.config.get(LEVELS_KEY))

    @property
    def levels_sglang(self) -> list[Any] | None:
        """k of the hidden_states[k] that SGLang feeds it: it adds one to what is written; None = the engine's default."""
        value = _listed(_mapping(self.config.get("eagle_config")).get(LEVELS_KEY))
        return [k + 1 if isinstance(k, int) else k for k in value] if value else None


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _listed(value: Any) -> list[Any] | None:
    """A list as it is, nothing as None, and what should have been a list as a list of it."""
    if not value:
        return None
    return list(value) if isinstance(value, list) else [value]


def is_ours(config: Mapping[str, Any]) -> bool:
    """Whether it is the config of a draft as `sage` saves it, which no engine knows."""
    return str(config.get("model_type")).startswith("sage_")


def _recognise(head: Head) -> tuple[Format | None, Flavour | None]:
    names = head.classes
    if is_ours(head.config):
        return None, None
    if "speculators_model_type" in head.config or SPECULATORS_CLASS in names:
        return Format.speculators, None
    for flavour, name in EAGLE_CLASSES.items():
        if name in names:
            return Format.eagle, flavour
    is_eagle3 = "draft_vocab_size" in head.config or any("Eagle3" in name for name in names)
    return (Format.eagle3 if is_eagle3 else None), None


def eagle3_table(head: Head) -> Table | None:
    """The tensors of an EAGLE-3 draft under the names its format uses; None if sizes are missing from the config."""
    hidden, inner, vocab = (head.size(key) for key in ("hidden_size", "intermediate_size", "vocab_size"))
    heads, kv_heads, dim = head.size("num_attention_heads"), head.size("num_key_value_heads"), head.head_dim
    if not (hidden and inner and vocab and heads and kv_heads and dim):
        return None
    draft_vocab = head.size("draft_vocab_size") or vocab
    layer = "layers.0" if head.format == Format.speculators else "midlayer"
    norms = ("input_layernorm", "hidden_norm", "post_attention_layernorm")
    table = {f"{layer}.{name}.weight": Tensor((hidden,)) for name in norms}
    table |= _layer_table(layer, hidden, inner, heads * dim, kv_heads * dim, attention_input=2 * hidden)
    table |= {
        "fc.weight": Tensor((hidden, FEATURE_LEVELS * hidden)),
        "norm.weight": Tensor((hidden,)),
        "lm_head.weight": Tensor((draft_vocab, hidden), missing=NO_LM_HEAD),
        "embed_tokens.weight": Tensor((vocab, hidden), is_optional=True),
    }
    return table | _maps(head.format, vocab, draft_vocab)


NO_LM_HEAD = "the engine serves it with the target's head or a random one: acceptance 1.00, no error"
NO_D2T = "draft ids are taken for target ids: it proposes the wrong words, acceptance 1.00, no error"


def _maps(format_: Format | None, vocab: int, draft_vocab: int) -> Table:
    is_whole = vocab == draft_vocab
    needs_t2d = format_ == Format.speculators and not is_whole
    return {
        "d2t": Tensor((draft_vocab,), "int64", is_optional=is_whole, missing=NO_D2T),
        "t2d": Tensor((vocab,), "bool", is_optional=not needs_t2d, missing="speculators cannot train it on or verify it"),
    }


def eagle_table(head: Head) -> Table | None:
    """The tensors of an EAGLE-1/2 draft for the flavour it is written in; None if sizes are missing from the config."""
    hidden, inner, vocab = (head.size(key) for key in ("hidden_size", "intermediate_size", "vocab_size"))
    heads, kv_heads, dim = head.size("num_attention_heads"), head.size("num_key_value_heads"), head.head_dim
    if not (hidden and inner and vocab and heads and kv_heads and dim):
        return None
    table = _layer_table("layers.0", hidden, inner, heads * dim, kv_heads * dim, attention_input=hidden)
    table |= {
        "fc.weight": Tensor((hidden, 2 * hidden)),
        "layers.0.post_attention_layernorm.weight": Tensor((hidden,)),
        "embed_tokens.weight": Tensor((vocab, hidden), is_optional=True),
    }
    if head.flavour == Flavour.sglang:
        table["fc.bias"] = Tensor((hidden,), missing="SGLang's fc has a bias and keeps a random one: acceptance falls to 1.00")
    return table


def _layer_table(layer: str, hidden: int, inner: int, queries: int, keys: int, attention_input: int) -> Table:
    return {
        f"{layer}.self_attn.q_proj.weight": Tensor((queries, attention_input)),
        f"{layer}.self_attn.k_proj.weight": Tensor((keys, attention_input)),
        f"{layer}.self_attn.v_proj.weight": Tensor((keys, attention_input)),
        f"{layer}.self_attn.o_proj.weight": Tensor((hidden, queries)),
        f"{layer}.mlp.gate_proj.weight": Tensor((inner, hidden)),
        f"{layer}.mlp.up_proj.weight": Tensor((inner, hidden)),
        f"{layer}.mlp.down_proj.weight": Tensor((hidden, inner)),
    }


def default_levels(num_layers: int) -> list[int]:
    """The k of hidden_states[k] that both engines use when a config names none."""
    return [2, num_layers // 2, num_layers - 3]
