"""Weights of a CPU in huge pages: 2 MiB that the processor prefetches without looking up their address in between.

A pass over few tokens takes as long as its weights take to be read. One core of an AMD EPYC (Zen 4) reads them 1.2 to 1.5 times
as fast as from pages of 4 KiB, in which allocators place them (`python -m benchmarks.passes`).
"""

from __future__ import annotations

import mmap

import torch
from torch import Tensor, nn

from sage.io.machine import free_bytes

ALIGNMENT = 64  # bytes: a cache line
MIN_BYTES = 2**21  # of a huge page


def use_huge_pages(module: nn.Module) -> None:
    """Moves the dense weights of a module on a CPU into huge pages, once per tensor; callers hold no other views of them.

    Nothing is moved where the system has no huge pages on request (Linux has), or no room for the weights twice.
    """
    weights = [weight for weight in module.parameters() if _can_move(weight)]
    size = sum(_aligned(weight.nbytes) for weight in weights)
    free = free_bytes(torch.device("cpu"))
    if not hasattr(mmap, "MADV_HUGEPAGE") or size < MIN_BYTES or free is None or size > free:
        return
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    pages.madvise(mmap.MADV_HUGEPAGE)
    start = 0
    with torch.no_grad():
        for weight in weights:
            place = torch.frombuffer(pages, dtype=weight.dtype, count=weight.numel(), offset=start).view(weight.shape)
            weight.data = place.copy_(weight)  # `place` keeps the pages
            start += _aligned(weight.nbytes)


def _can_move(weight: Tensor) -> bool:
    """Whether a weight is a dense tensor of a CPU; those of quantized layers have types of their own."""
    is_dense = type(weight) is nn.Parameter and type(weight.data) is Tensor and weight.is_contiguous()
    return is_dense and weight.device.type == "cpu" and weight.numel() > 0


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
