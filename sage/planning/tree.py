"""The draft tree as flat arrays, its growth level by level, and the views of it that policies receive and return.

While a tree grows it is a few lists: one device synchronization per level reads the candidates, and one copy to the device
uploads the tree.

Shapes: N tree nodes (node 0 is the root), F frontier nodes, K candidates per node, M nodes of a new level, X expanded nodes of
it, R selected nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache, partial
from typing import NamedTuple

import torch
from torch import Tensor

from sage.runtime.host_tensors import (
    CPU,
    Tokens,
    cached_index,
    long_tensor,
    read_together,
    take_runs,
    to_device,
    upload_together,
)
from sage.runtime.timing import RoundTimes

DROPPED = "the root or a kept node's parent was dropped"
TopK = tuple[list[float], list[int]]  # the draft's K largest probabilities below a node, descending, and their tokens


class Columns(NamedTuple):
    """The fields of a `Tree` as lists of N numbers."""

    tokens: list[int]
    parents: list[int]
    depths: list[int]


class Drafted(NamedTuple):
    """All nodes that a round drafted, as lists: the verified ones in the order of their tree, then the others.

    Attributes:
        topk: per node the draft's candidates below it, None if it was not expanded.
    """

    tokens: list[int]
    parents: list[int]
    depths: list[int]
    topk: list[TopK | None]


@dataclass
class Tree:
    """A draft tree; parents come before children.

    Attributes:
        tokens, parents, depths: LongTensor [N] each; parent -1 and depth 0 for the root.
        draft_topk: per node the draft's candidates below it, None if it was not expanded.
        find_drafted: returns all nodes of the round, which only a trace needs; None for a tree without a builder.
    """

    tokens: Tensor
    parents: Tensor
    depths: Tensor
    draft_topk: Sequence[TopK | None] = ()
    find_drafted: Callable[[], Drafted] | None = None

    @classmethod
    def of(cls, columns: Columns, device: torch.device = CPU, draft_topk: Sequence[TopK | None] = ()) -> Tree:
        """Returns the tree with these fields; one copy to the device."""
        parents_, depths_ = tuple(columns.parents), tuple(columns.depths)  # shapes recur
        shape = cached_index(parents_, CPU), cached_index(depths_, CPU), ancestors_of(parents_)
        tokens, parents, depths, ancestors = upload_together(device, long_tensor(columns.tokens, CPU), *shape)
        tree = cls(tokens, parents, depths, draft_topk)
        tree.columns, tree.ancestors = columns, ancestors
        return tree

    @classmethod
    def of_root(cls, token: int, device: torch.device = CPU) -> Tree:
        """Returns the tree of one node."""
        return cls.of(Columns([token], [-1], [0]), device, [None])

    def __len__(self) -> int:
        return len(self.columns.tokens)  # `len` of a tensor takes microseconds

    @property
    def depth(self) -> int:
        """Depth of the deepest node."""
        return max(self.columns.depths)

    @cached_property
    def columns(self) -> Columns:
        """The fields as numbers; synchronizes with the device unless `of` made the tree."""
        return Columns(self.tokens.tolist(), self.parents.tolist(), self.depths.tolist())

    @cached_property
    def ancestors(self) -> Tensor:
        """BoolTensor [N, N], row n True at n and its ancestors."""
        return to_device(ancestors_of(tuple(self.columns.parents)), self.tokens.device)


@lru_cache(maxsize=1024)
def ancestors_of(parents: tuple[int, ...]) -> Tensor:
    """Returns `Tree.ancestors` from numbers: a node's row is its parent's row plus the node itself. Do not modify it."""
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


class _Level(NamedTuple):
    """The expanded nodes [F] of one level, and the draft's probabilities and tokens below each, [F, K]."""

    nodes: Sequence[int]
    rows: list[list[float]]
    tokens: list[list[int]]


