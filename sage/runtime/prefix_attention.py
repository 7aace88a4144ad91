"""Attention of a captured pass in two parts: to the tokens before the tree without a mask, to the tree's own rows with one.

A mask excludes the flash kernel, and it covers as many keys as the graph was captured for. Here the flash kernel reads the
boundaries of the keys from the device, so one graph serves every length, and results are merged by their log-sum-exp. A pass
over a single node needs no mask at all.

A thread block of torch's flash kernel reads all keys of a sequence, and a pass has too few queries for many blocks. So the keys
are divided into blocks of equal size, each a sequence of its own with a copy of the queries: `varlen_attn` takes these since
torch 2.11, pages only since 2.13.

Shapes: N nodes, X visible rows, R gathered rows, P blocks of keys, C cache capacity, G KV heads, M query rows of a KV head (its
heads times N), d head size.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import TypeAlias

import torch
from torch import Tensor
from torch.nn.attention.varlen import AuxRequest, varlen_attn

from sage.io.dtypes import dtype_name
from sage.io.model_files import in_one_line
from sage.runtime.cache import tile_mask
from sage.runtime.package_folder import warn_once

MIN_BLOCK, MAX_BLOCKS = 1024, 16  # keys of a block where the cache is full, and blocks; not measured
HALF = (torch.float16, torch.bfloat16)
KERNEL_DEVICES = ("cuda",)  # others compute by `softmax_attention`
MAX_HEAD_DIM = 256
NODES, KV_HEADS, GROUP, CAPACITY = 4, 2, 3, 4096  # of a trial
MAX_ERROR = 0.03  # results are averages of standard normal values, in half precision


@dataclass(frozen=True)
class KeyParts:
    """The keys that a layer attends to.

    Attributes:
        query_ends: IntTensor [P + 1], boundaries of the copies of the queries: 0, M, .., P * M.
        key_ends: IntTensor [P + 1], boundaries of the blocks of cache rows that are read without a mask; a block may be empty.
        most: number of rows that a block has at most.
        rows: LongTensor [R], cache rows that are read with a mask; None if there is no such row.
        mask: additive [1, 1, M, R]; some row is visible to every query.
    """

    query_ends: Tensor
    key_ends: Tensor
    most: int
    rows: Tensor | None = None
    mask: Tensor | None = None


PassKeys: TypeAlias = dict[bool, KeyParts]  # by whether a layer has a sliding window


def key_parts(
    visible: Tensor,
    visible_rows: Tensor,
    capacity: int,
    group: int,
    dtype: torch.dtype,
    window: int | None = None,
    min_block: int = MIN_BLOCK,
) -> KeyParts:
    """Returns the keys of a layer. Nothing is read from the device.

    The windows of the nodes begin at different rows. Rows that lie in all of them are read without a mask, the others with one.

    Args:
        visible: BoolTensor [N, X], attention of each node to X rows. A single entry is that of a node to itself.
        visible_rows: LongTensor [X], these rows; all before the first of them are visible to all nodes.
        capacity: C.
        group: query heads per KV head.
        dtype: of the mask.
        window: of a layer whose tokens attend to the last `window` ones, themselves included.
    """
    (nodes, seen), before = visible.shape, visible_rows[:1]
    most = capacity if window is None else min(capacity, window)
    first = torch.zeros_like(before) if window is None else (before + seen - window).clamp(min=0).minimum(before)
    last = before + 1 if seen == 1 else before
    num_blocks = min(max(most // min_block, 1), MAX_BLOCKS)
    steps = torch.arange(num_blocks + 1, device=visible.device)
    query_ends, key_ends = (steps * (group * nodes)).int(), (first + (last - first) * steps // num_blocks).int()
    longest = -(-most // num_blocks)
    if seen == 1:
        return KeyParts(query_ends, key_ends, longest)
    if window is None:
        return KeyParts(query_ends, key_ends, longest, visible_rows, tile_mask(_seeing_something(visible), group, dtype))
    place = visible.long().cumsum(-1)  # of a row on the path of the node, from 1 on
    depth = place[:, -1:]
    border = before + 1 - window + torch.arange(min(seen, window) - 1, device=visible.device)
    is_near = (border >= 0) & (border >= before + depth - window)
    mask = _seeing_something(torch.cat((is_near, visible & (place > depth - window)), 1))
    rows = torch.cat((border.clamp(min=0), visible_rows))
    return KeyParts(query_ends, key_ends, longest, rows, tile_mask(mask, group, dtype))


def _seeing_something(visible: Tensor) -> Tensor:
    """Lets rows of padding, which see nothing, see everything: their results are dropped, but have to be finite."""
    return visible | ~visible.any(1, keepdim=True)


def attend_in_parts(query: Tensor, key: Tensor, value: Tensor, parts: KeyParts, scale: float) -> Tensor:
    """Returns the attention [1, H, N, d] of queries [1, H, N, d] to parts of the cache, whose buffers are [1, G, C, d]."""
    folded = query.reshape(key.shape[1], -1, query.shape[-1])
    key, value = key[0], value[0]
    out, lse = _unmasked(folded, key, value, parts, scale)
    if parts.rows is not None and parts.mask is not None:
        keys, values = key.index_select(1, parts.rows), value.index_select(1, parts.rows)
        masked, masked_lse = _masked(folded, keys, values, parts.mask, scale)
        out, lse = torch.cat((out, masked[None])), torch.cat((lse, masked_lse[None]))
    return merge(out, lse).reshape(query.shape)


def merge(out: Tensor, lse: Tensor) -> Tensor:
    """Returns the attention [.., d] to disjoint sets of keys together, from the attention to each of them.

    Args:
        out: [P, .., d], zeros where a set is empty.
        lse: [P, ..], log-sum-exp of the scores, at least in float32; infinite where a set is empty, of either sign (the flash
            kernel gives plus infinity).
    """
    if len(out) == 1:
        return out[0]
    weights = lse.masked_fill(lse.isinf(), torch.finfo(lse.dtype).min).softmax(0)
    return (out * weights[..., None]).sum(0).to(out.dtype)


def softmax_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Returns attention [.., G, M, d] and its log-sum-exp [.., G, M]; zeros and minus infinity where a query sees no key.

    Computes in float32, or in float64 for such queries.

    Args:
        query: [G, M, d]; key, value: [G, S, d].
        mask: additive, broadcast to [.., G, M, S].
    """
    kind = torch.promote_types(query.dtype, torch.float32)
    scores = query.to(kind) @ key.to(kind).transpose(1, 2) * scale + mask
    lse = scores.logsumexp(-1)
    weights = (scores - lse.masked_fill(lse == -torch.inf, 0)[..., None]).exp()
    return (weights @ value.to(kind)).to(query.dtype), lse


