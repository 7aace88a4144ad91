"""A draft tree while it grows, and the tree that is verified in the end.

While levels are added only what the draft is asked next is computed; the nodes are put together once, those alone that the
policy keeps. What a policy chose on the device stays there, and nothing waits for it but the check that the kept nodes are a
tree. What it chose on the host is put together on the host and goes over in one piece.

Every node has a place: the candidates of all rows that the draft was asked about, one row after the other, K to a row. A row
of its own at the very start stands for the root, which so needs no special case. Places grow with the nodes, because picks do.

Shapes: N nodes (0 = the root), F frontier nodes, K candidates per node, M nodes of a new level, X of them the next frontier, E
rows the draft was asked about, R nodes kept.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import cached_property, lru_cache, partial

import torch
from torch import Tensor

from sage.trees.tree import Frontier, Growth, HostGrowth, Tree, numbers

DROPPED = "the root or a kept node's parent was dropped"


class TreeBuilder:
    """Grows one round's tree: `ask`, `add` and `advance` once per level, then `tree`.

    Args:
        root: LongTensor [1], its token.
        eos: tokens that end the answer.
    """

    def __init__(self, root: Tensor, eos: Collection[int] = ()) -> None:
        self.root, self.eos = root, eos
        self.num_nodes = 1
        self._asked: list[Frontier] = []
        self._tokens: list[Tensor] = []
        self._levels: list[Growth | HostGrowth] = []
        self._path_probs = partial(torch.ones, 1, device=root.device)

    def __len__(self) -> int:
        return self.num_nodes

    @property
    def device(self) -> torch.device:
        return self.root.device

    def ask(self, probs: Tensor, tokens: Tensor) -> Frontier:
        """What a policy sees of a new level.

        Args:
            probs, tokens: [F, K], what the draft says below each frontier node, descending; the same K at every level.
        """
        self._tokens.append(tokens)
        find_ends = partial(_places_of, tokens, self.eos) if self.eos else None
        self._asked.append(Frontier(len(self._tokens), probs, self._path_probs, find_ends))
        return self._asked[-1]

    def add(self, growth: Growth | HostGrowth) -> None:
        """Adds the level that the policy chose below the frontier last asked about."""
        self._levels.append(growth)
        self.num_nodes += len(growth.picks)

    def advance(self, growth: Growth | HostGrowth) -> tuple[Tensor, Tensor]:
        """Makes the nodes that the policy expands the frontier; their rows in the last one and their tokens, [X] each."""
        last, tokens = self._asked[-1], self._tokens[-1]
        width = tokens.shape[1]
        if isinstance(growth, HostGrowth):
            rows, expand = _rows_and_picks(tuple(growth.expand), width, self.device)
        else:
            rows, expand = growth.expand // width, growth.expand
        self._path_probs = partial(_below, last, rows, expand)
        return rows, tokens.take(expand)

    @cached_property
    def path_probs(self) -> Tensor:
        """[N], the product of the draft's probabilities from the root down; 1 for the root."""
        if not self._asked:
            return torch.ones(1, device=self.device)
        _, places, _ = self._on_device
        first = self._asked[0].probs
        probs = torch.cat((torch.ones_like(first), *(frontier.probs for frontier in self._asked)))
        path_E = torch.cat((first.new_ones(1), *(frontier.path_probs for frontier in self._asked)))
        return path_E.take(places // probs.shape[1]) * probs.take(places)

    def tree(self, keep: Tensor | Sequence[int] | None = None, looks_back: bool = True) -> Tree:
        """The tree of the nodes `keep`, with all that the draft said where the policy `looks_back`.

        Args:
            keep: [R], increasing, the root and every ancestor among them; None = all nodes.

        Raises:
            AssertionError: the root or an ancestor is missing.
        """
        if not self._asked:
            return Tree.of_root(self.root)
        if all(isinstance(level, HostGrowth) for level in self._levels):
            depths, places, parents, drafted = self._put_together_on_host(keep)
        else:
            depths, places, parents, drafted = self._put_together_on_device(keep, looks_back)
        said = torch.cat((self.root.expand(1, self._tokens[0].shape[1]), *self._tokens))
        tree = Tree(said.take(places), parents, depths, num_levels=len(self._levels))
        if looks_back:
            tree.drafted, tree.candidates = drafted, torch.cat([frontier.probs for frontier in self._asked])
            tree.candidate_tokens = said[1:]
        return tree

    def _put_together_on_host(self, keep: Tensor | Sequence[int] | None) -> tuple[Tensor, ...]:
        """Depths, places, parents and rows of the kept nodes, LongTensor [R] each; from levels that are numbers."""
        width = self._tokens[0].shape[1]
        depths, places, parents, drafted = [0], [0], [-1], [-1]
        above, num_rows = [0], 0  # the nodes a question is about, and the rows before it
        for depth, tokens in enumerate(self._tokens, start=1):
            for row, node in enumerate(above, start=num_rows):
                drafted[node] = row
            if depth > len(self._levels):
                break
            level, first, start = self._levels[depth - 1], len(places), (1 + num_rows) * width
            parents += [above[pick // width] for pick in level.picks]
            places += [start + pick for pick in level.picks]
            depths += [depth] * len(level.picks)
            drafted += [-1] * len(level.picks)
            if depth < len(self._tokens):
                node_of = dict(zip(level.picks, range(first, len(places)), strict=True))
                above, num_rows = [node_of[pick] for pick in level.expand], num_rows + len(tokens)
        if keep is not None:
            kept = numbers(keep)
            parents = _renumbered_on_host([parents[node] for node in kept], kept)
            depths, places, drafted = ([column[node] for node in kept] for column in (depths, places, drafted))
        return torch.tensor((depths, places, parents, drafted), device=self.device).unbind()

    def _put_together_on_device(self, keep: Tensor | Sequence[int] | None, looks_back: bool) -> tuple[Tensor, ...]:
        """As `_put_together_on_host`, and without the rows unless they are asked for; from any levels."""
        depths, places, asked = self._on_device
        kept = torch.tensor(keep, device=self.device) if isinstance(keep, Sequence) else keep
        if kept is not None:
            depths, places = depths.take(kept), places.take(kept)
        parents = asked.take(places // self._tokens[0].shape[1])
        if kept is not None:
            parents = _renumbered(parents, kept)
        parents[0] = -1
        drafted = asked.new_full((self.num_nodes if looks_back else 0,), -1)
        if looks_back:
            drafted.scatter_(0, asked[1:], torch.arange(len(asked) - 1, device=self.device))
            drafted = drafted if kept is None else drafted.take(kept)
        return depths, places, parents, drafted

    @cached_property
    def _on_device(self) -> tuple[Tensor, Tensor, Tensor]:
        """Depths and places of all nodes, LongTensor [N] each, and the nodes the rows are about, [1 + E]."""
        width, zero = self._tokens[0].shape[1], torch.zeros_like(self.root)
        levels = [_as_tensors(level, self.device) for level in self._levels]
        picks = [level.picks for level in levels]
        questions = [level.expand for level in levels[: len(self._tokens) - 1]]
        starts = [width]
        for tokens in self._tokens:
            starts.append(starts[-1] + tokens.numel())
        starts_N, starts_E = _repeated(starts, picks), [0, *_repeated(starts, questions)]
        depths = _repeated(range(1, len(picks) + 1), picks)
        depth_N, start_N, start_E = torch.tensor([0, *depths, 0, *starts_N, 0, *starts_E], device=self.device).split(
            (self.num_nodes, self.num_nodes, 1 + len(starts_E))
        )
        places = torch.cat((zero, *picks)) + start_N
        return depth_N, places, torch.searchsorted(places, torch.cat((zero, zero, *questions)) + start_E)


@lru_cache(maxsize=4096)
def _rows_and_picks(picks: tuple[int, ...], width: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Few picks are ever expanded at once, and the same ones again and again."""
    rows, again = torch.tensor(([pick // width for pick in picks], picks), device=device)
    return rows, again


def _as_tensors(growth: Growth | HostGrowth, device: torch.device) -> Growth:
    if isinstance(growth, Growth):
        return growth
    return Growth(*(torch.tensor(picks, dtype=torch.long, device=device) for picks in (growth.picks, growth.expand)))


def _repeated(values: Sequence[int], levels: Sequence[Tensor]) -> list[int]:
    """A value per level -> one per element of the levels."""
    return [value for value, level in zip(values, levels, strict=False) for _ in range(len(level))]


def _places_of(tokens: Tensor, wanted: Collection[int]) -> set[int]:
    return {place for place, token in enumerate(tokens.flatten().tolist()) if token in wanted}


def _below(last: Frontier, rows: Tensor, expand: Tensor) -> Tensor:
    """[X], the path probabilities of the candidates `expand` of the frontier `last`."""
    return last.path_probs.take(rows) * last.probs.take(expand)


def _renumbered(parents: Tensor, keep: Tensor) -> Tensor:
    """Each kept node's parent [R], the root's being itself, as an index into `keep` [R]."""
    place = torch.searchsorted(keep, parents)
    assert torch.equal(keep.take(place), parents), DROPPED
    return place


def _renumbered_on_host(parents: list[int], keep: Sequence[int]) -> list[int]:
    """The same in numbers, but that the root's parent is -1."""
    index = {node: index for index, node in enumerate((-1, *keep), start=-1)}
    assert parents[0] == -1 and index.keys() >= set(parents), DROPPED
    return [index[node] for node in parents]
