"""Whether attention in two parts runs on a device: known conditions, and one comparison with the reference per process."""

from __future__ import annotations

import math
from functools import cache, partial

import torch

from sage.io.dtypes import dtype_name
from sage.io.model_files import in_one_line
from sage.runtime.attention import HALF, has_flash_kernel, tile_mask
from sage.runtime.package_folder import warn_once
from sage.runtime.prefix_attention import KERNEL_DEVICES, attend_in_parts, key_parts, softmax_attention

MAX_HEAD_DIM = 256
NODES, KV_HEADS, GROUP, CAPACITY = 4, 2, 3, 4096  # of a trial
MAX_ERROR = 0.03  # results are averages of standard normal values, in half precision


def why_masked(device: torch.device, dtype: torch.dtype, head_dim: int) -> str:
    """Returns why a target's captured passes mask all keys; empty if they attend in two parts. Warns once of each reason.

    Devices without kernels for it compute by `softmax_attention`.
    """
    if device.type not in KERNEL_DEVICES:
        return ""
    reason = _missing(device, dtype, head_dim) or kernel_problem(device, dtype, head_dim)
    if reason:
        warn_once(f"passes: captured passes mask all keys, which slows those over one node as well: {reason}")
    return reason


def _missing(device: torch.device, dtype: torch.dtype, head_dim: int) -> str:
    """Returns the condition that is not met; empty if there is none."""
    if dtype not in HALF:
        return f"{dtype_name(dtype)} is not a dtype of the flash kernel; float16 and bfloat16 are"
    if head_dim % 8 or head_dim > MAX_HEAD_DIM:
        return f"a head size of {head_dim} is not a multiple of 8 up to {MAX_HEAD_DIM}"
    return "" if has_flash_kernel(device) else "torch's flash kernel needs an NVIDIA GPU of compute capability 8.0 or higher"


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
    parts = key_parts(visible, rows, CAPACITY, GROUP, partial(tile_mask, group=GROUP, dtype=dtype), window)
    found = attend_in_parts(query, key, value, parts, head_dim**-0.5)
    place = torch.arange(CAPACITY, device=device)
    seen = (place <= rows[:, None]) & (place > rows[:, None] - (window or CAPACITY))
    folded, mask = query.reshape(KV_HEADS, -1, head_dim), tile_mask(seen, GROUP, torch.float32)[0]
    expected, _ = softmax_attention(folded, key[0], value[0], mask, head_dim**-0.5)
    return float((found - expected.reshape(query.shape)).float().abs().nan_to_num(nan=math.inf).max())