def _unmasked(query: Tensor, key: Tensor, value: Tensor, parts: KeyParts, scale: float) -> tuple[Tensor, Tensor]:
    """Returns attention [P, G, M, d] to the blocks of keys, and its log-sum-exp [P, G, M]."""
    num_blocks, size = len(parts.key_ends) - 1, query.shape[1]
    if query.device.type not in KERNEL_DEVICES:
        place = torch.arange(key.shape[1], device=query.device)
        is_read = (place >= parts.key_ends[:-1, None]) & (place < parts.key_ends[1:, None])
        mask = torch.zeros_like(is_read, dtype=query.dtype).masked_fill(~is_read, -torch.inf)
        return softmax_attention(query, key, value, mask[:, None, None], scale)
    copies, key, value = query.transpose(0, 1).repeat(num_blocks, 1, 1), key.transpose(0, 1), value.transpose(0, 1)
    ends = (parts.query_ends, parts.key_ends)
    out, lse = varlen_attn(copies, key, value, *ends, size, parts.most, return_aux=AuxRequest(lse=True), scale=scale)
    return out.unflatten(0, (num_blocks, size)).transpose(1, 2), lse.unflatten(1, (num_blocks, size)).transpose(0, 1)


def _masked(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Returns attention [G, M, d] to rows [G, R, d] under a mask [1, 1, M, R], and its log-sum-exp [G, M]."""
    if query.device.type not in KERNEL_DEVICES:
        return softmax_attention(query, key, value, mask[0], scale)
    out, lse, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(
        query[None], key[None], value[None], mask.expand(-1, len(query), -1, -1), True, scale=scale
    )
    return out[0], lse[0, :, : query.shape[1]]  # the kernel pads it to a multiple of 32


def has_flash_kernel(device: torch.device) -> bool:
    """Whether torch's flash kernel runs on the device: an NVIDIA GPU of compute capability 8.0 or higher."""
    return device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 0)


def why_masked(device: torch.device, dtype: torch.dtype, head_dim: int) -> str:
    """Returns why a target's captured passes mask all keys; empty if they attend in two parts. Warns once of each reason.

    Devices without kernels for it compute by `softmax_attention`.
    """
    if device.type not in KERNEL_DEVICES:
        return ""
    if dtype not in HALF:
        reason = f"{dtype_name(dtype)} is not a dtype of the flash kernel; float16 and bfloat16 are"
    elif head_dim % 8 or head_dim > MAX_HEAD_DIM:
        reason = f"a head size of {head_dim} is not a multiple of 8 up to {MAX_HEAD_DIM}"
    elif not has_flash_kernel(device):
        reason = "torch's flash kernel needs an NVIDIA GPU of compute capability 8.0 or higher"
    else:
        reason = kernel_problem(device, dtype, head_dim)
    if reason:
        warn_once(f"passes: captured passes mask all keys, which slows those over one node as well: {reason}")
    return reason


@cache
def kernel_problem(device: torch.device, dtype: torch.dtype, head_dim: int) -> str:
    """Compares the kernels with `softmax_attention` on random keys; returns how they fail or differ, empty if they agree."""
    try:
        error = max(trial_error(device, dtype, head_dim, before, window) for before in (0, 1, 700) for window in (None, 300))
    except RuntimeError as failure:
        return f"torch {torch.__version__}: {in_one_line(failure)[:300]}"
    return "" if error < MAX_ERROR else f"the kernels of torch {torch.__version__} differ from the reference by {error:.2g}"


def trial_error(device: torch.device, dtype: torch.dtype, head_dim: int, before: int, window: int | None) -> float:
    """Returns the largest error of the attention of a chain of nodes after `before` tokens; infinity for NaN."""
    generator, heads = torch.Generator().manual_seed(0), KV_HEADS * GROUP
    shapes = (1, heads, NODES, head_dim), (1, KV_HEADS, CAPACITY, head_dim), (1, KV_HEADS, CAPACITY, head_dim)
    query, key, value = (torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes)
    rows = before + torch.arange(NODES, device=device)
    visible = torch.ones(NODES, NODES, dtype=torch.bool, device=device).tril()
    parts = key_parts(visible, rows, CAPACITY, GROUP, dtype, window)
    found = attend_in_parts(query, key, value, parts, head_dim**-0.5)
    place = torch.arange(CAPACITY, device=device)
    seen = (place <= rows[:, None]) & (place > rows[:, None] - (window or CAPACITY))
    folded, mask = query.reshape(KV_HEADS, -1, head_dim), tile_mask(seen, GROUP, torch.float32)[0]
    expected, _ = softmax_attention(folded, key[0], value[0], mask, head_dim**-0.5)
    return float((found - expected.reshape(query.shape)).float().abs().nan_to_num(nan=math.inf).max())
