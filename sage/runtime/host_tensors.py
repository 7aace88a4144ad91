"""Numbers of the host as tensors, and copies between host and device with as few synchronizations as possible.

Tensors are built from `array` buffers: `torch.tensor` inspects every element and takes three times as long. A copy to a device
goes through pinned memory and does not block; the allocator of pinned memory reuses a block only after its copy. A copy to the
host is a device synchronization, so values needed together are read together.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from functools import lru_cache
from itertools import chain
from typing import Any, TypeAlias

import torch
from torch import Tensor

CPU = torch.device("cpu")
Tokens: TypeAlias = Sequence[int] | Tensor  # [M] token ids: numbers of the host, or a LongTensor


def long_tensor(values: Sequence[int], device: torch.device) -> Tensor:
    """Returns `values` as a LongTensor [M]."""
    if not values:
        return torch.empty(0, dtype=torch.long, device=device)
    return to_device(torch.frombuffer(array("q", values), dtype=torch.long), device)


@lru_cache(maxsize=4096)
def cached_index(values: tuple[int, ...], device: torch.device) -> Tensor:
    """Cached `long_tensor` for short index lists. The result is shared; do not modify it."""
    return long_tensor(values, device)


def double_tensor(values: Sequence[float]) -> Tensor:
    """Returns `values` as a float64 tensor [M] on the CPU."""
    return torch.frombuffer(array("d", values), dtype=torch.float64) if values else torch.empty(0, dtype=torch.float64)


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Moves a CPU tensor to `device` without waiting; skips `Tensor.to` for the CPU, where it takes as long as a small
    operation.
    """
    return tensor if device == CPU else tensor.pin_memory().to(device, non_blocking=True)


def upload_together(device: torch.device, *tensors: Tensor) -> Sequence[Tensor]:
    """Moves CPU tensors to `device` with one copy; they share memory there. Those with larger elements come first."""
    return tensors if device == CPU else _unpacked(to_device(_packed(tensors), device), tensors)


def read_together(first: Tensor, *more: Tensor | None) -> Sequence[Any]:
    """Copies tensors of one device to the CPU with one device synchronization. Those with larger elements come first; None
    stays None.
    """
    if first.is_cpu:
        return first, *more
    found = [first, *(tensor for tensor in more if tensor is not None)]
    copied = iter(_unpacked(_packed(found).cpu(), found))
    return [None if tensor is None else next(copied) for tensor in (first, *more)]


def _packed(tensors: Sequence[Tensor]) -> Tensor:
    flat = [tensor.contiguous().as_strided((tensor.numel(),), (1,)) for tensor in tensors]  # one element may have any stride
    return torch.cat([tensor.view(torch.uint8) for tensor in flat])


def _unpacked(packed: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    parts = packed.split([tensor.numel() * tensor.element_size() for tensor in like])
    return [part.view(tensor.dtype).view(tensor.shape) for part, tensor in zip(parts, like, strict=True)]


def take_runs(values: Tensor, index: Sequence[int]) -> Tensor:
    """Returns `values[index]` of a vector for an increasing index, without copying the index to the device: concatenates the
    runs of consecutive indices, which are views.
    """
    starts = [place for place, node in enumerate(index) if place == 0 or node != index[place - 1] + 1]
    ends = [*starts[1:], len(index)]
    runs = [values.narrow(0, index[start], end - start) for start, end in zip(starts, ends, strict=True)]
    return runs[0] if len(runs) == 1 else torch.cat(runs)


def join_tokens(parts: Sequence[Tokens]) -> Tokens:
    """Concatenates tokens that are all numbers or all tensors."""
    if isinstance(parts[0], Tensor):
        return parts[0] if len(parts) == 1 else torch.cat([part for part in parts if isinstance(part, Tensor)])
    return list(chain.from_iterable(parts))


class TokenStagingBuffer:
    """Reusable host memory of a draft session for the tokens of its next pass, staged on `device`.

    Allocating a tensor takes several times as long, in particular after a model pass, which evicts everything from the caches.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._reserve(64)

    def _reserve(self, size: int) -> None:
        self._values = array("q", bytes(8 * size))
        self._tensor = torch.frombuffer(self._values, dtype=torch.long)
        self._views: dict[int, Tensor] = {}

    def stage(self, tokens: Tokens) -> Tensor:
        """Returns tokens [M] as a LongTensor: a tensor as is, a sequence on the CPU as a view valid until the next call."""
        if isinstance(tokens, Tensor):
            return tokens
        count = len(tokens)
        if count > len(self._values):
            self._reserve(2 * count)
        for place, token in enumerate(tokens):
            self._values[place] = token
        if count not in self._views:
            self._views[count] = self._tensor[:count]
        return to_device(self._views[count], self.device)
