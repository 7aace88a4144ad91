"""Checks of drafts that predict a block in one pass: what engines read in their configs, and where layouts disagree.

Three places can say which of the target's layers a draft reads, in two conventions; three can say whether the slots of a block
attend causally. Engines take the first that they know, without comparing.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from checkpoints.export.checks import context_length, layer_type, sizes, vocabulary
from checkpoints.export.configs import LEVELS_KEY, EngineConfig, as_list, as_mapping
from checkpoints.export.formats.base import CheckInput, Finding
from checkpoints.export.tensor_checks import check_tensors, vocabulary_maps

if TYPE_CHECKING:
    from checkpoints.export.formats.block import BlockFormat

MASK_FILE = "mask_embedding.pt"
NATIVE = "dflash_config"  # the part of config.json that holds the fields of the method in its own layout
NATIVE_LEVELS, CAUSAL = f"{NATIVE}.target_layer_ids", "is_causal"
NON_CAUSAL_WINDOW = "sliding_window_non_causal"
FULL, SLIDING = "full_attention", "sliding_attention"
OTHER_FEATURES = "the engine feeds it other features than in training: acceptance near 1.00, no error"
CONVENTIONS = "hidden_states[k] is the output of layer k - 1"


def read_mask_embedding(folder: Path) -> tuple[Tensor, int | None] | None:
    """Reads the embedding [H] that replaces that of the mask token, and the token if it is named; None if there is no file.

    Raises:
        ValueError: the file contains anything else; no pickled code is run.
    """
    if not (folder / MASK_FILE).is_file():
        return None
    try:
        stored = torch.load(folder / MASK_FILE, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, OSError) as error:
        raise ValueError(f"{folder / MASK_FILE}: not a file of tensors only ({type(error).__name__})") from error
    embedding = stored.get("embedding") if isinstance(stored, dict) else stored
    if not isinstance(embedding, Tensor):
        raise ValueError(f"{folder / MASK_FILE}: contains no tensor `embedding`")
    token = stored.get("mask_token_id") if isinstance(stored, dict) else None
    return embedding.reshape(-1), token


def is_causal(config: EngineConfig, layer: int, format_: BlockFormat) -> bool:
    """Returns whether vLLM masks the later slots of a block in a layer."""
    written = config.get(CAUSAL)
    if written is None:
        written = format_.causal_override(config)
    types = attention_of(config)
    return bool(written) if written is not None else len(types) > layer and types[layer] == SLIDING


def as_integers(value: Any) -> list[int] | None:
    """Returns a list of integers unchanged, any other value as None."""
    is_list = isinstance(value, list) and bool(value)
    return value if is_list and all(isinstance(one, int) and not isinstance(one, bool) for one in value) else None


def levels_problem(levels: list[Any], num_layers: int) -> str:
    """Returns why engines cannot read these hidden_states; empty if they can."""
    if not levels or not all(isinstance(level, int) for level in levels):
        return "not a list of integers"
    if any(later <= earlier for earlier, later in pairwise(levels)) or levels[0] < 0:
        return "engines capture levels in increasing order"
    if levels[-1] == num_layers:
        return f"level {num_layers} is the target's final norm to transformers and our decoder, its input to vLLM"
    if levels[-1] > num_layers:
        return f"the target has {num_layers} layers"
    return ""


def native_default(num_layers: int, count: int) -> list[int]:
    """Returns the layers whose outputs DFlash reads by default. Ref: z-lab/dflash, `build_target_layer_ids`."""
    if count == 1:
        return [num_layers // 2]
    return [round(1 + place * (num_layers - 4) / (count - 1)) for place in range(count)]


def attention_of(config: EngineConfig) -> list[Any]:
    """Returns `layer_types`, the attention of every layer; empty if there are none."""
    return as_list(config.get("layer_types")) or []


def _format(given: CheckInput) -> BlockFormat:
    return cast("BlockFormat", given.format)


# -- which features ------------------------------------------------------------------------------------------------------


def layer_ids(given: CheckInput) -> Iterator[Finding]:
    """Yields findings about levels that are missing, cannot be captured, or are written in the other layout's convention."""
    key, levels = _format(given).levels_key, _format(given).levels(given.config)
    if levels is None:
        yield Finding(key, "missing or not a list of integers", "vLLM needs them: fc has one part for each")
        return
    if any(later <= earlier for earlier, later in pairwise(levels)):
        yield Finding(key, f"hidden_states{levels}", "engines capture levels in increasing order, whatever order is written")
    yield from _range_of(given, key, levels)
    other = _other_convention(given, key, levels)
    if other is not None:
        yield other


