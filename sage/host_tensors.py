"""Numbers of the host as tensors. `torch.tensor` looks at every element in turn and takes three times as long and more."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

CPU = torch.device("cpu")


def longs(values: Sequence[int], device: torch.device) -> Tensor:
    """LongTensor [M] of M numbers."""
    if not values:
        return torch.empty(0, dtype=torch.long, device=device)
    return onto(device, torch.frombuffer(array("q", values), dtype=torch.long))


@lru_cache(maxsize=4096)
def few_longs(values: tuple[int, ...], device: torch.device) -> Tensor:
    """The same of a few small numbers that come again and again, like rows and places; never to be written to."""
    return longs(values, device)


def onto(device: torch.device, made: Tensor) -> Tensor:
    """What was made on the host, on `device`; to ask `Tensor.to` for nothing takes as long as a small operation."""
    return made if device == CPU else made.to(device)


def doubles(values: Sequence[float]) -> Tensor:
    """[M] float64 of M numbers, on the CPU."""
    return torch.frombuffer(array("d", values), dtype=torch.float64) if values else torch.empty(0, dtype=torch.float64)


class Mailbox:
    """A few numbers at a time as a tensor that is read at once: memory that both sides see, used again and again.

    A new tensor takes several times as long, most of all between two passes, which leave nothing of it in the caches.
    """

    def __init__(self) -> None:
        self._reserve(64)

    def _reserve(self, size: int) -> None:
        self._numbers = array("q", bytes(8 * size))
        self._tensor = torch.frombuffer(self._numbers, dtype=torch.long)
        self._parts: dict[int, Tensor] = {}

    def put(self, values: Sequence[int], device: torch.device) -> Tensor:
        """LongTensor [M] of M numbers; holds them until the next call."""
        count = len(values)
        if count > len(self._numbers):
            self._reserve(2 * count)
        for place, value in enumerate(values):
            self._numbers[place] = value
        if count not in self._parts:
            self._parts[count] = self._tensor[:count]
        return onto(device, self._parts[count])