class TreeBuilder:
    """Builds the tree of one round: `open_level`, `add` and `advance` once per level, then `tree`.

    Args:
        root: token of the root.
        device: of the draft's candidates and of the tree.
        eos: tokens that end the answer.
    """

    def __init__(self, root: int, device: torch.device, eos: Collection[int] = ()) -> None:
        self.device, self.eos = device, frozenset(eos)
        self._tokens, self._parents, self._depths = [root], [-1], [0]
        self._levels: list[_Level] = []
        self._on_device: Tensor | None = None  # tokens of the last level's candidates [F, K], if they lie on an accelerator
        self._frontier: Sequence[int] = [0]

    def open_level(self, probs: Tensor, tokens: Tensor) -> Frontier:
        """Returns the policy's view of the candidates below each frontier node, [F, K] each, descending; synchronizes with the
        device.
        """
        host_tokens, host_probs = read_together(tokens, probs)
        level = _Level(self._frontier, host_probs.tolist(), host_tokens.tolist())
        self._on_device = None if tokens.is_cpu else tokens
        self._levels.append(level)
        return Frontier(len(self._levels), level.rows, partial(_ends, level.tokens, self.eos))

    def add(self, level: NextLevel) -> None:
        """Adds the nodes that the policy chose below the current frontier."""
        nodes, _, tokens = self._levels[-1]
        width = len(tokens[0])
        for pick in level.picks:
            row, rank = divmod(pick, width)
            self._tokens.append(tokens[row][rank])
            self._parents.append(nodes[row])
        self._depths += [len(self._levels)] * len(level.picks)

    @property
    def depth(self) -> int:
        """Number of levels that were opened."""
        return len(self._levels)

    def advance(self, level: NextLevel) -> tuple[Tensor, Tokens]:
        """Makes the nodes in `level.expand` the frontier; returns their parents' rows in the last one and their tokens, [X]."""
        nodes = range(len(self._tokens) - len(level.picks), len(self._tokens))
        if len(level.expand) < len(nodes):
            node_of = dict(zip(level.picks, nodes, strict=True))
            self._frontier = [node_of[pick] for pick in level.expand]
        else:
            self._frontier = nodes
        if self._on_device is None:
            width = len(self._levels[-1].tokens[0])
            rows = cached_index(tuple([pick // width for pick in level.expand]), self.device)
            return rows, [self._tokens[node] for node in self._frontier]
        rows_FK = _rows(*self._on_device.shape, self.device)
        return take_runs(rows_FK, level.expand), take_runs(self._on_device.reshape(-1), level.expand)

    def tree(self, keep: Sequence[int] | None = None) -> Tree:
        """Returns the tree of the nodes `keep` [R], given by `Policy.select`; AssertionError if an ancestor is missing."""
        if keep is None:
            nodes: Sequence[int] = range(len(self._tokens))
            columns = Columns(self._tokens, self._parents, self._depths)
        else:
            nodes, columns = keep, self._columns(keep)
        tree = Tree.of(columns, self.device, _topk_of(nodes, self._levels))
        tree.find_drafted = partial(self._drafted, nodes)
        return tree

    def _columns(self, nodes: Sequence[int]) -> Columns:
        parents: list[int] = []
        place = {-1: -1}
        for index, node in enumerate(nodes):
            parent = self._parents[node]
            assert parent in place, DROPPED
            place[node] = index
            parents.append(place[parent])
        return Columns([self._tokens[node] for node in nodes], parents, [self._depths[node] for node in nodes])

    def _drafted(self, kept: Sequence[int]) -> Drafted:
        order = [*kept, *sorted(set(range(len(self._tokens))) - set(kept))]
        return Drafted(*self._columns(order), _topk_of(order, self._levels))


def _topk_of(nodes: Sequence[int], levels: Sequence[_Level]) -> list[TopK | None]:
    """Returns `Tree.draft_topk` of some nodes."""
    known: dict[int, TopK] = {}
    for level in levels:
        known.update(zip(level.nodes, zip(level.rows, level.tokens, strict=True), strict=True))
    return [known.get(node) for node in nodes]


def _ends(candidates: list[list[int]], eos: frozenset[int]) -> Collection[int]:
    """Returns the candidates that end the answer, as row * K + rank."""
    width = len(candidates[0])
    rows = [(row, tokens) for row, tokens in enumerate(candidates) if not eos.isdisjoint(tokens)]
    return [row * width + rank for row, tokens in rows for rank, token in enumerate(tokens) if token in eos]


@lru_cache(maxsize=256)
def _rows(num_rows: int, width: int, device: torch.device) -> Tensor:
    """Returns the row of every candidate, LongTensor [F * K]. Do not modify the result."""
    return torch.arange(num_rows * width, device=device) // width
