"""Where drafts that predict a block in one pass write what engines read, in which convention, and the checks of it.

Three places can say which of the target's layers a draft reads, in two conventions; three can say whether the slots of a block
attend causally. Engines take the first that they know, without comparing. hidden_states[k] of transformers is the output of
layer k - 1 (k = 0: the embeddings). The layout of the package speculators writes k, the method's own layout the layer. Levels
2, 6, 10:

    aux_hidden_state_layer_ids: [2, 6, 10]    dflash_config.target_layer_ids: [1, 5, 9]
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from checkpoints.export.configs import (
    GIVE_LEVELS,
    LEVELS_KEY,
    EngineConfig,
    as_list,
    as_mapping,
    default_levels,
    is_size,
    levels_problem,
)
from checkpoints.export.format_checks import (
    INVALID,
    NO_HEAD_DIM,
    UNSUPPORTED,
    Field,
    check_fields,
    check_tensors,
    classes,
    context_length,
    is_token,
    layer_type,
    rope,
    sizes,
    target_size,
)
from checkpoints.export.formats.base import CheckInput, Checks
from checkpoints.export.formats.records import Finding
from checkpoints.export.formats.speculators import proposed_tokens

NATIVE_PART = "dflash_config"  # the part of config.json that holds the fields of the method in its own layout
NATIVE_LEVELS = f"{NATIVE_PART}.target_layer_ids"
LEVELS, NON_CAUSAL_WINDOW, CAUSAL = "aux_hidden_state_layer_ids", "sliding_window_non_causal", "is_causal"
FULL, SLIDING = "full_attention", "sliding_attention"
MISSING = object()


@dataclass(frozen=True, kw_only=True)
class BlockLayout:
    """The fields of a block in one layout of config.json. Keys are dotted."""

    levels: str  # key of the feature levels
    first_level: int  # the k of hidden_states[k] that the id 0 means
    # other_levels, other_first: the same of the other layout, which a folder may have too
    other_levels: str
    other_first: int
    # other_name, other_defaults: of the other layout, and its default ids for a number of layers and of levels
    other_name: str
    other_defaults: Callable[[int, int], list[list[int]]]
    mask_token: str  # key of the mask token
    causal: str  # key of what vLLM reads where `is_causal` is missing; empty: sliding layers are causal
    is_negated: bool = False  # whether `causal` states the opposite, true by default
    is_anchored: bool = False  # whether the slot of the anchor predicts too
    reads_mask_file: bool = True  # whether vLLM takes the mask token's embedding from a file of its own

    def read_levels(self, config: EngineConfig) -> list[int] | None:
        """Returns the indices k of the hidden_states[k] that vLLM reads; None if they are missing or no integers."""
        return _levels(config, self.levels, self.first_level)

    def causal_override(self, config: EngineConfig) -> bool | None:
        """Returns what vLLM reads where `is_causal` is missing; None: sliding layers are causal."""
        written = lookup(config.raw, self.causal, self.is_negated or None) if self.causal else None
        return not written if self.is_negated and self.causal else written

    def is_causal(self, config: EngineConfig, layer: int) -> bool:
        """Returns whether vLLM masks the later slots of a block in a layer."""
        written = config.get(CAUSAL)
        if written is None:
            written = self.causal_override(config)
        types = attention_of(config)
        return bool(written) if written is not None else len(types) > layer and types[layer] == SLIDING

    def drafted(self, block_size: int) -> int:
        """Returns the tokens that a block drafts."""
        return block_size if self.is_anchored else block_size - 1


def native_default(num_layers: int, count: int) -> list[int]:
    """Returns the layers whose outputs DFlash reads by default. Ref: z-lab/dflash, `build_target_layer_ids`."""
    if count == 1:
        return [num_layers // 2]
    return [round(1 + place * (num_layers - 4) / (count - 1)) for place in range(count)]


SPECULATORS_LAYOUT = BlockLayout(
    levels=LEVELS,
    first_level=0,
    other_levels=NATIVE_LEVELS,
    other_first=1,
    other_name="DFlash's own layout",
    other_defaults=lambda num_layers, count: [native_default(num_layers, count)],
    mask_token="mask_token_id",
    causal=NON_CAUSAL_WINDOW,
    is_negated=True,
)
NATIVE_LAYOUT = BlockLayout(
    levels=NATIVE_LEVELS,
    first_level=1,
    other_levels=LEVELS_KEY,
    other_first=0,
    other_name="the package speculators",
    other_defaults=lambda num_layers, count: [
        [layer + 1 for layer in native_default(num_layers, count)],
        default_levels(num_layers),
    ],
    mask_token=f"{NATIVE_PART}.mask_token_id",
    causal=f"{NATIVE_PART}.causal",
)


def lookup(raw: Mapping[str, Any], key: str, missing: Any = None) -> Any:
    """Returns the value of a dotted key."""
    found: Any = raw
    for part in key.split("."):
        if not isinstance(found, Mapping) or part not in found:
            return missing
        found = found[part]
    return found


def attention_of(config: EngineConfig) -> list[Any]:
    """Returns `layer_types`, the attention of every layer; empty if there are none."""
    return as_list(config.get("layer_types")) or []


def _levels(config: EngineConfig, key: str, first: int) -> list[int] | None:
    ids = lookup(config.raw, key)
    is_list = isinstance(ids, list) and bool(ids)
    if not is_list or not all(isinstance(one, int) and not isinstance(one, bool) for one in ids):
        return None
    return [one + first for one in ids]


MASK_FILE = "mask_embedding.pt"
MAX_LAYERS = 64
ANCHOR = "sample_from_anchor"
OTHER_FEATURES = "the engine feeds it other features than in training: acceptance near 1.00, no error"
CONVENTIONS = "hidden_states[k] is the output of layer k - 1"


# -- which features ------------------------------------------------------------------------------------------------------


def _layer_ids(layout: BlockLayout, given: CheckInput) -> Iterator[Finding]:
    """Yields findings about levels that are missing, cannot be captured, or are written in the other layout's convention."""
    key, levels = layout.levels, layout.read_levels(given.config)
    num_layers = given.facts.num_layers if given.facts else None
    if levels is None:
        effect = "vLLM needs them: fc has one part for each"
        yield Finding(key, "missing or not a list of integers", effect, refusal=INVALID)
        return
    if given.options and given.options.levels:
        chosen, num_levels = list(given.options.levels), len(levels)
        if problem := levels_problem(chosen, num_layers, num_levels):
            yield Finding("--levels", str(chosen), "", refusal=problem)
        return
    if any(later <= earlier for earlier, later in pairwise(levels)):
        effect = "engines capture levels in increasing order, whatever order is written"
        yield Finding(key, f"hidden_states{levels}", effect, refusal=f"{effect}; {GIVE_LEVELS}")
    if levels[0] < 0 or (num_layers is not None and levels[-1] > num_layers):
        hint = " (one too high: ids of hidden_states in place of those of layers?)" if levels[-1] - 1 == num_layers else ""
        found = f"hidden_states{levels} of a target with {num_layers} layers"
        yield Finding(key, found, f"the target has no such level{hint}", refusal=GIVE_LEVELS)
    elif levels[-1] == num_layers:
        effect = "vLLM captures it before the target's final norm, transformers after it: train with lower levels"
        yield Finding(key, f"reads hidden_states[{num_layers}]", effect, is_warning=True, refusal=f"{effect}; {GIVE_LEVELS}")
    if (other := _other_convention(layout, given, levels)) is not None:
        yield other


