"""A draft tree while it grows, and the tree that is verified in the end.

Two ways to keep account, one for each way to plan. A policy that plans on the device answers in tensors: what it chose stays
there, and nothing waits for it but the check that the kept nodes are a tree. A policy that plans on the host answers in
numbers: its tree is a few lists, and goes over in one piece.

Shapes: N nodes (0 = the root), F frontier nodes, K candidates per node, M nodes of a new level, X of them the next frontier, E
rows the draft was asked about, R nodes kept.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import cached_property, partial
from typing import Any, Protocol

import torch
from torch import Tensor

from sage.host_tensors import Mailbox, few_longs, longs
from sage.trees.base import Policy
from sage.trees.tree import Columns, Drafted, Frontier, Growth, HostGrowth, Said, Tree

DROPPED = "the root or a kept node's parent was dropped"


class TreeBuilder(Drafted, Protocol):
    """Grows one round's tree: `ask`, `add` and `advance` once per level, then `tree`; to `Policy.select` it is `Drafted`."""

    def ask(self, probs: Tensor, tokens: Tensor) -> Frontier:
        """What a policy sees of a new level.

        Args:
            probs, tokens: [F, K], what the draft says below each frontier node, descending; the same K at every level.
        """

    def add(self, growth: Any) -> None:
        """Adds the level that the policy chose below the frontier last asked about."""

    def advance(self, growth: Any) -> tuple[Tensor, Tensor]:
        """Makes the nodes that the policy expands the frontier; their rows in the last one and their tokens, [X] each.

        To be read before the next call.
        """

    def tree(self, keep: Any = None) -> Tree:
        """The tree of the nodes `keep`, as `Policy.select` named them; None = all nodes.

        Raises:
            AssertionError: the root or an ancestor is missing.
        """


def new_builder(
    policy: Policy, root: int, device: torch.device, eos: Collection[int] = (), mailbox: Mailbox | None = None
) -> TreeBuilder:
    """The builder that understands a policy's answers.

    Args:
        root: token of the tree's root.
        device: where the tree is to be.
        eos: tokens that end the answer.
        mailbox: of the request, which spares every round its own.
    """
    return HostBuilder(root, device, eos, mailbox) if policy.on_host else DeviceBuilder(root, device)


