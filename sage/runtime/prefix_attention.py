"""Attention of a captured pass in two parts: to the tokens before the tree without a mask, to the tree's own rows with one.

A mask excludes the flash kernel, whose parallelism over keys is what makes passes with few queries fast, and it covers as many
keys as the graph was captured for. Here the flash kernel reads the number of keys from the device, so one graph serves every
length, and the two results are merged by their log-sum-exp. A pass over a single node needs no mask at all.

torch 2.13 splits the keys of `varlen_attn` over thread blocks only where they are paged (`mha_varlen_fwd` in
aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp), so the cache is viewed as pages in order.

Shapes: N nodes, X visible rows, R gathered rows, P pages, C cache capacity, G KV heads, M query rows of a KV head (its heads
times N), d head size.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.attention.varlen import AuxRequest, varlen_attn

PAGE = 256  # keys; `varlen_attn` takes multiples of it
KERNEL_DEVICES = ("cuda",)  # others compute by `softmax_attention`


@dataclass(frozen=True)
class KeyParts:
    """The keys that a layer attends to.

    Attributes:
        pages: IntTensor [1, P], the pages of the cache that are read without a mask, in increasing order.
        count: IntTensor [1], the number of keys in them that are read, from the first on; may be 0.
        query_ends, key_ends: IntTensor [2], 0 and M, and 0 and the number of keys of all pages.
        rows: LongTensor [R], cache rows that are read with a mask; None if there is no such row.
        mask: additive [1, 1, M, R]; some row is visible to every query.
    """

    pages: Tensor
    count: Tensor
    query_ends: Tensor
    key_ends: Tensor
    rows: Tensor | None = None
    mask: Tensor | None = None


@dataclass(frozen=True)
class PassKeys:
    """The keys of the layers with full attention, and of those with a sliding window; each None if there is none."""

    full: KeyParts | None
    sliding: KeyParts | None


def full_keys(
    visible: Tensor, visible_rows: Tensor, capacity: int, group: int, tile: Callable[[Tensor], Tensor], page: int = PAGE
) -> KeyParts:
    """Returns the keys of a layer with full attention. Nothing is read from the device.

    Args:
        visible: BoolTensor [N, X], attention of each node to X rows. A single entry is that of a node to itself.
        visible_rows: LongTensor [X], these rows; all before the first of them are visible to all nodes.
        capacity: C, a multiple of `page`.
        group: query heads per KV head.
        tile: returns the additive mask of a Boolean one, see `sage.runtime.attention.tile_mask`.
    """
    nodes, seen = visible.shape
    pages, before = _increasing(capacity // page, visible)[None], visible_rows[:1].int()
    ends = (_increasing(2, visible) * (group * nodes), _increasing(2, visible) * capacity)
    if seen == 1:
        return KeyParts(pages, before + 1, *ends)
    return KeyParts(pages, before, *ends, visible_rows, tile(_seeing_something(visible)))


def sliding_keys(
    visible: Tensor,
    visible_rows: Tensor,
    capacity: int,
    group: int,
    tile: Callable[[Tensor], Tensor],
    window: int,
    page: int = PAGE,
) -> KeyParts:
    """Returns the keys of a layer whose tokens attend to the last `window` ones, themselves included.

    The windows of the nodes begin at different rows. Pages that lie in all of them are read without a mask, the rows before
    them with one. Arguments as for `full_keys`.
    """
    nodes, seen = visible.shape
    place = visible.long().cumsum(-1)  # of a row on the path of the node, from 1 on
    depth = place[:, -1:]
    before = visible_rows[:1]
    first = ((before + seen - window).clamp(min=0) + page - 1) // page  # page that begins inside of every window
    num_pages = min(capacity // page, window // page + 1)
    pages = (first + torch.arange(num_pages, device=visible.device)).clamp(max=capacity // page - 1)
    border = before + 1 - window + torch.arange(min(seen + page - 2, window - 1), device=visible.device)
    is_near = (border >= 0) & (border < torch.minimum(first * page, before)) & (border >= before + depth - window)
    mask = _seeing_something(torch.cat((is_near, visible & (place > depth - window)), 1))
    count = (before - first * page).clamp(min=0)
    ends = (_increasing(2, visible) * (group * nodes), _increasing(2, visible) * (num_pages * page))
    rows = torch.cat((border.clamp(min=0), visible_rows))
    return KeyParts(pages.int()[None], count.int(), *ends, rows, tile(mask))


def _increasing(count: int, like: Tensor) -> Tensor:
    return torch.arange(count, dtype=torch.int32, device=like.device)


def _seeing_something(visible: Tensor) -> Tensor:
    """Lets rows of padding, which see nothing, see everything: their results are dropped, but have to be finite."""
    return visible | ~visible.any(1, keepdim=True)


def attend_in_parts(query: Tensor, key: Tensor, value: Tensor, parts: KeyParts, scale: float, page: int = PAGE) -> Tensor:
    """Returns the attention [1, H, N, d] of queries [1, H, N, d] to parts of the cache, whose buffers are [1, G, C, d]."""
    folded = query.reshape(key.shape[1], -1, query.shape[-1])
    key, value = key[0], value[0]
    out, lse = _unmasked(folded, key, value, parts, scale, page)
    if parts.rows is not None and parts.mask is not None:
        keys, values = key.index_select(1, parts.rows), value.index_select(1, parts.rows)
        out = merge(out, lse, *_masked(folded, keys, values, parts.mask, scale))
    return out.reshape(query.shape)


def merge(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> Tensor:
    """Returns the attention to two disjoint sets of keys together, from the attention to each of them.

    Args:
        out, other: [.., d], finite also where a set is empty.
        lse, other_lse: [..], log-sum-exp of the scores, at least in float32. For an empty set `lse` is infinite, of either sign
            (the flash kernel gives plus infinity), and `other_lse` minus infinity.

    Returns:
        [.., d]; if both sets are empty, `out`.
    """
    lowest = torch.finfo(lse.dtype).min
    share = (lse.nan_to_num(nan=math.nan, posinf=lowest, neginf=lowest) - other_lse).sigmoid()[..., None]
    return (out * share + other * (1 - share)).to(out.dtype)


def softmax_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Returns attention [G, M, d] and its log-sum-exp [G, M]; zeros and minus infinity where a query sees no key.

    Computes in float32, or in float64 for such queries.

    Args:
        query: [G, M, d]; key, value: [G, S, d].
        mask: additive, broadcast to [G, M, S].
    """
    kind = torch.promote_types(query.dtype, torch.float32)
    scores = query.to(kind) @ key.to(kind).transpose(1, 2) * scale + mask
    lse = scores.logsumexp(-1)
    weights = (scores - lse.masked_fill(lse == -torch.inf, 0)[..., None]).exp()
    return (weights @ value.to(kind)).to(query.dtype), lse


