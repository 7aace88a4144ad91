"""Growth of a draft tree level by level, and the tree that is verified.

While a tree grows it is a few lists: one device synchronization per level reads the candidates, and one copy to the device
uploads the tree.

Shapes: F frontier nodes, K candidates per node, M nodes of a new level, X expanded nodes of it, R selected nodes.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from sage.host_tensors import Tokens, cached_index, read_together, take_runs
from sage.trees.tree import Columns, Frontier, NextLevel, TopK, Tree

DROPPED = "the root or a kept node's parent was dropped"


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
        self._draft_topk: dict[int, TopK] = {}
        self._frontier = [0]
        self._candidates: list[list[int]] = []  # tokens below the frontier
        self._level = 0

    def open_level(self, probs: Tensor, tokens: Tensor) -> Frontier:
        """Returns the policy's view of the candidates below each frontier node, [F, K] each, descending; K is constant.
        Synchronizes with the device.
        """
        self._level += 1
        self._tokens_FK = tokens
        host_tokens, host_probs = read_together(tokens, probs)
        rows, self._candidates = host_probs.tolist(), host_tokens.tolist()
        self._draft_topk.update(zip(self._frontier, zip(rows, self._candidates, strict=True), strict=True))
        return Frontier(self._level, rows, _ends(self._candidates, self.eos))

    def add(self, level: NextLevel) -> None:
        """Adds the nodes that the policy chose below the current frontier."""
        width = len(self._candidates[0])
        for pick in level.picks:
            row, rank = divmod(pick, width)
            self._tokens.append(self._candidates[row][rank])
            self._parents.append(self._frontier[row])
        self._depths += [self._level] * len(level.picks)

    def advance(self, level: NextLevel) -> tuple[Tensor, Tokens]:
        """Makes the nodes in `level.expand` the frontier; returns their parents' rows in the last one and their tokens, [X]."""
        width = len(self._candidates[0])
        nodes = dict(zip(level.picks, range(len(self._tokens) - len(level.picks), len(self._tokens)), strict=True))
        self._frontier = [nodes[pick] for pick in level.expand]
        if self._tokens_FK.is_cpu:
            rows = cached_index(tuple([pick // width for pick in level.expand]), self.device)
            return rows, [self._tokens[node] for node in self._frontier]
        rows_FK = _rows(*self._tokens_FK.shape, self.device)
        return take_runs(rows_FK, level.expand), take_runs(self._tokens_FK.reshape(-1), level.expand)

    def tree(self, keep: Sequence[int] | None = None) -> Tree:
        """Returns the tree of the nodes `keep` [R], given by `Policy.select`; AssertionError if an ancestor is missing."""
        if keep is None:
            topk = [self._draft_topk.get(node) for node in range(len(self._tokens))]
            return Tree.of(Columns(self._tokens, self._parents, self._depths), self.device, topk)
        parents: list[int] = []
        place = {-1: -1}
        for index, node in enumerate(keep):
            parent = self._parents[node]
            assert parent in place, DROPPED
            place[node] = index
            parents.append(place[parent])
        columns = Columns([self._tokens[node] for node in keep], parents, [self._depths[node] for node in keep])
        return Tree.of(columns, self.device, [self._draft_topk.get(node) for node in keep])


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
