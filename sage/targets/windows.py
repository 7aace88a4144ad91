"""Sliding-window attention: text layers whose tokens attend to the last `sliding_window` ones, themselves included.

The cache keeps all tokens, and masks hide those outside of the window.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

from torch import Tensor

FULL, SLIDING = "full_attention", "sliding_attention"
# `attention_mask` of a text model; a dict has one for each of its `layer_types`.
Mask: TypeAlias = Tensor | dict[str, Tensor] | None
Tile = Callable[[Tensor], Tensor]  # Bool [N, S] or [B, N, S], True = attend -> the additive mask of `sage.runtime.attention`


def window_of(text_config: Any) -> int | None:
    """Returns the window in tokens of the layers that have one; None if all layers have full attention."""
    layer_types = getattr(text_config, "layer_types", None)
    if layer_types and SLIDING not in layer_types:
        return None
    return getattr(text_config, "sliding_window", None)


def layer_masks(text_config: Any, visible: Tensor, is_near: Tensor, tile: Tile) -> Mask:
    """Returns a mask for each of `layer_types`, or one for all layers if the configuration names no types.

    Args:
        visible: Bool [N, S] or [B, N, S], the keys that each token may attend to in layers with full attention.
        is_near: Bool [N, S], the keys within its window.
    """
    near = tile(visible & is_near)
    return {FULL: tile(visible), SLIDING: near} if getattr(text_config, "layer_types", None) else near