def _unmasked(query: Tensor, key: Tensor, value: Tensor, parts: KeyParts, scale: float, page: int) -> tuple[Tensor, Tensor]:
    """Returns attention [G, M, d] to the pages and its log-sum-exp [G, M]."""
    if query.device.type not in KERNEL_DEVICES:
        rows = (parts.pages.long().view(-1, 1) * page + torch.arange(page, device=query.device)).view(-1)
        is_read = torch.arange(len(rows), device=query.device) < parts.count
        mask = torch.zeros_like(is_read, dtype=query.dtype).masked_fill(~is_read, -torch.inf)
        return softmax_attention(query, key.index_select(1, rows), value.index_select(1, rows), mask, scale)
    paged_key, paged_value = (states.unflatten(1, (-1, page)).permute(1, 2, 0, 3) for states in (key, value))
    out, lse = varlen_attn(
        query.transpose(0, 1),
        paged_key,
        paged_value,
        parts.query_ends,
        parts.key_ends,
        query.shape[1],
        parts.pages.shape[1] * page,
        return_aux=AuxRequest(lse=True),
        scale=scale,
        seqused_k=parts.count,
        block_table=parts.pages,
    )
    return out.transpose(0, 1), lse


def _masked(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Returns attention [G, M, d] to rows [G, R, d] under a mask [1, 1, M, R], and its log-sum-exp [G, M]."""
    if query.device.type not in KERNEL_DEVICES:
        return softmax_attention(query, key, value, mask[0], scale)
    out, lse, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(
        query[None], key[None], value[None], mask.expand(-1, len(query), -1, -1), True, scale=scale
    )
    return out[0], lse[0, :, : query.shape[1]]  # the kernel pads it to a multiple of 32
