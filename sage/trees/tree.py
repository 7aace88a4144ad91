"""The draft tree as flat arrays, and the views of it that policies receive and return.

Shapes: N tree nodes (node 0 is the root), F frontier nodes, K candidates per node.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Generic, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from sage.costs.timing import RoundTimes
from sage.host_tensors import CPU, long_tensor, upload_together

TopK = tuple[list[float], list[int]]  # the draft's K largest probabilities below a node, descending, and their tokens
Indices = TypeVar("Indices")


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
        num_levels: upper bound of the depth.
        draft_topk: per node the draft's candidates below it, None if it was not expanded; empty if planned on the device.
        last_probs: [F], the draft's largest probability below each node expanded last, NaN if any of its passes gave NaN; None
            if that was checked already.
    """

    tokens: Tensor
    parents: Tensor
    depths: Tensor
    num_levels: int = 0
    draft_topk: Sequence[TopK | None] = ()
    last_probs: Tensor | None = None

    @classmethod
    def of(cls, columns: Columns, device: torch.device = CPU, draft_topk: Sequence[TopK | None] = ()) -> Tree:
        """Returns the tree with these fields; one copy to the device."""
        shape = _shape(tuple(columns.parents), tuple(columns.depths))
        tokens, parents, depths, ancestors = upload_together(device, long_tensor(columns.tokens, CPU), *shape)
        tree = cls(tokens, parents, depths, max(columns.depths), draft_topk)
        tree.columns, tree.ancestors = columns, ancestors
        return tree

    @classmethod
    def of_root(cls, token: int, device: torch.device = CPU) -> Tree:
        """Returns the tree of one node."""
        return cls.of(Columns([token], [-1], [0]), device, (None,))

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def depth(self) -> int:
        """Depth of the deepest node."""
        return max(self.columns.depths)

    @cached_property
    def columns(self) -> Columns:
        """The fields as numbers; synchronizes with the device unless they were set."""
        return Columns(*self._stacked().tolist())

    @property
    def unread(self) -> Tensor | None:
        """What has to be read to set `columns`, LongTensor [3, N]; None if they are set."""
        return None if "columns" in vars(self) else self._stacked()

    def _stacked(self) -> Tensor:
        return torch.stack((self.tokens, self.parents, self.depths))

    @cached_property
    def ancestors(self) -> Tensor:
        """BoolTensor [N, N], row n True at n and its ancestors; computed without device synchronization.

        Squaring the matrix of paths of up to 2^(i-1) steps gives those of up to 2^i steps.
        """
        reach = torch.eye(len(self), device=self.tokens.device)
        reach.scatter_(1, self.parents.clamp(min=0)[:, None], 1.0)
        for _ in range(max(self.num_levels - 1, 0).bit_length()):
            reach = (reach @ reach).clamp_(max=1.0)
        return reach > 0


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


class Frontier:
    """The expanded nodes of one level and their candidates, as input of a policy.

    Args:
        level: depth of the nodes to choose; 1 = below the root.
        probs: [F, K], the draft's K largest probabilities below each frontier node, descending.
        path_probs: [F], the product of probabilities from the root to each frontier node, or a function that computes it;
            None for policies on the host, which keep track of paths themselves.
        rows: `probs` as numbers, if known.
        ends: candidates that end the answer, as row * K + rank: nothing below them is emitted. Filled on the host only.
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
        assert self._path_probs is not None, "policies on the host keep track of path probabilities themselves"
        return self._path_probs if isinstance(self._path_probs, Tensor) else self._path_probs()

    @cached_property
    def rows(self) -> list[list[float]]:
        """`probs` as numbers; synchronizes with the device."""
        rows: list[list[float]] = self.probs.tolist()
        return rows


class NextLevel(NamedTuple, Generic[Indices]):
    """The level that a policy adds below a frontier; candidates are indexed by row * K + rank.

    `Indices` is LongTensor [M] for policies on the device, a sequence of numbers for policies on the host.

    Attributes:
        picks: [M], the candidates that become nodes; increasing.
        expand: [X], a subset of `picks` that the draft expands next; increasing; empty ends the drafting.
    """

    picks: Indices
    expand: Indices


class DraftedTree(Protocol):
    """The tree before nodes are selected; `path_probs`: [N], product of draft probabilities from the root to each node."""

    @property
    def path_probs(self) -> Tensor: ...

    def __len__(self) -> int: ...


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