class HostBuilder:
    """For a policy that answers in numbers; `ask` waits for the device. Arguments as for `new_builder`."""

    def __init__(self, root: int, device: torch.device, eos: Collection[int] = (), mailbox: Mailbox | None = None) -> None:
        self.device, self.eos, self.mailbox = device, frozenset(eos), mailbox or Mailbox()
        self._tokens, self._parents, self._depths = [root], [-1], [0]
        self._said: list[Said | None] = [None]
        self._asked = [0]  # the nodes that the draft was last asked about
        self._candidates: list[list[int]] = []  # what it said below them
        self._level = 0

    def __len__(self) -> int:
        return len(self._tokens)

    def ask(self, probs: Tensor, tokens: Tensor) -> Frontier:
        self._level += 1
        rows, self._candidates = probs.tolist(), tokens.tolist()
        for node, row, words in zip(self._asked, rows, self._candidates, strict=True):
            self._said[node] = (row, words)
        return Frontier(self._level, probs, rows=rows, ends=_ends(self._candidates, self.eos))

    def add(self, growth: HostGrowth) -> None:
        width = len(self._candidates[0])
        for pick in growth.picks:
            row, rank = divmod(pick, width)
            self._tokens.append(self._candidates[row][rank])
            self._parents.append(self._asked[row])
        added = len(growth.picks)
        self._depths += [self._level] * added
        self._said += [None] * added

    def advance(self, growth: HostGrowth) -> tuple[Tensor, Tensor]:
        width, picks = len(self._candidates[0]), growth.picks
        first = len(self._tokens) - len(picks)
        rows: list[int] = []
        tokens: list[int] = []
        self._asked = []
        for pick in growth.expand:
            node = first + picks.index(pick)
            rows.append(pick // width)
            tokens.append(self._tokens[node])
            self._asked.append(node)
        return few_longs(tuple(rows), self.device), self.mailbox.put(tokens, self.device)

    @property
    def path_probs(self) -> Tensor:
        paths = [1.0]
        for token, parent in zip(self._tokens[1:], self._parents[1:], strict=True):
            said = self._said[parent]
            assert said is not None, "the draft was asked about every parent"
            probs, tokens = said
            paths.append(paths[parent] * probs[tokens.index(token)])
        return torch.tensor(paths, device=self.device)

    def tree(self, keep: Sequence[int] | None = None) -> Tree:
        """`keep`: [R], the root first and every node's parent somewhere before it."""
        if keep is None:
            return Tree.of(Columns(self._tokens, self._parents, self._depths), self.device, self._said)
        tokens: list[int] = []
        parents: list[int] = []
        depths: list[int] = []
        said: list[Said | None] = []
        place = {-1: -1}
        for node in keep:
            parent = self._parents[node]
            assert parent in place, DROPPED
            place[node] = len(tokens)
            tokens.append(self._tokens[node])
            parents.append(place[parent])
            depths.append(self._depths[node])
            said.append(self._said[node])
        return Tree.of(Columns(tokens, parents, depths), self.device, said)


class DeviceBuilder:
    """For a policy that answers in tensors; nothing waits before `tree`. Arguments as for `new_builder`.

    Only what the draft is asked next is computed while levels are added; the nodes are put together once, those alone that the
    policy keeps. Every node has a place: the candidates of all rows that the draft was asked about, one row after the other, K
    to a row. A row of its own at the very start stands for the root, which so needs no special case. Places grow with the
    nodes, because picks do.
    """

    def __init__(self, root: int, device: torch.device) -> None:
        self.device, self.root = device, root
        self.num_nodes = 1
        self._asked: list[Frontier] = []
        self._tokens: list[Tensor] = []
        self._levels: list[Growth] = []
        self._path_probs = partial(torch.ones, 1, device=device)

    def __len__(self) -> int:
        return self.num_nodes

    def ask(self, probs: Tensor, tokens: Tensor) -> Frontier:
        self._tokens.append(tokens)
        self._asked.append(Frontier(len(self._tokens), probs, self._path_probs))
        return self._asked[-1]

    def add(self, growth: Growth) -> None:
        self._levels.append(growth)
        self.num_nodes += len(growth.picks)

    def advance(self, growth: Growth) -> tuple[Tensor, Tensor]:
        last, tokens = self._asked[-1], self._tokens[-1]
        rows = growth.expand // tokens.shape[1]
        self._path_probs = partial(_below, last, rows, growth.expand)
        return rows, tokens.take(growth.expand)

    @cached_property
    def path_probs(self) -> Tensor:
        if not self._asked:
            return torch.ones(1, device=self.device)
        _, places, _ = self._put_together
        first = self._asked[0].probs
        probs = torch.cat((torch.ones_like(first), *(frontier.probs for frontier in self._asked)))
        path_E = torch.cat((first.new_ones(1), *(frontier.path_probs for frontier in self._asked)))
        return path_E.take(places // probs.shape[1]) * probs.take(places)

    def tree(self, keep: Tensor | None = None) -> Tree:
        """`keep`: LongTensor [R], increasing, the root and every ancestor among them."""
        if not self._levels:
            return Tree.of_root(self.root, self.device)
        depths, places, asked = self._put_together
        if keep is not None:
            depths, places = depths.take(keep), places.take(keep)
        width = self._tokens[0].shape[1]
        parents = asked.take(places // width)
        if keep is not None:
            parents = _renumbered(parents, keep)
        parents[0] = -1
        said = torch.cat((self._tokens[0].new_full((1, width), self.root), *self._tokens))
        return Tree(said.take(places), parents, depths, num_levels=len(self._levels))

    @cached_property
    def _put_together(self) -> tuple[Tensor, Tensor, Tensor]:
        """Depths and places of all nodes, LongTensor [N] each, and the nodes the rows are about, [1 + E]."""
        width, zero = self._tokens[0].shape[1], longs([0], self.device)
        picks = [level.picks for level in self._levels]
        questions = [level.expand for level in self._levels[: len(self._tokens) - 1]]
        starts = [width]
        for tokens in self._tokens:
            starts.append(starts[-1] + tokens.numel())
        starts_N, starts_E = _repeated(starts, picks), [0, *_repeated(starts, questions)]
        depths = _repeated(range(1, len(picks) + 1), picks)
        depth_N, start_N, start_E = longs([0, *depths, 0, *starts_N, 0, *starts_E], self.device).split(
            (self.num_nodes, self.num_nodes, 1 + len(starts_E))
        )
        places = torch.cat((zero, *picks)) + start_N
        return depth_N, places, torch.searchsorted(places, torch.cat((zero, zero, *questions)) + start_E)


def _ends(candidates: list[list[int]], eos: frozenset[int]) -> Collection[int]:
    """Which candidates end the answer, as row * K + rank."""
    width = len(candidates[0])
    found: list[int] = []
    for row, tokens in enumerate(candidates):
        if not eos.isdisjoint(tokens):
            found += [row * width + rank for rank, token in enumerate(tokens) if token in eos]
    return found


def _repeated(values: Sequence[int], levels: Sequence[Tensor]) -> list[int]:
    """A value per level -> one per element of the levels."""
    return [value for value, level in zip(values, levels, strict=False) for _ in range(len(level))]


def _below(last: Frontier, rows: Tensor, expand: Tensor) -> Tensor:
    """[X], the path probabilities of the candidates `expand` of the frontier `last`."""
    return last.path_probs.take(rows) * last.probs.take(expand)


def _renumbered(parents: Tensor, keep: Tensor) -> Tensor:
    """Each kept node's parent [R], the root's being itself, as an index into `keep` [R]."""
    place = torch.searchsorted(keep, parents)
    assert torch.equal(keep.take(place), parents), DROPPED
    return place