def _range_of(given: CheckInput, key: str, levels: list[int]) -> Iterator[Finding]:
    last = given.facts.num_layers if given.facts else None
    if levels[0] < 0 or (last is not None and levels[-1] > last):
        found = f"hidden_states{levels} of a target with {last} layers"
        hint = " (one too high: ids of hidden_states in place of those of layers?)" if last and levels[-1] == last + 1 else ""
        yield Finding(key, found, f"the target has no such level{hint}")
    elif last is not None and levels[-1] == last:
        found = f"reads hidden_states[{last}]"
        effect = "vLLM captures it before the target's final norm, transformers after it: train with lower levels"
        yield Finding(key, found, effect, is_warning=True)


def _other_convention(given: CheckInput, key: str, levels: list[int]) -> Finding | None:
    """Returns the finding about levels that are one too low or too high: by the folder's own evidence, or by the defaults."""
    own = _format(given).written_levels(given.config)
    second = _format(given).second_levels(given.config)
    if second is not None and second[1] != levels:
        found = f"means hidden_states{levels}, {second[0]} means hidden_states{second[1]}"
        return Finding(key, found, f"one of them is in the other layout's convention ({CONVENTIONS}): {OTHER_FEATURES}")
    trained = given.trained_levels
    if trained is not None and trained != levels:
        shift = {1: "one too low", -1: "one too high"}.get(_shift(levels, trained) or 0)
        convention = f", {shift}: the other layout's convention ({CONVENTIONS})" if shift else ""
        found = f"{own} means hidden_states{levels}, it was trained with hidden_states{trained}{convention}"
        return Finding(key, found, OTHER_FEATURES)
    if given.facts is not None and len(levels) > 1 and (name := _format(given).foreign_default(levels, given.facts.num_layers)):
        effect = f"if they were copied from there, they are in the other layout's convention ({CONVENTIONS})"
        return Finding(key, f"{own}, the default of {name}", effect, is_warning=True)
    return None


def _shift(levels: list[int], trained: list[Any]) -> int | None:
    """Returns by how much all levels are lower than the trained ones; None if the differences are not equal."""
    if len(levels) != len(trained) or not all(isinstance(level, int) for level in trained):
        return None
    differences = {right - left for left, right in zip(levels, trained, strict=True)}
    return differences.pop() if len(differences) == 1 else None


# -- how slots attend ----------------------------------------------------------------------------------------------------


def causality(given: CheckInput) -> Iterator[Finding]:
    """Yields findings about masks inside a block that engines would not compute as they were trained."""
    config, format_ = given.config, _format(given)
    written, override = config.get(CAUSAL), format_.causal_override(config)
    if written is not None and not isinstance(written, bool):
        yield given.at(CAUSAL, f"{written!r}, expected true or false", "engines read any value as true or false")
    elif written is not None and override is not None and format_.has_causal_override(config) and written != override:
        found = f"{str(written).lower()}, {format_.causal_key} says {str(override).lower()}"
        yield given.at(CAUSAL, found, "vLLM takes the first, other readers the second: write both alike")
    elif written is None and override and FULL in (attention_of(config) or [FULL]):
        found = f"{format_.causal_key} means causal, is_causal is missing"
        effect = (
            "vLLM masks the later slots in every layer, also in those of full attention, which speculators trains without that "
            "mask: low acceptance, no error; write is_causal in transformer_layer_config"
        )
        yield given.at(CAUSAL, found, effect)


def attention_types(given: CheckInput) -> Iterator[Finding]:
    """Yields findings about the attention of each layer: number, names and windows."""
    config, types = given.config, attention_of(given.config)
    count = config.size("num_hidden_layers")
    if count is None or count > _format(given).max_layers:
        found = f"{config.get('num_hidden_layers')!r}, expected 1 to {_format(given).max_layers}"
        yield given.at("num_hidden_layers", found, "the engine cannot build the layers")
    if types and (len(types) != count or any(one not in (FULL, SLIDING) for one in types)):
        found = f"{types}, expected {count!r} of {FULL} and {SLIDING}"
        yield given.at("layer_types", found, "the engine refuses it")
    if SLIDING in types and config.size("sliding_window") is None:
        yield given.at("sliding_window", f"{config.get('sliding_window')!r}", "the engine refuses sliding layers without it")
    if SLIDING in types and FULL in types:
        effect = "vLLM needs VLLM_USE_V2_MODEL_RUNNER=1, which does not run on a CPU"
        yield Finding(config.key_path("layer_types"), "mixed full and sliding attention", effect, is_warning=True)


# -- the block -----------------------------------------------------------------------------------------------------------


def slots(given: CheckInput) -> Iterator[Finding]:
    """Yields findings about the size of a block, its mask token, and which slots predict."""
    raw, format_ = given.config.raw, _format(given)
    size = given.config.size("block_size")
    if size is None or size < 2:
        yield Finding("block_size", f"{raw.get('block_size')!r}, expected 2 or more", "readers assume a block of 8")
    tokens = format_.proposed_tokens(given.config)
    if size and isinstance(tokens, int) and tokens > format_.drafted(size):
        found = f"{tokens}, a block of {size} drafts {format_.drafted(size)}"
        yield Finding("speculative_tokens", found, "the positions beyond the block were never trained")
    yield from _mask_token(given)
    yield from format_.anchor_findings(given)


