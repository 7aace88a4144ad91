"""Growth of a draft tree level by level, and the tree that is verified.

For a policy on the device, nodes stay tensors and nothing synchronizes with the device. For a policy on the host, the tree is a
few lists: one synchronization per level reads the candidates, and one copy to the device uploads the tree.

Shapes: N nodes (0 = the root), F frontier nodes, K candidates per node, M nodes of a new level, X expanded nodes of it, E
expanded nodes of all levels, R selected nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import cached_property, lru_cache, partial
from typing import Any, Protocol

import torch
from torch import Tensor

from sage.host_tensors import CPU, Tokens, cached_index, read_together, take_runs
from sage.trees.base import Policy
from sage.trees.tree import Columns, DraftedTree, Frontier, NextLevel, TopK, Tree

DROPPED = "the root or a kept node's parent was dropped"


class TreeBuilder(DraftedTree, Protocol):
    """Builds the tree of one round: `open_level`, `add` and `advance` once per level, then `tree`."""

    def open_level(self, probs: Tensor, tokens: Tensor) -> Frontier:
        """Returns the policy's view of the candidates below each frontier node, [F, K] each, descending; K is constant."""

    def add(self, level: NextLevel[Any]) -> None:
        """Adds the nodes that the policy chose below the current frontier."""

    def advance(self, level: NextLevel[Any]) -> tuple[Tensor, Tokens]:
        """Makes the nodes in `level.expand` the frontier; returns their parents' rows in the last one and their tokens, [X]."""

    def tree(self, keep: Any = None) -> Tree:
        """Returns the tree of the nodes `keep`, as `Policy.select` returns them; AssertionError if an ancestor is missing."""


def new_builder(policy: Policy, root: int, device: torch.device, eos: Collection[int] = ()) -> TreeBuilder:
    """Returns the builder for a policy on the host or on the device; `root` is a token, `eos` tokens end the answer."""
    return HostBuilder(root, device, eos) if policy.is_on_host else DeviceBuilder(root, device)


