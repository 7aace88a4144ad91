"""Where drafts that predict a block in one pass write what engines read, in which convention, and the checks of it.

Three places can say which of the target's layers a draft reads, in two conventions; three can say whether the slots of a block
attend causally. Engines take the first that they know, without comparing. hidden_states[k] of transformers is the output of
layer k - 1 (k = 0: the embeddings). The layout of the package speculators writes k, the method's own layout the layer. Levels
2, 6, 10:

    aux_hidden_state_layer_ids: [2, 6, 10]    dflash_config.target_layer_ids: [1, 5, 9]
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping
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
    LAYER_CHECKS,
    UNSUPPORTED,
    Field,
    check_fields,
    check_tensors,
    is_token,
)
from checkpoints.export.formats.base import CheckInput, Checks, Finding
from checkpoints.export.formats.eagle import proposed_tokens

NATIVE_PART = "dflash_config"  # the part of config.json that holds the fields of the method in its own layout
CAUSAL, FULL, SLIDING = "is_causal", "full_attention", "sliding_attention"
MISSING = object()
MASK_FILE = "mask_embedding.pt"
MAX_LAYERS = 64
ANCHOR = "sample_from_anchor"
OTHER_FEATURES = "the engine feeds it other features than in training: acceptance near 1.00, no error"
CONVENTIONS = "hidden_states[k] is the output of layer k - 1"
NO_HEAD_DIM = "vLLM takes hidden_size / num_attention_heads, Qwen3's configuration class 128"


@dataclass(frozen=True, kw_only=True)
class BlockLayout:
    """The fields of a block in one layout of config.json. Keys are dotted."""

    name: str  # in messages
    levels: str  # key of the feature levels
    first_level: int  # the k of hidden_states[k] that the id 0 means
    other_levels: str  # key of levels in the convention of the other layout, which a folder may have too
    mask_token: str  # key of the mask token
    causal: str = ""  # key of what vLLM reads where `is_causal` is missing; empty: sliding layers are causal
    is_negated: bool = False  # whether `causal` states the opposite, which is the default then
    is_anchored: bool = False  # whether the slot of the anchor predicts too

    @property
    def other(self) -> BlockLayout:
        """The other layout."""
        return SPECULATORS_LAYOUT if self.first_level else NATIVE_LAYOUT

    def read_levels(self, config: EngineConfig, key: str = "") -> list[int] | None:
        """Returns the indices k of the hidden_states[k] at a key, by default that of vLLM; None if there are no integers."""
        ids = lookup(config.raw, key or self.levels)
        is_list = isinstance(ids, list) and bool(ids)
        if not is_list or not all(isinstance(layer, int) and not isinstance(layer, bool) for layer in ids):
            return None
        return [layer + self.first_level for layer in ids]

    def default_ids(self, num_layers: int, count: int) -> list[list[int]]:
        """Returns the ids that drafts in this layout may have by default. Ref: z-lab/dflash, `build_target_layer_ids`."""
        steps = [1 + place * (num_layers - 4) / (count - 1) for place in range(count)] if count > 1 else [num_layers // 2]
        layers = [round(step) for step in steps]
        return [layers] if self.first_level else [[layer + 1 for layer in layers], default_levels(num_layers)]

    def stated_causality(self, config: EngineConfig) -> Any:
        """Returns what vLLM reads where `is_causal` is missing; None if that is missing too."""
        stated = lookup(config.raw, self.causal, MISSING)
        return None if stated is MISSING else not stated if self.is_negated else stated

    def is_causal(self, config: EngineConfig, layer: int) -> bool:
        """Returns whether vLLM masks the later slots of a block in a layer."""
        written = config.get(CAUSAL)
        if written is None:
            written = self.stated_causality(config)
        if written is None and not self.is_negated:
            return attention_of(config)[layer : layer + 1] == [SLIDING]
        return bool(written)

    def drafted(self, block_size: int) -> int:
        """Returns the tokens that a block drafts."""
        return block_size if self.is_anchored else block_size - 1


SPECULATORS_LAYOUT = BlockLayout(
    name="the package speculators",
    levels="aux_hidden_state_layer_ids",
    first_level=0,
    other_levels=f"{NATIVE_PART}.target_layer_ids",
    mask_token="mask_token_id",
    causal="sliding_window_non_causal",
    is_negated=True,
)
NATIVE_LAYOUT = BlockLayout(
    name="DFlash's own layout",
    levels=f"{NATIVE_PART}.target_layer_ids",
    first_level=1,
    other_levels=LEVELS_KEY,
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


# -- which features ----------------------------------------------------------------------------------------------------


def _layer_ids(layout: BlockLayout, given: CheckInput) -> Iterator[Finding]:
    """Levels that are missing, cannot be captured, or are written in the other layout's convention."""
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
    key, written, trained = layout.levels, lookup(given.config.raw, layout.levels), given.trained_levels
    second = layout.other.read_levels(given.config, layout.other_levels)
    if second is not None and second != levels:
        found = f"means hidden_states{levels}, {layout.other_levels} means hidden_states{second}"
        effect = f"one of them is in the other layout's convention ({CONVENTIONS}): {OTHER_FEATURES}"
        return Finding(key, found, effect, refusal=f"{GIVE_LEVELS}: those used in training")
    if trained is not None and trained != levels:
        shifts = {1: "one too low", -1: "one too high"}
        shift = next((words for by, words in shifts.items() if [level + by for level in levels] == trained), "")
        convention = f", {shift}: the other layout's convention ({CONVENTIONS})" if shift else ""
        found = f"{written} means hidden_states{levels}, it was trained with hidden_states{trained}{convention}"
        return Finding(key, found, OTHER_FEATURES)
    num_layers = given.facts.num_layers if given.facts and len(levels) > 1 else None
    if num_layers is not None and written in layout.other.default_ids(num_layers, len(levels)):
        effect = f"if they were copied from there, they are in the other layout's convention ({CONVENTIONS})"
        return Finding(key, f"{written}, the default of {layout.other.name}", effect, is_warning=True)
    return None