def _mask_token(given: CheckInput) -> Iterator[Finding]:
    key, token = _format(given).mask_token_key, _format(given).mask_token(given.config)
    vocab = given.config.size("vocab_size")
    is_token = isinstance(token, int) and not isinstance(token, bool)
    if not is_token or token < 0 or (vocab is not None and token >= vocab):
        yield Finding(key, f"{token!r}, the vocabulary is 0 to {(vocab or 0) - 1}", "the engine cannot fill the slots")
    try:
        stored = read_mask_embedding(given.folder)
    except ValueError as error:
        yield Finding(MASK_FILE, str(error), "vLLM stops")
        return
    if stored is None:
        return
    embedding, named = stored
    if embedding.shape != (given.config.size("hidden_size"),):
        yield Finding(MASK_FILE, f"shape {list(embedding.shape)}", "the engine stops: it has another size than hidden_size")
    if named is not None and named != token:
        yield Finding(MASK_FILE, f"is for token {named}, {key} is {token}", "vLLM refuses it")
    if not _format(given).reads_mask_file:
        yield Finding(MASK_FILE, "present", "vLLM ignores it for this kind of draft and takes the target's row")


# -- the layers ----------------------------------------------------------------------------------------------------------


def classes(given: CheckInput) -> Iterator[Finding]:
    """Yields a finding unless `architectures` names one class of the kind."""
    known = (_format(given).engine_class, *_format(given).other_classes)
    written = given.config.raw.get("architectures")
    if not (isinstance(written, list) and len(written) == 1 and written[0] in known):
        yield Finding("architectures", f"{written}, expected ['{known[0]}']", "no engine loads it as a draft")


def head_dim(given: CheckInput) -> Iterator[Finding]:
    """Yields a finding if `head_dim` is missing."""
    if given.config.size("head_dim") is None:
        effect = "vLLM takes hidden_size / num_attention_heads, Qwen3's configuration class 128"
        yield given.at("head_dim", f"{given.config.get('head_dim')!r}", effect)


def plain_rope(given: CheckInput) -> Iterator[Finding]:
    """Yields findings about a rope that is not the target's on the index of a token in the stream."""
    config, facts = given.config, given.facts
    theta, section, scaled, _ = config.rope
    if section:
        effect = "vLLM stops: parallel drafting does not support M-RoPE; such drafts count positions along the stream"
        yield given.at("rope_parameters", f"mrope_section {section}", effect)
    if not (config.get("rope_parameters") or config.get("rope_theta")):
        yield given.at("rope_parameters", "missing", "each reader takes a theta of its own: 1e6 in vLLM")
    elif facts and theta != facts.rope_theta:
        yield given.at("rope_theta", f"{theta:g}, the target's is {facts.rope_theta:g}", "rotation angles differ from training")
    if facts and scaled != facts.scaled_rope:
        found = f"{scaled or 'unscaled'}, the target's is {facts.scaled_rope or 'unscaled'}"
        yield given.at("rope_parameters", found, "positions are scaled differently in draft and target")


def target_size(given: CheckInput) -> Iterator[Finding]:
    """Yields a finding if fc was made for features of another size."""
    key, config = "target_hidden_size", given.config
    if config.get(key) not in (None, config.get("hidden_size")):
        found = f"{config.get(key)}, hidden_size is {config.get('hidden_size')}"
        yield Finding(key, found, "fc gets another input size than its weight has")


def key_norms(given: CheckInput) -> Iterator[Finding]:
    """Warns of different `k_norm` weights, of which vLLM 0.32 applies the first to every layer on CPUs and XPUs."""
    names = [name for name in given.specs if name.endswith("self_attn.k_norm.weight") and name in given.weights.infos]
    tensors = [given.weights[name] for name in names]
    if any(one.shape != tensors[0].shape or not torch.equal(one, tensors[0]) for one in tensors[1:]):
        effect = "vLLM 0.32 for CPUs and XPUs applies that of the first layer to all contexts: low acceptance there, no error"
        yield Finding("k_norm", f"differs between {len(names)} layers", effect, is_warning=True)


def native_part(given: CheckInput) -> Iterator[Finding]:
    """Yields a finding if the layout's own part is missing."""
    if not as_mapping(given.config.raw.get(NATIVE)):
        yield Finding(NATIVE, "missing", "engines do not know the mask token and the levels")
    if LEVELS_KEY in given.config.raw and as_list(given.config.raw[LEVELS_KEY]) is None:
        yield Finding(LEVELS_KEY, "empty", f"remove it: vLLM would read it in place of {NATIVE_LEVELS}")


BLOCK_CHECKS = (
    *(classes, layer_type, sizes, head_dim, vocabulary, context_length, plain_rope, target_size),
    *(attention_types, layer_ids, causality, slots, check_tensors, vocabulary_maps, key_norms),
)