def _other_convention(layout: BlockLayout, given: CheckInput, levels: list[int]) -> Finding | None:
    """Returns the finding about levels that are one too low or too high: by the folder's own evidence, or by the defaults."""
    key, written = layout.levels, lookup(given.config.raw, layout.levels)
    second, trained = _levels(given.config, layout.other_levels, layout.other_first), given.trained_levels
    if second is not None and second != levels:
        found = f"means hidden_states{levels}, {layout.other_levels} means hidden_states{second}"
        effect = f"one of them is in the other layout's convention ({CONVENTIONS}): {OTHER_FEATURES}"
        return Finding(key, found, effect, refusal=f"{GIVE_LEVELS}: those used in training")
    if trained is not None and trained != levels:
        is_paired = len(levels) == len(trained) and all(isinstance(level, int) for level in trained)
        differences = {right - left for left, right in zip(levels, trained, strict=True)} if is_paired else set()
        shift = {1: "one too low", -1: "one too high"}.get(differences.pop()) if len(differences) == 1 else None
        convention = f", {shift}: the other layout's convention ({CONVENTIONS})" if shift else ""
        found = f"{written} means hidden_states{levels}, it was trained with hidden_states{trained}{convention}"
        return Finding(key, found, OTHER_FEATURES)
    if given.facts is not None and len(levels) > 1 and written in layout.other_defaults(given.facts.num_layers, len(levels)):
        effect = f"if they were copied from there, they are in the other layout's convention ({CONVENTIONS})"
        return Finding(key, f"{written}, the default of {layout.other_name}", effect, is_warning=True)
    return None


