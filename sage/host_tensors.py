"""Host numbers as tensors, built from `array` buffers: `torch.tensor` inspects every element and takes three times as long."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from functools import lru_cache
from typing import TypeAlias

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
    """Moves a CPU tensor to `device`; skips `Tensor.to` for the CPU, where it takes as long as a small operation."""
    return tensor if device == CPU else tensor.to(device)


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
        """Returns tokens [M] as a LongTensor: a tensor as is, a sequence as a view of the buffer, valid until the next call."""
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
