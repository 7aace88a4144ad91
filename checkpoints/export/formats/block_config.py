"""Where drafts that predict a block in one pass write what engines read, and in which convention.

Feature levels are written in two conventions. hidden_states[k] of transformers is the output of layer k - 1 (k = 0: the
embeddings). The layout of the package speculators writes k, the method's own layout the layer. Levels 2, 6, 10:

    aux_hidden_state_layer_ids: [2, 6, 10]    dflash_config.target_layer_ids: [1, 5, 9]
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from checkpoints.export.configs import LEVELS_KEY, EngineConfig, as_list, default_levels

NATIVE_PART = "dflash_config"  # the part of config.json that holds the fields of the method in its own layout
NATIVE_LEVELS = f"{NATIVE_PART}.target_layer_ids"
LEVELS, NON_CAUSAL_WINDOW, CAUSAL = "aux_hidden_state_layer_ids", "sliding_window_non_causal", "is_causal"
FULL, SLIDING = "full_attention", "sliding_attention"
MISSING = object()


@dataclass(frozen=True, kw_only=True)
class BlockLayout:
    """The fields of a block in one layout of config.json. Keys are dotted.

    Attributes:
        levels: key of the feature levels.
        first_level: the k of hidden_states[k] that the id 0 means.
        other_levels, other_first: the same of the other layout, which a folder may have too.
        other_name, other_defaults: of the other layout, and its default ids for a number of layers and of levels.
        mask_token: key of the mask token.
        causal: key of what vLLM reads where `is_causal` is missing; empty: sliding layers are causal.
        is_negated: whether `causal` states the opposite, true by default.
        is_anchored: whether the slot of the anchor predicts too.
        reads_mask_file: whether vLLM takes the mask token's embedding from a file of its own.
    """

    levels: str
    first_level: int
    other_levels: str
    other_first: int
    other_name: str
    other_defaults: Callable[[int, int], list[list[int]]]
    mask_token: str
    causal: str
    is_negated: bool = False
    is_anchored: bool = False
    reads_mask_file: bool = True

    def read_levels(self, config: EngineConfig) -> list[int] | None:
        """Returns the indices k of the hidden_states[k] that vLLM reads; None if they are missing or no integers."""
        return _levels(config, self.levels, self.first_level)

    def read_other_levels(self, config: EngineConfig) -> list[int] | None:
        """Returns the indices k of a second place that names levels; None if there is no other."""
        return _levels(config, self.other_levels, self.other_first)

    def foreign_default(self, levels: list[int], num_layers: int) -> str:
        """Returns whose defaults the ids are, if they would mean other levels there; empty for none."""
        ids = [level - self.first_level for level in levels]
        return self.other_name if ids in self.other_defaults(num_layers, len(levels)) else ""

    def read_mask_token(self, config: EngineConfig) -> Any:
        """Returns the mask token, of any type."""
        return lookup(config.raw, self.mask_token)

    def causal_override(self, config: EngineConfig) -> bool | None:
        """Returns what vLLM reads where `is_causal` is missing; None: sliding layers are causal."""
        written = lookup(config.raw, self.causal, self.is_negated or None) if self.causal else None
        return not written if self.is_negated and self.causal else written

    def has_causal_override(self, config: EngineConfig) -> bool:
        """Returns whether `causal_override` is written, not a default."""
        return lookup(config.raw, self.causal, MISSING) is not MISSING

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
