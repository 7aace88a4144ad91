"""The draft tree as flat arrays, and what policies see of it.

Shapes: N tree nodes (node 0 is the root), F frontier nodes, K candidates per node, E nodes the draft was asked about.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from sage.stats import RoundTimes


@dataclass
class Tree:
    """A draft tree; parents stand before children.

    Attributes:
        tokens: LongTensor [N].
        parents: LongTensor [N]; -1 for the root.
        depths: LongTensor [N]; 0 for the root.
        path_probs: [N], the product of the draft's probabilities from the root down; 1 for the root.
        drafted: LongTensor [N], the node's row in `candidates`, -1 where the draft was not asked.
        candidates: [E, K], the draft's K largest probabilities below each drafted node, descending.
        candidate_tokens: LongTensor [E, K], their tokens.
        num_levels: levels drafted; the tree is at most this deep.
    """

    tokens: Tensor
    parents: Tensor
    depths: Tensor
    path_probs: Tensor
    drafted: Tensor
    candidates: Tensor
    candidate_tokens: Tensor
    num_levels: int = 0

    @classmethod
    def of_root(cls, token: Tensor) -> Tree:
        """The tree of one node. `token`: LongTensor [1]."""
        none, minus_one = token.new_empty(0, 0), torch.full_like(token, -1)
        return cls(token, minus_one, minus_one + 1, torch.ones(1, device=token.device), minus_one.clone(), none.float(), none)

    @classmethod
    def of_levels(
        cls, root: Tensor, levels: list[tuple[Tensor, Tensor, Tensor]], asked: list[tuple[Tensor, Tensor, Tensor]]
    ) -> Tree:
        """A tree put together once all of its levels are known; the slow twin is `add_level` and `note_candidates`.

        Args:
            root: LongTensor [1].
            levels: per level parents, tokens and path_probs, [M] each.
            asked: per question nodes [F], probs and tokens [F, K].
        """
        parents, tokens, path_probs = zip(*levels, strict=True) if levels else ((), (), ())
        depth_N = [0, *(depth for depth, level in enumerate(tokens, start=1) for _ in range(len(level)))]
        depths, drafted = torch.tensor((depth_N, [-1] * len(depth_N)), device=root.device)
        none = root.new_empty(0, 0)
        tree = cls(
            tokens=torch.cat((root, *tokens)),
            parents=torch.cat((drafted[:1], *parents)),
            depths=depths,
            path_probs=torch.cat((torch.ones(1, device=root.device), *path_probs)),
            drafted=drafted,
            candidates=none.float(),
            candidate_tokens=none,
            num_levels=len(levels),
        )
        if asked:
            nodes, candidates, candidate_tokens = (torch.cat(column) for column in zip(*asked, strict=True))
            tree.note_candidates(nodes, candidates, candidate_tokens)
        return tree

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def depth(self) -> int:
        """Depth of the deepest node."""
        return int(self.depths[-1])

    @property
    def ancestors(self) -> Tensor:
        """BoolTensor [N, N], row n True at n and its ancestors.

        Paths of up to 2^i steps are those of up to 2^(i-1) steps, twice: a few small products instead of a walk per level.
        """
        if len(self) == 1:
            return torch.ones(1, 1, dtype=torch.bool, device=self.tokens.device)
        reach = torch.eye(len(self), device=self.tokens.device)
        reach.scatter_(1, self.parents.clamp(min=0)[:, None], 1.0)
        for _ in range(max(self.num_levels - 1, 0).bit_length()):
            reach = (reach @ reach).clamp_(max=1.0)
        return reach > 0

    def note_candidates(self, nodes: Tensor, probs: Tensor, tokens: Tensor) -> None:
        """Remembers what the draft said below `nodes` [F]: probabilities and tokens [F, K]."""
        known = self.candidates.shape[0]
        self.drafted[nodes] = torch.arange(known, known + len(nodes), device=nodes.device)
        self.candidates = probs if known == 0 else torch.cat((self.candidates, probs))
        self.candidate_tokens = tokens if known == 0 else torch.cat((self.candidate_tokens, tokens))

    def add_level(self, parents: Tensor, tokens: Tensor, probs: Tensor) -> Tensor:
        """Appends nodes [M] below existing ones; returns their indices [M]."""
        old, new = len(self.tokens), len(tokens)
        index = torch.arange(old, old + new, device=tokens.device)
        self.num_levels += 1
        self.tokens = torch.cat((self.tokens, tokens))
        self.depths = torch.cat((self.depths, self.depths[parents] + 1))
        self.path_probs = torch.cat((self.path_probs, self.path_probs[parents] * probs))
        self.parents = torch.cat((self.parents, parents))
        self.drafted = torch.cat((self.drafted, parents.new_full((new,), -1)))
        return index

    def subtree(self, keep: Tensor) -> Tree:
        """The tree of the nodes `keep` [M]: increasing indices, the root and every ancestor among them.

        Raises:
            AssertionError: the root or an ancestor is missing.
        """
        parents = self.parents.take(keep)
        place = torch.searchsorted(keep, parents)  # of a node's parent among those kept; the root's own is nowhere
        is_tree = (keep.take(place) == parents)[1:].all() & (keep[0] == 0)
        assert bool(is_tree), "the root or a kept node's parent was dropped"
        place[0] = -1
        return Tree(
            tokens=self.tokens.take(keep),
            parents=place,
            depths=self.depths.take(keep),
            path_probs=self.path_probs.take(keep),
            drafted=self.drafted.take(keep),
            candidates=self.candidates,
            candidate_tokens=self.candidate_tokens,
            num_levels=self.num_levels,
        )


@dataclass
class Frontier:
    """What a policy sees before a level is added.

    Attributes:
        level: depth of the nodes to be chosen; 1 = below the root.
        probs: [F, K], the draft's K largest probabilities below each frontier node, descending.
        path_probs: [F], the product of probabilities down to each frontier node.
    """

    level: int
    probs: Tensor
    path_probs: Tensor


@dataclass
class Growth:
    """A policy's answer: which candidates become nodes, and which of those the draft is asked about next.

    Attributes:
        rows: LongTensor [M], the frontier row each new node hangs from.
        ranks: LongTensor [M], its rank among that row's candidates.
        expand: LongTensor [X], indices into the M new nodes; empty ends the drafting.
    """

    rows: Tensor
    ranks: Tensor
    expand: Tensor


@dataclass
class Outcome:
    """What a policy learns after a round.

    Attributes:
        accepted: number of drafted tokens accepted (without the bonus token).
        tree: the verified tree.
        path: LongTensor [accepted + 1], the accepted nodes, the root first.
        context: tokens the target had cached before the round.
        labels: [M, K], for policies that learn: the target's verdict on each candidate of the M verified nodes the draft was
            asked about, in tree order; greedy 1 or 0, sampling its target probability.
        times: for policies that learn: this round's timings.
    """

    accepted: int
    tree: Tree
    path: Tensor
    context: int = 0
    labels: Tensor | None = None
    times: RoundTimes = field(default_factory=RoundTimes)
