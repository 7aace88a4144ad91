"""The draft tree as flat arrays, and the views of it that policies receive and return.

Shapes: N tree nodes (node 0 is the root), F frontier nodes, K candidates per node.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from sage.runtime.host_tensors import CPU, long_tensor, to_device, upload_together
from sage.runtime.timing import RoundTimes

TopK = tuple[list[float], list[int]]  # the draft's K largest probabilities below a node, descending, and their tokens


class Columns(NamedTuple):
    """The fields of a `Tree` as lists of N numbers."""

    tokens: list[int]
    parents: list[int]
    depths: list[int]


@dataclass
class Tree:
    """A draft tree; parents come before children.

    Attributes:
        tokens, parents, depths: LongTensor [N] each; parent -1 and depth 0 for the root.
        find_topk: returns `draft_topk`, which most rounds do not need.
    """

    tokens: Tensor
    parents: Tensor
    depths: Tensor
    find_topk: Callable[[], Sequence[TopK | None]] = tuple

    @classmethod
    def of(cls, columns: Columns, device: torch.device = CPU, find_topk: Callable[[], Sequence[TopK | None]] = tuple) -> Tree:
        """Returns the tree with these fields; one copy to the device."""
        shape = _shape(tuple(columns.parents), tuple(columns.depths))
        tokens, parents, depths, ancestors = upload_together(device, long_tensor(columns.tokens, CPU), *shape)
        tree = cls(tokens, parents, depths, find_topk)
        tree.columns, tree.ancestors = columns, ancestors
        return tree

    @classmethod
    def of_root(cls, token: int, device: torch.device = CPU) -> Tree:
        """Returns the tree of one node."""
        return cls.of(Columns([token], [-1], [0]), device, lambda: (None,))

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def depth(self) -> int:
        """Depth of the deepest node."""
        return max(self.columns.depths)

    @cached_property
    def draft_topk(self) -> Sequence[TopK | None]:
        """Per node the draft's candidates below it, None if it was not expanded."""
        return self.find_topk()

    @cached_property
    def columns(self) -> Columns:
        """The fields as numbers; synchronizes with the device unless `of` made the tree."""
        return Columns(self.tokens.tolist(), self.parents.tolist(), self.depths.tolist())

    @cached_property
    def ancestors(self) -> Tensor:
        """BoolTensor [N, N], row n True at n and its ancestors."""
        return to_device(ancestors_of(self.columns.parents), self.tokens.device)


@lru_cache(maxsize=1024)
def _shape(parents: tuple[int, ...], depths: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor]:
    """Returns `Tree.parents`, `depths` and `ancestors` on the CPU; cached because shapes recur. Do not modify the result."""
    return long_tensor(parents, CPU), long_tensor(depths, CPU), ancestors_of(parents)


def ancestors_of(parents: Sequence[int]) -> Tensor:
    """Returns `Tree.ancestors` from numbers: a node's row is its parent's row plus the node itself."""
    rows = [bytearray(len(parents))]
    for node, parent in enumerate(parents):
        row = rows[parent + 1][:]
        row[node] = 1
        rows.append(row)
    size = len(parents)
    return torch.frombuffer(bytearray().join(rows), dtype=torch.bool, offset=size).view(size, size)


class Frontier(NamedTuple):
    """The expanded nodes of one level and their candidates, as input of a policy.

    Attributes:
        level: depth of the nodes to choose; 1 = below the root.
        rows: the draft's K largest probabilities below each of the F frontier nodes, descending.
        ends: returns the candidates that end the answer, as row * K + rank: nothing below them is emitted.
    """

    level: int
    rows: list[list[float]]
    ends: Callable[[], Collection[int]] = tuple


class NextLevel(NamedTuple):
    """The level that a policy adds below a frontier; candidates are indexed by row * K + rank.

    Attributes:
        picks: [M], the candidates that become nodes; increasing.
        expand: [X], a subset of `picks` that the draft expands next; increasing; empty ends the drafting.
    """

    picks: Sequence[int]
    expand: Sequence[int]


@dataclass
class RoundOutcome:
    """Result of one round, as input of `Policy.observe`.

    Attributes:
        accepted: accepted drafted tokens, without the bonus token.
        tree: the verified tree.
        path: the accepted nodes, the root first.
        context: tokens in the target's cache before the round.
        labels: if the policy needs feedback: maps a number of ranks R to the target's labels of the R most probable
            candidates of every expanded node: 1 or 0 (greedy), or the target's probability of the candidate (sampling).
        times: if the policy needs feedback: returns the timings of this round; may synchronize with the device.
    """

    accepted: int
    tree: Tree
    path: Sequence[int]
    context: int = 0
    labels: Callable[[int], list[list[float]]] = field(default=lambda ranks: [])
    times: Callable[[], RoundTimes] = RoundTimes