# -- how slots attend --------------------------------------------------------------------------------------------------


def _causality(layout: BlockLayout, given: CheckInput) -> Iterator[Finding]:
    """Masks inside a block that engines would not compute as they were trained."""
    config = given.config
    written, stated = config.get(CAUSAL), layout.stated_causality(config)
    if written is not None and not isinstance(written, bool):
        yield given.at(CAUSAL, f"{written!r}, expected true or false", "engines read any value as true or false")
    elif None not in (written, stated) and written != stated:
        found = f"{str(written).lower()}, {layout.causal} says {str(stated).lower()}"
        yield given.at(CAUSAL, found, "vLLM takes the first, other readers the second: write both alike")
    elif written is None and stated and FULL in (attention_of(config) or [FULL]):
        effect = (
            "vLLM masks the later slots in every layer, also in those of full attention, which speculators trains without that "
            "mask: low acceptance, no error; write is_causal in transformer_layer_config"
        )
        yield given.at(CAUSAL, f"{layout.causal} means causal, is_causal is missing", effect)
    layers = min(config.size("num_hidden_layers") or 0, MAX_LAYERS)
    if given.options and len({layout.is_causal(config, layer) for layer in range(layers)}) > 1:
        yield given.at(CAUSAL, "differs between layers", "", refusal=UNSUPPORTED)


def _attention_types(given: CheckInput) -> Iterator[Finding]:
    """Number of layers, and the attention of each: its name and window."""
    config, types, count = given.config, attention_of(given.config), given.config.size("num_hidden_layers")
    if count is None or count > MAX_LAYERS:
        found = f"{config.get('num_hidden_layers')!r}, expected 1 to {MAX_LAYERS}"
        yield given.at("num_hidden_layers", found, "the engine cannot build the layers", refusal=INVALID)
    if types and (len(types) != count or any(kind not in (FULL, SLIDING) for kind in types)):
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


# -- the block and the layers ------------------------------------------------------------------------------------------


def _slots(layout: BlockLayout, given: CheckInput) -> Iterator[Finding]:
    """Size of a block, its mask token, and which slots predict."""
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
    if (given.folder / MASK_FILE).is_file():
        yield from _mask_file(layout, given, token)


def _mask_file(layout: BlockLayout, given: CheckInput, token: Any) -> Iterator[Finding]:
    """The file with an embedding [H] that replaces that of the mask token; no pickled code is run."""
    if given.options:
        refusal = "our block head takes the target's embedding of the mask token, cannot import it"
        yield Finding(MASK_FILE, "present", "", refusal=refusal)
    try:
        stored = torch.load(given.folder / MASK_FILE, map_location="cpu", weights_only=True)
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
    if layout.is_anchored:
        yield Finding(MASK_FILE, "present", "vLLM ignores it for this kind of draft and takes the target's row")


def _layers(given: CheckInput) -> Iterator[Finding]:
    yield from check_fields(given, [Field("head_dim", is_size, "a positive integer", NO_HEAD_DIM)])
    if given.options and given.config.get("attention_bias"):
        yield given.at("attention_bias", f"{given.config.get('attention_bias')!r}", "", refusal=UNSUPPORTED)


def _key_norms(given: CheckInput) -> Iterator[Finding]:
    """Warns of different `k_norm` weights, of which vLLM 0.32 applies the first to every layer on CPUs and XPUs."""
    names = [name for name in given.specs if name.endswith("self_attn.k_norm.weight") and name in given.weights.infos]
    tensors = [given.weights[name] for name in names]
    if any(other.shape != tensors[0].shape or not torch.equal(other, tensors[0]) for other in tensors[1:]):
        effect = "vLLM 0.32 for CPUs and XPUs applies that of the first layer to all contexts: low acceptance there, no error"
        yield Finding("k_norm", f"differs between {len(names)} layers", effect, is_warning=True)


def native_part(given: CheckInput) -> Iterator[Finding]:
    """The layout's own part must be there."""
    if not as_mapping(given.config.raw.get(NATIVE_PART)):
        yield Finding(NATIVE_PART, "missing", "engines do not know the mask token and the levels")
    if LEVELS_KEY in given.config.raw and as_list(given.config.raw[LEVELS_KEY]) is None:
        yield Finding(LEVELS_KEY, "empty", f"remove it: vLLM would read it in place of {NATIVE_LAYOUT.levels}")


def block_checks(layout: BlockLayout) -> Checks:
    """Returns the checks of a folder in a layout."""
    in_layout = (partial(check, layout) for check in (_layer_ids, _causality, _slots))
    return (*LAYER_CHECKS, _layers, _attention_types, *in_layout, check_tensors, _key_norms)