class HostBuilder:
    """For policies on the host; `open_level` synchronizes with the device once. Arguments as for `new_builder`."""

    def __init__(self, root: int, device: torch.device, eos: Collection[int] = ()) -> None:
        self.device, self.eos = device, frozenset(eos)
        self._tokens, self._parents, self._depths = [root], [-1], [0]
        self._draft_topk: list[TopK | None] = [None]
        self._frontier = [0]
        self._candidates: list[list[int]] = []  # tokens below the frontier
        self._level = 0

    def __len__(self) -> int:
        return len(self._tokens)

    def open_level(self, probs: Tensor, tokens: Tensor) -> Frontier:
        self._level += 1
        self._tokens_FK = tokens
        host_tokens, host_probs = read_together(tokens, probs)
        rows, self._candidates = host_probs.tolist(), host_tokens.tolist()
        for node, row_probs, row_tokens in zip(self._frontier, rows, self._candidates, strict=True):
            self._draft_topk[node] = (row_probs, row_tokens)
        return Frontier(self._level, probs, rows=rows, ends=_ends(self._candidates, self.eos))

    def add(self, level: NextLevel[Sequence[int]]) -> None:
        width = len(self._candidates[0])
        for pick in level.picks:
            row, rank = divmod(pick, width)
            self._tokens.append(self._candidates[row][rank])
            self._parents.append(self._frontier[row])
        self._depths += [self._level] * len(level.picks)
        self._draft_topk += [None] * len(level.picks)

    def advance(self, level: NextLevel[Sequence[int]]) -> tuple[Tensor, Tokens]:
        width, first = len(self._candidates[0]), len(self._tokens) - len(level.picks)
        self._frontier = [first + level.picks.index(pick) for pick in level.expand]
        if self.device == CPU:
            rows = cached_index(tuple([pick // width for pick in level.expand]), self.device)
            return rows, [self._tokens[node] for node in self._frontier]
        rows_FK = _rows(*self._tokens_FK.shape, self.device)
        return take_runs(rows_FK, level.expand), take_runs(self._tokens_FK.reshape(-1), level.expand)

    @property
    def path_probs(self) -> Tensor:
        paths = [1.0]
        for token, parent in zip(self._tokens[1:], self._parents[1:], strict=True):
            topk = self._draft_topk[parent]
            assert topk is not None, "every parent was expanded"
            probs, tokens = topk
            paths.append(paths[parent] * probs[tokens.index(token)])
        return torch.tensor(paths, device=self.device)

    def tree(self, keep: Sequence[int] | None = None) -> Tree:
        """`keep`: [R], the root first, parents before children."""
        if keep is None:
            return Tree.of(Columns(self._tokens, self._parents, self._depths), self.device, self._draft_topk)
        parents: list[int] = []
        place = {-1: -1}
        for index, node in enumerate(keep):
            parent = self._parents[node]
            assert parent in place, DROPPED
            place[node] = index
            parents.append(place[parent])
        columns = Columns([self._tokens[node] for node in keep], parents, [self._depths[node] for node in keep])
        return Tree.of(columns, self.device, [self._draft_topk[node] for node in keep])


class DeviceBuilder:
    """For policies on the device; never synchronizes with it. Arguments as for `new_builder`.

    While levels are added, only the next frontier is computed; the tree is assembled once, from the selected nodes. A node is
    located by its place: its index among the candidates of all expanded nodes, K per expanded node, in order of expansion. A
    row at the start, whose first candidate is the root, makes the root an ordinary node. Places increase with the nodes because
    picks increase.
    """

    def __init__(self, root: int, device: torch.device) -> None:
        self.device, self.root = device, root
        self.num_nodes = 1
        self._frontiers: list[Frontier] = []
        self._tokens: list[Tensor] = []
        self._levels: list[NextLevel[Tensor]] = []
        self._path_probs: Callable[[], Tensor] = partial(torch.ones, 1, device=device)  # [F], of the frontier

    def __len__(self) -> int:
        return self.num_nodes

    def open_level(self, probs: Tensor, tokens: Tensor) -> Frontier:
        self._tokens.append(tokens)
        self._frontiers.append(Frontier(len(self._tokens), probs, self._path_probs))
        return self._frontiers[-1]

    def add(self, level: NextLevel[Tensor]) -> None:
        self._levels.append(level)
        self.num_nodes += len(level.picks)

    def advance(self, level: NextLevel[Tensor]) -> tuple[Tensor, Tensor]:
        last, tokens = self._frontiers[-1], self._tokens[-1]
        rows = level.expand // tokens.shape[1]
        self._path_probs = lambda: last.path_probs.take(rows) * last.probs.take(level.expand)
        return rows, tokens.take(level.expand)

    @cached_property
    def path_probs(self) -> Tensor:
        if not self._frontiers:
            return torch.ones(1, device=self.device)
        _, places, _ = self._assembled
        first = self._frontiers[0].probs
        probs = torch.cat((torch.ones_like(first), *(frontier.probs for frontier in self._frontiers)))
        path_E = torch.cat((first.new_ones(1), *(frontier.path_probs for frontier in self._frontiers)))
        return path_E.take(places // probs.shape[1]) * probs.take(places)

    def tree(self, keep: Tensor | None = None) -> Tree:
        """`keep`: LongTensor [R], increasing, with the root and every ancestor."""
        if not self._levels:
            return Tree.of_root(self.root, self.device)
        depths, places, expanded = self._assembled
        if keep is not None:
            depths, places = depths.take(keep), places.take(keep)
        width = self._tokens[0].shape[1]
        parents = expanded.take(places // width)
        if keep is not None:
            parents = self._renumbered(parents, keep)
        parents[0] = -1
        candidates = torch.cat((self._tokens[0].new_full((1, width), self.root), *self._tokens))
        tree = Tree(candidates.take(places), parents, depths, num_levels=len(self._levels))
        tree.last_probs = self._frontiers[-1].probs[:, 0]
        return tree

    def _renumbered(self, parents: Tensor, keep: Tensor) -> Tensor:
        """Returns the parents [R] of the kept nodes as indices into `keep` [R]; the root is its own parent."""
        place = torch.searchsorted(keep, parents).clamp_(max=len(keep) - 1)
        if self.device == CPU:  # elsewhere the comparison would synchronize; with NaN there is no order, and no valid tree
            assert torch.equal(keep.take(place), parents) or bool(self._frontiers[-1].probs.isnan().any()), DROPPED
        return place

    @cached_property
    def _assembled(self) -> tuple[Tensor, Tensor, Tensor]:
        """Depths and places of all nodes, LongTensor [N] each, and the expanded node of every row, [1 + E]."""
        width, zero = self._tokens[0].shape[1], cached_index((0,), self.device)
        picks = [level.picks for level in self._levels]
        expanded = [level.expand for level in self._levels[: len(self._tokens) - 1]]
        starts = [width]
        for tokens in self._tokens:
            starts.append(starts[-1] + tokens.numel())
        starts_N, starts_E = _repeated(starts, picks), [0, *_repeated(starts, expanded)]
        depths = _repeated(range(1, len(picks) + 1), picks)
        numbers = cached_index((0, *depths, 0, *starts_N, 0, *starts_E), self.device)  # the same for levels of the same sizes
        depth_N, start_N, start_E = numbers.split((self.num_nodes, self.num_nodes, 1 + len(starts_E)))
        places = torch.cat((zero, *picks)) + start_N
        return depth_N, places, torch.searchsorted(places, torch.cat((zero, zero, *expanded)) + start_E)


def _ends(candidates: list[list[int]], eos: frozenset[int]) -> Collection[int]:
    """Returns the candidates that end the answer, as row * K + rank."""
    width = len(candidates[0])
    found: list[int] = []
    for row, tokens in enumerate(candidates):
        if not eos.isdisjoint(tokens):
            found += [row * width + rank for rank, token in enumerate(tokens) if token in eos]
    return found


def _repeated(values: Sequence[int], levels: Sequence[Tensor]) -> list[int]:
    """Repeats a value per level for every element of that level."""
    return [value for value, level in zip(values, levels, strict=False) for _ in range(len(level))]


@lru_cache(maxsize=256)
def _rows(num_rows: int, width: int, device: torch.device) -> Tensor:
    """Returns the row of every candidate, LongTensor [F * K]. Do not modify the result."""
    return torch.arange(num_rows * width, device=device) // width
