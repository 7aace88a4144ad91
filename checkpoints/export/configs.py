"""A draft's config.json as engines read it, and the tensors that follow from it.

Shapes: H hidden, I intermediate, V target vocabulary, A = 3 feature levels.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from checkpoints.export.target import EMBEDDING, LM_HEAD
from sage.drafts.registry import MODEL_TYPE_PREFIX
from sage.targets.rope import NOT_SCALING, RopeConfig

FEATURE_LEVELS = 3
DEFAULT_THETA = 10000.0  # LlamaConfig's default
DEFAULT_EPS = 1e-6  # of LlamaConfig and Qwen3Config
SIZES = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "vocab_size")
LEVELS_KEY, GIVE_LEVELS = "eagle_aux_hidden_state_layer_ids", "give --levels A,B,C"
NORMS = ("input_layernorm", "post_attention_layernorm")
FUSED_NORMS = (*NORMS, "hidden_norm")
NO_D2T = "engines take draft ids for target ids and propose the wrong tokens: acceptance 1.00, no error"
NO_LM_HEAD = "engines use the target's lm_head or a random one: acceptance 1.00, no error"
NO_T2D = "speculators cannot train or verify the draft"


@dataclass(frozen=True)
class TensorSpec:
    """Expected shape and kind of dtype (`float`, `int64`, `bool`) of a tensor, and the effect in an engine if it is missing."""

    shape: tuple[int, ...]
    kind: str = "float"
    is_optional: bool = False
    is_zero: bool = False  # the format has the tensor, our drafts do not: it is written as zeros
    effect_if_missing: str = "no engine reports it: the weight is left uninitialized, acceptance falls to 1.00"


TensorSpecs = dict[str, TensorSpec]


class Sizes(NamedTuple):
    """Sizes of a decoder layer; `queries` and `keys` are heads times head_dim."""

    hidden: int
    inner: int
    vocab: int
    queries: int
    keys: int


class EngineConfig:
    """A draft's config.json, `raw`, as engines read it, with the fields of the layer nested or at the top level."""

    def __init__(self, raw: Mapping[str, Any]) -> None:
        nested = raw.get("transformer_layer_config")
        self.raw = raw
        self.layer: Mapping[str, Any] = nested if isinstance(nested, Mapping) else raw

    def get(self, key: str, default: Any = None) -> Any:
        """Returns a field of the decoder layer, from the nested config or from the top level."""
        return self.layer.get(key, self.raw.get(key, default))

    def key_path(self, key: str) -> str:
        """Returns the dotted key of a field of the decoder layer, for messages."""
        is_nested = self.layer is not self.raw and (key in self.layer or key not in self.raw)
        return f"transformer_layer_config.{key}" if is_nested else key

    def size(self, key: str) -> int | None:
        """Returns a positive integer; None if the field is missing or anything else."""
        value = self.get(key)
        return value if is_size(value) else None

    @property
    def head_dim(self) -> int | None:
        hidden, heads = self.size("hidden_size"), self.size("num_attention_heads")
        return self.size("head_dim") or (hidden // heads if hidden and heads else None)

    @property
    def is_sage_draft(self) -> bool:
        """Whether it is the config.json of a draft of this package, which no engine loads."""
        return str(self.raw.get("model_type")).startswith(MODEL_TYPE_PREFIX)

    @property
    def sizes(self) -> Sizes:
        """The sizes of the layer, 0 for one that is missing."""
        hidden, inner, heads, kv_heads, vocab = (self.size(key) or 0 for key in SIZES)
        head_dim = self.head_dim or 0
        return Sizes(hidden, inner, vocab, heads * head_dim, kv_heads * head_dim)

    @property
    def classes(self) -> list[str]:
        """The names in `architectures`; empty if that is not a list of names."""
        names = self.raw.get("architectures")
        return [name for name in names if isinstance(name, str)] if isinstance(names, list) else []

    @property
    def rope(self) -> RopeConfig:
        """The rope in `rope_parameters`, or in `rope_theta` and `rope_scaling`; theta is NaN if it is no number."""
        parameters, scaling = as_mapping(self.get("rope_parameters")), as_mapping(self.get("rope_scaling"))
        theta = parameters.get("rope_theta", self.get("rope_theta", scaling.get("rope_theta", DEFAULT_THETA)))
        section = as_list(parameters.get("mrope_section") or scaling.get("mrope_section"))
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
        return as_list(self.raw.get(LEVELS_KEY))

    @property
    def sglang_levels(self) -> list[Any] | None:
        """Indices k of the hidden_states[k] that SGLang feeds to the draft: the written ones plus one; None = its default."""
        value = as_list(as_mapping(self.raw.get("eagle_config")).get(LEVELS_KEY))
        return [k + 1 if isinstance(k, int) else k for k in value] if value else None


def is_size(value: Any) -> bool:
    """Returns whether a value is a positive integer."""
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def as_mapping(value: Any) -> Mapping[str, Any]:
    """Returns a mapping unchanged, any other value as an empty one."""
    return value if isinstance(value, Mapping) else {}


def as_list(value: Any) -> list[Any] | None:
    """Returns a list unchanged, an empty value as None, any other value as a list of one."""
    if not value:
        return None
    return list(value) if isinstance(value, list) else [value]


TEMPLATES: dict[str, Any] = yaml.safe_load((Path(__file__).parent / "formats" / "configs.yaml").read_text(encoding="utf-8"))


def fill(template: Any, values: Mapping[str, Any]) -> Any:
    """Returns a template of configs.yaml with the values that its `$names` stand for."""
    if isinstance(template, str) and template.startswith("$"):
        name, *attributes = template.lstrip("$?").split(".")
        return reduce(getattr, attributes, values[name])
    if isinstance(template, list):
        return [fill(item, values) for item in template]
    if not isinstance(template, dict):
        return template
    filled: dict[str, Any] = {}
    for key, value in template.items():
        if key.startswith("+"):
            filled |= fill(TEMPLATES[key[1:]], values)
        elif not str(value).startswith("$?") or values.get(value[2:]) is not None:
            filled[key] = fill(value, values)
    return filled


def layer_specs(config: EngineConfig, layer: str, norms: Sequence[str] = NORMS, has: Collection[str] = ()) -> TensorSpecs:
    """Returns the tensors of a decoder layer, whose names start with `layer`.

    Args:
        norms: those of hidden size; attention with a `hidden_norm` reads embedding and feature side by side.
        has: `biases`, where the config says so, and `head_norms`, of queries and keys.
    """
    hidden, inner, _, queries, keys = config.sizes
    read = hidden * (2 if "hidden_norm" in norms else 1)
    attention = {"q": (queries, read), "k": (keys, read), "v": (keys, read), "o": (hidden, queries)}
    mlp = {"gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}
    shapes: dict[str, tuple[int, ...]] = {f"{name}.weight": (hidden,) for name in norms}
    shapes |= {f"self_attn.{name}_proj.weight": shape for name, shape in attention.items()}
    shapes |= {f"mlp.{name}_proj.weight": shape for name, shape in mlp.items()}
    if "biases" in has and config.get("attention_bias"):
        shapes |= {f"self_attn.{name}_proj.bias": shape[:1] for name, shape in attention.items()}
    if "head_norms" in has:
        shapes |= {f"self_attn.{name}_norm.weight": (config.head_dim or 0,) for name in ("q", "k")}
    return {f"{layer}{name}": TensorSpec(shape) for name, shape in shapes.items()}


def head_specs(config: EngineConfig, num_levels: int, needs_t2d: bool = False) -> TensorSpecs:
    """Returns the tensors of a head outside its layers: fc, norm, lm_head, embedding and maps.

    A full draft vocabulary needs no maps. `needs_t2d`: a reduced one needs both.
    """
    hidden, vocab = config.sizes.hidden, config.sizes.vocab
    draft_vocab = config.size("draft_vocab_size") or vocab
    is_full = vocab == draft_vocab
    return {
        "fc.weight": TensorSpec((hidden, num_levels * hidden)),
        "norm.weight": TensorSpec((hidden,)),
        LM_HEAD: TensorSpec((draft_vocab, hidden), effect_if_missing=NO_LM_HEAD),
        EMBEDDING: TensorSpec((vocab, hidden), is_optional=True),
        "d2t": TensorSpec((draft_vocab,), "int64", is_optional=is_full, effect_if_missing=NO_D2T),
        "t2d": TensorSpec((vocab,), "bool", is_optional=is_full or not needs_t2d, effect_if_missing=NO_T2D),
    }


def default_levels(num_layers: int) -> list[int]:
    """Returns the indices k of hidden_states[k] that both engines use by default."""
    return [2, num_layers // 2, num_layers - 3]


def levels_problem(levels: Sequence[Any], num_layers: int | None, count: int | None = None) -> str:
    """Returns why engines cannot read these hidden_states, of which fc takes `count` (None: any); empty if they can."""
    if not levels or count not in (None, len(levels)) or not all(isinstance(level, int) for level in levels):
        return f"fc takes exactly {count or len(levels)} levels"
    if any(later <= earlier for earlier, later in pairwise(levels)) or levels[0] < 0:
        return "engines capture levels in increasing order, whatever order is written"
    if num_layers is not None and levels[-1] >= num_layers:
        captured = f"the inputs of layers 0 to {num_layers - 1}, not what the final norm reads or yields"
        return f"the target has {num_layers} layers and engines only capture {captured}"
    return ""
