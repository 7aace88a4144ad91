"""Trees grown and cut one operation at a time: the slow twin of `sage.trees.builder`, and what tests make trees with."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from sage.trees import Frontier, Growth, HostGrowth, Policy, Tree


@dataclass
class SlowTree(Tree):
    """A `Tree` that grows; of every node it also knows path_probs, [N], the product of probabilities down to it."""

    path_probs: Tensor = field(default_factory=lambda: torch.ones(1))

    @classmethod
    def of_token(cls, token: int) -> SlowTree:
        """The tree of one node."""
        return cls(torch.tensor([token]), torch.tensor([-1]), torch.tensor([0]), said=[None])

    @classmethod
    def copy_of(cls, tree: Tree) -> SlowTree:
        """A built tree, to be cut; what the draft said is left out."""
        unknown = [None] * len(tree)
        return cls(tree.tokens, tree.parents, tree.depths, tree.num_levels, unknown, path_probs=torch.ones(len(tree)))

    def note_candidates(self, nodes: Tensor, probs: Tensor, tokens: Tensor) -> None:
        """Remembers what the draft said below `nodes` [F]: probabilities and tokens [F, K]."""
        said = list(self.said)
        for node, row, row_tokens in zip(nodes.tolist(), probs, tokens, strict=True):
            said[node] = (row.tolist(), row_tokens.tolist())
        self.said = said

    def add_level(self, parents: Tensor, tokens: Tensor, probs: Tensor) -> Tensor:
        """Appends nodes [M] below existing ones; returns their indices [M]."""
        old, new = len(self.tokens), len(tokens)
        self.num_levels += 1
        self.tokens = torch.cat((self.tokens, tokens))
        self.depths = torch.cat((self.depths, self.depths[parents] + 1))
        self.path_probs = torch.cat((self.path_probs, self.path_probs[parents] * probs))
        self.parents = torch.cat((self.parents, parents))
        self.said = [*self.said, *[None] * new]
        return torch.arange(old, old + new)

    def subtree(self, keep: Tensor) -> SlowTree:
        """The tree of the nodes `keep`, the root first and every parent somewhere before its children."""
        kept = keep.tolist()
        parents = self.parents[keep].tolist()
        there = all(parent in kept[:place] for place, parent in enumerate(parents) if place > 0)
        assert kept[0] == 0 and there, "the root or a kept node's parent was dropped"
        return SlowTree(
            tokens=self.tokens[keep],
            parents=torch.tensor([kept.index(parent) if parent >= 0 else -1 for parent in parents]),
            depths=self.depths[keep],
            num_levels=self.num_levels,
            said=[self.said[node] for node in kept],
            path_probs=self.path_probs[keep],
        )


def numbers(growth: Growth | HostGrowth) -> tuple[list[int], list[int]]:
    """Picks and those to expand."""
    return torch.as_tensor(growth.picks).tolist(), torch.as_tensor(growth.expand).tolist()


def as_keep(chosen: Tensor | list[int]) -> Tensor:
    """What `Policy.select` returned, as indices."""
    return torch.as_tensor(chosen)


def add_growth(tree: SlowTree, frontier: Tensor, growth: Growth | HostGrowth, probs: Tensor, tokens: Tensor) -> Tensor:
    """Adds a level below `frontier` [F] of which the draft said `probs` and `tokens` [F, K]; the next frontier [X]."""
    picks, expand = numbers(growth)
    rows, ranks = torch.tensor([divmod(pick, probs.shape[1]) for pick in picks], dtype=torch.long).view(-1, 2).unbind(1)
    nodes = tree.add_level(frontier[rows], tokens[rows, ranks], probs[rows, ranks])
    return torch.tensor([int(nodes[picks.index(pick)]) for pick in expand], dtype=torch.long)


def grow_fully(policy: Policy, probs: Tensor, most_levels: int = 20) -> SlowTree:
    """Runs a policy against a draft that says `probs` [K] everywhere; candidate of rank r is token r."""
    policy.reset()
    policy.begin()
    tree, frontier = SlowTree.of_token(99), torch.tensor([0])
    for level in range(1, most_levels):
        says = probs[: policy.candidates].expand(len(frontier), -1)
        tokens = torch.arange(says.shape[1]).expand_as(says)
        tree.note_candidates(frontier, says, tokens)
        growth = policy.grow(Frontier(level, says, tree.path_probs[frontier]))
        if growth is None:
            break
        frontier = add_growth(tree, frontier, growth, says, tokens)
        if len(frontier) == 0:
            break
    keep = policy.select(tree)
    return tree if keep is None else tree.subtree(as_keep(keep))


def tree_of(paths: list[tuple[int, ...]]) -> Tree:
    """A tree of token paths below a root with token 0."""
    tree = SlowTree.of_token(0)
    index: dict[tuple[int, ...], int] = {(): 0}
    for path in sorted(paths, key=len):
        new = tree.add_level(torch.tensor([index[path[:-1]]]), torch.tensor([path[-1]]), torch.tensor([0.5]))
        index[path] = int(new)
    return tree