# -- how slots attend ----------------------------------------------------------------------------------------------------


def _causality(layout: BlockLayout, given: CheckInput) -> Iterator[Finding]:
    """Yields findings about masks inside a block that engines would not compute as they were trained."""
    config = given.config
    written, override = config.get(CAUSAL), layout.causal_override(config)
    if written is not None and not isinstance(written, bool):
        yield given.at(CAUSAL, f"{written!r}, expected true or false", "engines read any value as true or false")
    elif None not in (written, override) and lookup(config.raw, layout.causal, MISSING) is not MISSING and written != override:
        found = f"{str(written).lower()}, {layout.causal} says {str(override).lower()}"
        yield given.at(CAUSAL, found, "vLLM takes the first, other readers the second: write both alike")
    elif written is None and override and FULL in (attention_of(config) or [FULL]):
        effect = (
            "vLLM masks the later slots in every layer, also in those of full attention, which speculators trains without that "
            "mask: low acceptance, no error; write is_causal in transformer_layer_config"
        )
        yield given.at(CAUSAL, f"{layout.causal} means causal, is_causal is missing", effect)
    layers = min(config.size("num_hidden_layers") or 0, MAX_LAYERS)
    if given.options and len({layout.is_causal(config, layer) for layer in range(layers)}) > 1:
        yield given.at(CAUSAL, "differs between layers", "", refusal=UNSUPPORTED)


def _attention_types(given: CheckInput) -> Iterator[Finding]:
    """Yields findings about the attention of each layer: number, names and windows."""
    config, types = given.config, attention_of(given.config)
    count = config.size("num_hidden_layers")
    if count is None or count > MAX_LAYERS:
        found = f"{config.get('num_hidden_layers')!r}, expected 1 to {MAX_LAYERS}"
        yield given.at("num_hidden_layers", found, "the engine cannot build the layers", refusal=INVALID)
    if types and (len(types) != count or any(one not in (FULL, SLIDING) for one in types)):
        found = f"{types}, expected {count!r} of {FULL} and {SLIDING}"
        yield given.at("layer_types", found, "the engine refuses it")
    if SLIDING in types and config.size("sliding_window") is None:
        yield given.at("sliding_window", f"{config.get('sliding_window')!r}", "the engine refuses sliding layers without it")
    if SLIDING in types and FULL in types:
        effect = "vLLM needs VLLM_USE_V2_MODEL_RUNNER=1, which does not run on a CPU"
        yield given.at("layer_types", "mixed full and sliding attention", effect, is_warning=True)
    if given.options and (SLIDING in types or lookup(config.raw, f"{NATIVE_PART}.use_swa")):
        refusal = "the slots of our block head attend to the whole context, cannot import it"
        yield given.at("layer_types", "sliding attention", "", refusal=refusal)


# -- the block -----------------------------------------------------------------------------------------------------------


