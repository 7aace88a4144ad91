"""Whether attention in two parts runs on a device: known conditions, and one comparison with the reference per process."""

from __future__ import annotations

import inspect
import math
from functools import cache, partial

import torch
from torch.nn.attention.varlen import varlen_attn

from sage.io.model_files import in_one_line
from sage.runtime.attention import has_flash_kernel, tile_mask
from sage.runtime.package_folder import warn_once
from sage.runtime.prefix_attention import KERNEL_DEVICES, PAGE, attend_in_parts, full_keys, sliding_keys, softmax_attention

MAX_HEAD_DIM = 256
NODES, KV_HEADS, GROUP, PAGES = 4, 2, 3, 4  # of a trial
MAX_ERROR = 0.03  # results are averages of standard normal values, in half precision


def has_kernels(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    """Whether attention in two parts can run: on a GPU with the kernels that it needs, elsewhere by `softmax_attention`."""
    if device.type not in KERNEL_DEVICES:
        return True
    return (
        dtype in (torch.float16, torch.bfloat16)
        and head_dim % 8 == 0
        and head_dim <= MAX_HEAD_DIM
        and has_flash_kernel(device)
        and "block_table" in inspect.signature(varlen_attn).parameters
        and kernels_agree(device, dtype, head_dim)
    )


@cache
def kernels_agree(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    """Whether the kernels give the results of `softmax_attention` on random keys; warns if they do not.

    They raise with a torch whose default flash kernel takes no pages.
    """
    try:
        error = max(trial_error(device, dtype, head_dim, before, window) for before in (0, 1, 700) for window in (None, 300))
        problem = "" if error < MAX_ERROR else f"results differ by {error:.2g}"
    except RuntimeError as failure:
        problem = in_one_line(failure)[:300]
    if problem:
        warn_once(f"passes: keys cannot be read without a mask ({problem}); captured passes mask all of them")
    return not problem


def trial_error(device: torch.device, dtype: torch.dtype, head_dim: int, before: int, window: int | None) -> float:
    """Returns the largest error of the attention of a chain of nodes after `before` tokens; infinity for NaN."""
    generator, capacity, heads = torch.Generator().manual_seed(0), PAGES * PAGE, KV_HEADS * GROUP
    shapes = (1, heads, NODES, head_dim), (1, KV_HEADS, capacity, head_dim), (1, KV_HEADS, capacity, head_dim)
    query, key, value = (torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes)
    rows = before + torch.arange(NODES, device=device)
    visible = torch.ones(NODES, NODES, dtype=torch.bool, device=device).tril()
    given = (visible, rows, capacity, GROUP, partial(tile_mask, group=GROUP, dtype=dtype))
    parts = full_keys(*given) if window is None else sliding_keys(*given, window)
    found = attend_in_parts(query, key, value, parts, head_dim**-0.5)
    place = torch.arange(capacity, device=device)
    seen = (place <= rows[:, None]) & (place > rows[:, None] - (window or capacity))
    folded, mask = query.reshape(KV_HEADS, -1, head_dim), tile_mask(seen, GROUP, torch.float32)[0]
    expected, _ = softmax_attention(folded, key[0], value[0], mask, head_dim**-0.5)
    return float((found - expected.reshape(query.shape)).float().abs().nan_to_num(nan=math.inf).max())
