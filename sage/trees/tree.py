"""The draft tree as flat arrays, and what policies see of it.

Shapes: N tree nodes (node 0 is the root), F frontier nodes, K candidates per node.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from sage.host_tensors import CPU, longs, onto
from sage.stats import RoundTimes

Said = tuple[list[float], list[int]]  # the draft's K largest probabilities below a node, descending, and their tokens


class Columns(NamedTuple):
    """A tree as numbers, one list of N each: what `Tree` holds as tensors."""

    tokens: list[int]
    parents: list[int]
    depths: list[int]


@dataclass
class Tree:
    """A draft tree; parents stand before children.

    Attributes:
        tokens: LongTensor [N].
        parents: LongTensor [N]; -1 for the root.
        depths: LongTensor [N]; 0 for the root.
        num_levels: the tree is at most this deep.
        said: per node what the draft said below it, None where it was not asked; empty if the policy planned on the device.
    """

    tokens: Tensor
    parents: Tensor
    depths: Tensor
    num_levels: int = 0
    said: Sequence[Said | None] = ()

    @classmethod
    def of(cls, columns: Columns, device: torch.device = CPU, said: Sequence[Said | None] = ()) -> Tree:
        """The tree of these numbers."""
        parents, depths, ancestors = _shape(tuple(columns.parents), tuple(columns.depths), device)
        tree = cls(longs(columns.tokens, device), parents, depths, max(columns.depths), said)
        tree.columns, tree.ancestors = columns, ancestors
        return tree

    @classmethod
    def of_root(cls, token: int, device: torch.device = CPU) -> Tree:
        """The tree of one node."""
        return cls.of(Columns([token], [-1], [0]), device, (None,))

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def depth(self) -> int:
        """Depth of the deepest node."""
        return max(self.columns.depths)

    @cached_property
    def columns(self) -> Columns:
        """The tree as numbers. Waits for the device, unless the tree was made of them."""
        return Columns(*torch.stack((self.tokens, self.parents, self.depths)).tolist())

    @cached_property
    def ancestors(self) -> Tensor:
        """BoolTensor [N, N], row n True at n and its ancestors; nothing waits for the device.

        Paths of up to 2^i steps are those of up to 2^(i-1) steps, twice: a few small products instead of a walk per level.
        """
        reach = torch.eye(len(self), device=self.tokens.device)
        reach.scatter_(1, self.parents.clamp(min=0)[:, None], 1.0)
        for _ in range(max(self.num_levels - 1, 0).bit_length()):
            reach = (reach @ reach).clamp_(max=1.0)
        return reach > 0


@lru_cache(maxsize=1024)
def _shape(parents: tuple[int, ...], depths: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """`Tree.parents`, `depths` and `ancestors` of a tree without its tokens; one shape comes again and again. Read only."""
    return longs(parents, device), longs(depths, device), ancestors_of(parents, device)


def ancestors_of(parents: Sequence[int], device: torch.device) -> Tensor:
    """`Tree.ancestors` from numbers: each node's row is its parent's and the node itself."""
    rows = [bytearray(len(parents))]
    for node, parent in enumerate(parents):
        row = rows[parent + 1][:]
        row[node] = 1
        rows.append(row)
    size = len(parents)
    return onto(device, torch.frombuffer(bytearray().join(rows), dtype=torch.bool, offset=size).view(size, size))


class Frontier:
    """What a policy sees before a level is added.

    Args:
        level: depth of the nodes to be chosen; 1 = below the root.
        probs: [F, K], the draft's K largest probabilities below each frontier node, descending.
        path_probs: [F], the product of probabilities down to each frontier node, or how to compute it: not every policy looks
            at it. One that plans on the host keeps its own account.
        rows: `probs` as numbers, where they are known.
        ends: candidates, row * K + rank, that end the answer: nothing below them is ever emitted. Known on the host alone.
    """

    def __init__(
        self,
        level: int,
        probs: Tensor,
        path_probs: Tensor | Callable[[], Tensor] | None = None,
        rows: list[list[float]] | None = None,
        ends: Collection[int] = (),
    ) -> None:
        self.level, self.probs, self.ends = level, probs, ends
        self._path_probs = path_probs
        if rows is not None:
            self.rows = rows

    @cached_property
    def path_probs(self) -> Tensor:
        """[F]; see above."""
        assert self._path_probs is not None, "a policy that plans on the host keeps its own account of paths"
        return self._path_probs if isinstance(self._path_probs, Tensor) else self._path_probs()

    @cached_property
    def rows(self) -> list[list[float]]:
        """`probs` as numbers. Waits for the device."""
        rows: list[list[float]] = self.probs.tolist()
        return rows


@dataclass
class Growth:
    """A policy's answer: which candidates become nodes, and which of those the draft is asked about next.

    Both name candidates as row * K + rank: a frontier row, and the rank among that row's K candidates.

    Attributes:
        picks: LongTensor [M], increasing, the new nodes.
        expand: LongTensor [X], increasing, some of `picks`; empty ends the drafting.
    """

    picks: Tensor
    expand: Tensor


class HostGrowth(NamedTuple):
    """`Growth` as numbers, from a policy that plans on the host."""

    picks: Sequence[int]
    expand: Sequence[int]


class Drafted(Protocol):
    """What a policy sees once all levels are there: how many nodes, and how probable each path is.

    Attributes:
        path_probs: [N], the product of the draft's probabilities from the root down; 1 for the root.
    """

    @property
    def path_probs(self) -> Tensor: ...

    def __len__(self) -> int: ...


@dataclass
class Outcome:
    """What a policy learns after a round.

    Attributes:
        accepted: number of drafted tokens accepted (without the bonus token).
        tree: the verified tree.
        path: the accepted nodes, the root first.
        context: tokens the target had cached before the round.
        labels: for policies that learn, and to be called when they do, with the number of candidates to judge: the target's
            verdict on what the draft said, a list for each node that it was asked about; greedy 1 or 0, sampling the
            candidate's target probability.
        times: for policies that learn, and to be called when they do: this round's timings. Waits for the device.
    """

    accepted: int
    tree: Tree
    path: Sequence[int]
    context: int = 0
    labels: Callable[[int], list[list[float]]] = field(default=lambda ranks: [])
    times: Callable[[], RoundTimes] = RoundTimes
