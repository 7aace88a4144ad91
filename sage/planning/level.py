"""Growth of a draft tree level by level, and the tree that is verified.

While a tree grows it is a few lists: one device synchronization per level reads the candidates, and one copy to the device
uploads the tree.

Shapes: F frontier nodes, K candidates per node, M nodes of a new level, X expanded nodes of it, R selected nodes.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import lru_cache, partial
from typing import NamedTuple

import torch
from torch import Tensor

from sage.planning.tree import Columns, Frontier, NextLevel, TopK, Tree
from sage.runtime.host_tensors import Tokens, cached_index, read_together, take_runs

DROPPED = "the root or a kept node's parent was dropped"


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
        self._frontier: Sequence[int] = [0]

    def open_level(self, probs: Tensor, tokens: Tensor) -> Frontier:
        """Returns the policy's view of the candidates below each frontier node, [F, K] each, descending. Synchronizes with the
        device.
        """
        self._tokens_FK = tokens
        host_tokens, host_probs = read_together(tokens, probs)
        level = _Level(self._frontier, host_probs.tolist(), host_tokens.tolist())
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

    def advance(self, level: NextLevel) -> tuple[Tensor, Tokens]:
        """Makes the nodes in `level.expand` the frontier; returns their parents' rows in the last one and their tokens, [X]."""
        nodes = range(len(self._tokens) - len(level.picks), len(self._tokens))
        if len(level.expand) < len(nodes):
            node_of = dict(zip(level.picks, nodes, strict=True))
            self._frontier = [node_of[pick] for pick in level.expand]
        else:
            self._frontier = nodes
        if self._tokens_FK.is_cpu:
            width = len(self._levels[-1].tokens[0])
            rows = cached_index(tuple([pick // width for pick in level.expand]), self.device)
            return rows, [self._tokens[node] for node in self._frontier]
        rows_FK = _rows(*self._tokens_FK.shape, self.device)
        return take_runs(rows_FK, level.expand), take_runs(self._tokens_FK.reshape(-1), level.expand)

    def tree(self, keep: Sequence[int] | None = None) -> Tree:
        """Returns the tree of the nodes `keep` [R], given by `Policy.select`; AssertionError if an ancestor is missing."""
        if keep is None:
            columns = Columns(self._tokens, self._parents, self._depths)
            return Tree.of(columns, self.device, partial(_topk_of, range(len(self._tokens)), self._levels))
        parents: list[int] = []
        place = {-1: -1}
        for index, node in enumerate(keep):
            parent = self._parents[node]
            assert parent in place, DROPPED
            place[node] = index
            parents.append(place[parent])
        columns = Columns([self._tokens[node] for node in keep], parents, [self._depths[node] for node in keep])
        return Tree.of(columns, self.device, partial(_topk_of, keep, self._levels))


def _topk_of(nodes: Sequence[int], levels: Sequence[_Level]) -> list[TopK | None]:
    """Returns `Tree.draft_topk` of some nodes."""
    known: dict[int, TopK] = {}
    for level in levels:
        known.update(zip(level.nodes, zip(level.rows, level.tokens, strict=True), strict=True))
    return [known.get(node) for node in nodes]


def _ends(candidates: list[list[int]], eos: frozenset[int]) -> Collection[int]:
    """Returns the candidates that end the answer, as row * K + rank."""
    width = len(candidates[0])
    found: list[int] = []
    for row, tokens in enumerate(candidates):
        if not eos.isdisjoint(tokens):
            found += [row * width + rank for rank, token in enumerate(tokens) if token in eos]
    return found


@lru_cache(maxsize=256)
def _rows(num_rows: int, width: int, device: torch.device) -> Tensor:
    """Returns the row of every candidate, LongTensor [F * K]. Do not modify the result."""
    return torch.arange(num_rows * width, device=device) // width