def _slots(layout: BlockLayout, given: CheckInput) -> Iterator[Finding]:
    """Yields findings about the size of a block, its mask token, and which slots predict."""
    size, raw = given.config.size("block_size"), given.config.raw
    if size is None or size < 2:
        found = f"{raw.get('block_size')!r}, expected 2 or more"
        yield Finding("block_size", found, "readers assume a block of 8", refusal="give the size that was trained")
    tokens = proposed_tokens(raw)
    if size and isinstance(tokens, int) and tokens > layout.drafted(size):
        found = f"{tokens}, a block of {size} drafts {layout.drafted(size)}"
        yield Finding("speculative_tokens", found, "the positions beyond the block were never trained")
    token, vocab = lookup(raw, layout.mask_token), given.config.size("vocab_size")
    if not is_token(token, vocab):
        found = f"{token!r}, the vocabulary is 0 to {(vocab or 0) - 1}"
        yield Finding(layout.mask_token, found, "the engine cannot fill the slots", refusal=INVALID)
    if bool(given.config.get(ANCHOR)) != layout.is_anchored and given.options:
        refusal = f"not {str(layout.is_anchored).lower()}: this kind of our block head predicts from other slots"
        yield Finding(ANCHOR, repr(given.config.get(ANCHOR)), "", refusal=refusal)
    yield from _mask_file(layout, given, token)


def _mask_file(layout: BlockLayout, given: CheckInput, token: Any) -> Iterator[Finding]:
    """Yields findings about the file with an embedding [H] that replaces that of the mask token; no pickled code is run."""
    path = given.folder / MASK_FILE
    if not path.is_file():
        return
    if given.options:
        refusal = "our block head takes the target's embedding of the mask token, cannot import it"
        yield Finding(MASK_FILE, "present", "", refusal=refusal)
    try:
        stored = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, OSError) as error:
        yield Finding(MASK_FILE, f"not a file of tensors only ({type(error).__name__})", "vLLM stops")
        return
    fields = stored if isinstance(stored, dict) else {"embedding": stored}
    embedding, named = fields.get("embedding"), fields.get("mask_token_id")
    if not isinstance(embedding, Tensor) or embedding.numel() != given.config.size("hidden_size"):
        found = f"shape {list(embedding.shape)}" if isinstance(embedding, Tensor) else "contains no tensor `embedding`"
        yield Finding(MASK_FILE, found, "the engine stops: it needs a tensor of hidden_size")
    if named is not None and named != token:
        yield Finding(MASK_FILE, f"is for token {named}, {layout.mask_token} is {token}", "vLLM refuses it")
    if not layout.reads_mask_file:
        yield Finding(MASK_FILE, "present", "vLLM ignores it for this kind of draft and takes the target's row")


# -- the layers ----------------------------------------------------------------------------------------------------------


def _layers(given: CheckInput) -> Iterator[Finding]:
    yield from check_fields(given, [Field("head_dim", is_size, "a positive integer", NO_HEAD_DIM)])
    if given.options and given.config.get("attention_bias"):
        yield given.at("attention_bias", f"{given.config.get('attention_bias')!r}", "", refusal=UNSUPPORTED)


def _key_norms(given: CheckInput) -> Iterator[Finding]:
    """Warns of different `k_norm` weights, of which vLLM 0.32 applies the first to every layer on CPUs and XPUs."""
    names = [name for name in given.specs if name.endswith("self_attn.k_norm.weight") and name in given.weights.infos]
    tensors = [given.weights[name] for name in names]
    if any(one.shape != tensors[0].shape or not torch.equal(one, tensors[0]) for one in tensors[1:]):
        effect = "vLLM 0.32 for CPUs and XPUs applies that of the first layer to all contexts: low acceptance there, no error"
        yield Finding("k_norm", f"differs between {len(names)} layers", effect, is_warning=True)


def native_part(given: CheckInput) -> Iterator[Finding]:
    """Yields a finding if the layout's own part is missing."""
    if not as_mapping(given.config.raw.get(NATIVE_PART)):
        yield Finding(NATIVE_PART, "missing", "engines do not know the mask token and the levels")
    if LEVELS_KEY in given.config.raw and as_list(given.config.raw[LEVELS_KEY]) is None:
        yield Finding(LEVELS_KEY, "empty", f"remove it: vLLM would read it in place of {NATIVE_LEVELS}")


def block_checks(layout: BlockLayout) -> Checks:
    """Returns the checks of a folder in a layout."""
    return (
        *(classes, layer_type, sizes, _layers, context_length, rope, target_size, _attention_types),
        *(partial(check, layout) for check in (_layer_ids, _causality, _slots)),
        *(check_tensors, _key_norms),
    )
