"""Checks of drafts that predict a block in one pass: what engines read in their configs, and where layouts disagree.

Three places can say which of the target's layers a draft reads, in two conventions; three can say whether the slots of a block
attend causally. Engines take the first that they know, without comparing.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from checkpoints.export.config_checks import (
    INVALID,
    NO_HEAD_DIM,
    UNSUPPORTED,
    Field,
    check_fields,
    classes,
    context_length,
    is_size,
    is_token,
    layer_type,
    rope,
    sizes,
    target_size,
)
from checkpoints.export.configs import LEVELS_KEY, as_list, as_mapping
from checkpoints.export.formats.base import CheckInput, Checks
from checkpoints.export.formats.block_config import (
    CAUSAL,
    FULL,
    NATIVE_LEVELS,
    NATIVE_PART,
    SLIDING,
    BlockLayout,
    attention_of,
    levels_problem,
    lookup,
)
from checkpoints.export.formats.layout import proposed_tokens
from checkpoints.export.formats.records import Finding
from checkpoints.export.tensor_checks import check_tensors

MASK_FILE = "mask_embedding.pt"
MAX_LAYERS = 64
ANCHOR = "sample_from_anchor"
OTHER_FEATURES = "the engine feeds it other features than in training: acceptance near 1.00, no error"
CONVENTIONS = "hidden_states[k] is the output of layer k - 1"
GIVE_LEVELS = "give --levels A,B,C"


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
        problem = levels_problem(chosen, num_layers or 0)
        if problem or len(chosen) != num_levels:
            yield Finding("--levels", str(chosen), "", refusal=problem or f"fc takes exactly {num_levels} levels")
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
    second, trained = layout.read_other_levels(given.config), given.trained_levels
    if second is not None and second != levels:
        found = f"means hidden_states{levels}, {layout.other_levels} means hidden_states{second}"
        effect = f"one of them is in the other layout's convention ({CONVENTIONS}): {OTHER_FEATURES}"
        return Finding(key, found, effect, refusal=f"{GIVE_LEVELS}: those used in training")
    if trained is not None and trained != levels:
        shift = {1: "one too low", -1: "one too high"}.get(_shift(levels, trained) or 0)
        convention = f", {shift}: the other layout's convention ({CONVENTIONS})" if shift else ""
        found = f"{written} means hidden_states{levels}, it was trained with hidden_states{trained}{convention}"
        return Finding(key, found, OTHER_FEATURES)
    if given.facts is not None and len(levels) > 1 and (name := layout.foreign_default(levels, given.facts.num_layers)):
        effect = f"if they were copied from there, they are in the other layout's convention ({CONVENTIONS})"
        return Finding(key, f"{written}, the default of {name}", effect, is_warning=True)
    return None


def _shift(levels: list[int], trained: list[Any]) -> int | None:
    """Returns by how much all levels are lower than the trained ones; None if the differences are not equal."""
    if len(levels) != len(trained) or not all(isinstance(level, int) for level in trained):
        return None
    differences = {right - left for left, right in zip(levels, trained, strict=True)}
    return differences.pop() if len(differences) == 1 else None


# -- how slots attend ----------------------------------------------------------------------------------------------------


def _causality(layout: BlockLayout, given: CheckInput) -> Iterator[Finding]:
    """Yields findings about masks inside a block that engines would not compute as they were trained."""
    config = given.config
    written, override = config.get(CAUSAL), layout.causal_override(config)
    if written is not None and not isinstance(written, bool):
        yield given.at(CAUSAL, f"{written!r}, expected true or false", "engines read any value as true or false")
    elif written is not None and override is not None and layout.has_causal_override(config) and written != override:
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
    token, vocab = layout.read_mask_token(given.config), given.config.size("vocab_size")
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
