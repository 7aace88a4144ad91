"""Trees grown and pruned one operation at a time: the slow reference of `sage.planning.tree`, and tree factories for tests."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from sage.planning.base import Policy
from sage.planning.tree import Frontier, NextLevel, TopK, Tree


@dataclass
class SlowTree(Tree):
    """A `Tree` that grows; `path_probs` [N] are the products of probabilities from the root to each node."""

    draft_topk: list[TopK | None] = field(default_factory=list)
    path_probs: Tensor = field(default_factory=lambda: torch.ones(1))

    @classmethod
    def of_token(cls, token: int) -> SlowTree:
        """The tree of one node."""
        return cls(torch.tensor([token]), torch.tensor([-1]), torch.tensor([0]), draft_topk=[None])

    @classmethod
    def copy_of(cls, tree: Tree) -> SlowTree:
        """Returns a copy of a built tree without the draft's candidates."""
        unknown = [None] * len(tree)
        return cls(tree.tokens, tree.parents, tree.depths, draft_topk=unknown, path_probs=torch.ones(len(tree)))

    def note_candidates(self, nodes: Tensor, probs: Tensor, tokens: Tensor) -> None:
        """Stores the draft's candidates below `nodes` [F]: probabilities and tokens [F, K]."""
        draft_topk = list(self.draft_topk)
        for node, row, row_tokens in zip(nodes.tolist(), probs, tokens, strict=True):
            draft_topk[node] = (row.tolist(), row_tokens.tolist())
        self.draft_topk = draft_topk

    def add_level(self, parents: Tensor, tokens: Tensor, probs: Tensor) -> Tensor:
        """Appends nodes [M] below existing ones; returns their indices [M]."""
        old, new = len(self.tokens), len(tokens)
        self.tokens = torch.cat((self.tokens, tokens))
        self.depths = torch.cat((self.depths, self.depths[parents] + 1))
        self.path_probs = torch.cat((self.path_probs, self.path_probs[parents] * probs))
        self.parents = torch.cat((self.parents, parents))
        self.draft_topk = [*self.draft_topk, *[None] * new]
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
            draft_topk=[self.draft_topk[node] for node in kept],
            path_probs=self.path_probs[keep],
        )


def add_next_level(tree: SlowTree, frontier: Tensor, next_level: NextLevel, probs: Tensor, tokens: Tensor) -> Tensor:
    """Adds a level below `frontier` [F] with candidates `probs` and `tokens` [F, K]; returns the next frontier [X]."""
    picks, expand = next_level
    rows, ranks = torch.tensor([divmod(pick, probs.shape[1]) for pick in picks], dtype=torch.long).view(-1, 2).unbind(1)
    nodes = tree.add_level(frontier[rows], tokens[rows, ranks], probs[rows, ranks])
    return torch.tensor([int(nodes[picks.index(pick)]) for pick in expand], dtype=torch.long)


def grow_fully(policy: Policy, probs: Tensor, most_levels: int = 20) -> SlowTree:
    """Runs a policy with a draft that proposes `probs` [K] at every node; the candidate of rank r is token r."""
    policy.reset()
    policy.begin()
    tree, frontier = SlowTree.of_token(99), torch.tensor([0])
    for level in range(1, most_levels):
        candidates = probs[: policy.num_candidates_at(level)].expand(len(frontier), -1)
        tokens = torch.arange(candidates.shape[1]).expand_as(candidates)
        tree.note_candidates(frontier, candidates, tokens)
        next_level = policy.next_level(Frontier(level, candidates.tolist()))
        if next_level is None:
            break
        frontier = add_next_level(tree, frontier, next_level, candidates, tokens)
        if len(frontier) == 0:
            break
    keep = policy.select()
    return tree if keep is None else tree.subtree(torch.tensor(keep))


def tree_of(paths: list[tuple[int, ...]]) -> Tree:
    """A tree of token paths below a root with token 0."""
    tree = SlowTree.of_token(0)
    index: dict[tuple[int, ...], int] = {(): 0}
    for path in sorted(paths, key=len):
        new = tree.add_level(torch.tensor([index[path[:-1]]]), torch.tensor([path[-1]]), torch.tensor([0.5]))
        index[path] = int(new)
    return tree


def paths_of(tree: Tree) -> list[tuple[int, ...]]:
    """Token paths of all nodes below the root, whose own is empty and the first."""
    paths: list[tuple[int, ...]] = [()]
    for parent, token in zip(tree.parents.tolist()[1:], tree.tokens.tolist()[1:], strict=True):
        paths.append((*paths[parent], token))
    return paths
