"""Which predictions of a draft are compared with which positions of the target, and how they are divided into chunks.

A row is one prediction of the draft. Several rows may predict the same position: those of every step of an unrolled pass, or of
several blocks. Worked example, three positions of which the first has no chain of two tokens before it, chunks of four rows:

    position   0   1 1   2 2
    step       0   0 1   0 1
    chunk      1   1 1   2 2      chunks end with a position, so that each position belongs to one chunk

Shapes: R rows, S positions, K steps.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple, Self

import torch
from torch import Tensor


class Part(NamedTuple):
    """Consecutive rows, and the positions that they predict."""

    rows: slice
    positions: slice


@dataclass(frozen=True)
class Rows:
    """The rows of a micro-batch, in the order of their positions.

    Attributes:
        position: LongTensor [R], not decreasing.
        step: LongTensor [R], number of tokens drafted before the predicted one.
        counts: number of rows of each of the S positions, on the host, so that no chunk waits for the device.
    """

    position: Tensor
    step: Tensor
    counts: Sequence[int]

    @classmethod
    def one_per_position(cls, positions: int, device: torch.device) -> Self:
        """Returns one row for each position, of the first step."""
        everything = torch.arange(positions, device=device)
        return cls(everything, torch.zeros_like(everything), [1] * positions)

    @classmethod
    def of(cls, is_valid_KS: Tensor) -> Self:
        """Returns the rows of the valid predictions of an unrolled pass; their numbers are read from the device."""
        counts = is_valid_KS.sum(0).tolist()
        place_R = indices_of(is_valid_KS.T, sum(counts))
        return cls(place_R // len(is_valid_KS), place_R % len(is_valid_KS), counts)

    def rows_per_position(self, part: Part) -> int | None:
        """Returns how many rows each position of a part has, None if not all have as many."""
        numbers = set(self.counts[part.positions])
        return numbers.pop() if len(numbers) == 1 else None

    def parts(self, size: int, within: Part | None = None) -> Iterator[Part]:
        """Divides all rows, or those of a part, into parts of at most `size` rows and positions, without splitting a position.

        A position with more rows than `size` is a part of its own.
        """
        ends = self._ends
        first, last = (0, len(self.counts)) if within is None else (within.positions.start, within.positions.stop)
        while first < last:
            start = ends[first]
            stop = min(max(bisect_right(ends, start + size) - 1, first + 1), first + size, last)
            yield Part(slice(start, ends[stop]), slice(first, stop))
            first = stop

    @cached_property
    def _ends(self) -> list[int]:
        """Number of rows before each position, and of all."""
        return [0, *accumulate(self.counts)]


def indices_of(mask: Tensor, count: int) -> Tensor:
    """Returns the flat indices of the `count` true entries of a mask in increasing order, without device synchronization."""
    return (~mask).flatten().to(torch.uint8).argsort(stable=True)[:count]
