"""Grouped-query attention that takes a tree mask without repeating keys and values.

transformers' `sdpa` materialises repeated keys and values as soon as a mask is given (7x for 28 query and 4 KV heads).
Here the query heads of a group are folded into the query rows instead, and the mask is tiled once per pass.

Shapes: B batch, H query heads, G heads per KV head, N queries, S keys, d head size.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

NAME = "sage_tree"


def tree_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention for transformers' AttentionInterface.

    Args:
        query: [B, H, N, d].
        key, value: [B, H // G, S, d].
        attention_mask: additive float [1, 1, G * N, S] from `tile_mask`; None attends causally
            (N = S) or to everything (N = 1).

    Returns:
        [B, N, H, d] and None for the weights.
    """
    batch, heads, length, size = query.shape
    kv_heads = key.shape[1]
    if attention_mask is None and length > 1:
        out = nn.functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scaling, enable_gqa=heads != kv_heads
        )
    else:
        folded = query.reshape(batch, kv_heads, -1, size)
        out = nn.functional.scaled_dot_product_attention(folded, key, value, attn_mask=attention_mask, scale=scaling)
        out = out.view(batch, heads, length, size)
    return out.transpose(1, 2), None


AttentionInterface.register(NAME, tree_attention)


def tile_mask(visible_NS: Tensor, group: int, dtype: torch.dtype) -> Tensor:
    """Bool [N, S] (True = attend) -> additive float [1, 1, group * N, S], rows ordered like folded query heads."""
    additive = torch.zeros(visible_NS.shape, dtype=dtype, device=visible_NS.device)
    additive.masked_fill_(~visible_NS, torch.finfo(dtype).min)
    return additive.repeat(group, 1)[None, None]


@contextmanager
def use_tree_attention(text_model: nn.Module) -> Iterator[None]:
    """Within the block `text_model` attends with `tree_attention`; its own choice is restored afterwards."""
    config: Any = text_model.config
    before = config._attn_implementation
    config._attn_implementation = NAME
    try:
        yield
    finally:
        config._attn_implementation = before
