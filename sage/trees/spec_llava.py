"""Spec-LLaVA's trees: a fixed node budget with global re-ranking. Ref: Spec-LLaVA, arXiv 2509.11961.

Shapes: N tree nodes, F frontier nodes, M chosen.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from sage.trees.base import Policy
from sage.trees.options import Range
from sage.trees.ranking import best_children, best_nodes
from sage.trees.tree import DraftedTree, Frontier, NextLevel


@dataclass(eq=False, kw_only=True)
class SpecLlava(Policy):
    """A fixed node budget, reranked over all depths after every level (arXiv 2509.11961).

    The root takes its top-B tokens. Each growth step gives every unexpanded node of the kept set its top-b children and keeps
    the B nodes of the best path score over all depths; a long, confident path can therefore displace all of its alternatives.

    Ref: Spec-LLaVA, arXiv 2509.11961, dynamic tree construction. Differs by:

    * Score. The path's probability (sum of log-probabilities). The authors' code sums raw logits; policies see
      probabilities only, so that option would need the logits in `Frontier` and a running sum of them. It also
      allows a child to outscore its parent, so the kept set would need a closure over ancestors.
    * Expansion. The number of kept nodes of a level is known on the device only. Unless `follow_kept`, the host does not
      synchronize: each level expands as many nodes as could be kept at most (`level_widths`). The tree is the same, because
      all descendants of a node outside the best B are outside the best B.
    * Pruning. `min_confidence` drops improbable nodes before verification; with `follow_kept` they are not expanded either.

    Args:
        budget: B, nodes kept, without the root.
        branch: b, children of an expanded node.
        steps: growth steps after the root's; the tree has at most `steps + 1` levels.
        min_confidence: path probability below which a node is not verified; 0 = no pruning.
        follow_kept: expand kept nodes only, at the cost of one device synchronization per level; free on a CPU.
    """

    name = "spec_llava"

    budget: Annotated[int, Range(ge=1, remedy="the policy autoregressive drafts nothing")] = 127
    branch: Annotated[int, Range(ge=1)] = 31
    steps: Annotated[int, Range(ge=0)] = 6
    min_confidence: Annotated[float, Range(ge=0, lt=1)] = 0.0
    follow_kept: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self.num_candidates = max(self.budget, self.branch)
        self.widths = level_widths(self.budget, self.branch, self.steps + 1)
        self.tree_capacity = max(self.budget, sum(self.widths[:-1])) + 1

    def begin(self) -> None:
        self._kept: Tensor | None = None  # path probabilities [<= budget] of the kept set, descending; None before level 2

    def next_level(self, frontier: Frontier) -> NextLevel[Tensor]:
        branching = self.budget if frontier.level == 1 else self.branch
        picks, order, paths = best_children(frontier, branching, self.widths[frontier.level - 1])
        if frontier.level == len(self.widths):
            return NextLevel(picks, picks[:0])
        if self.follow_kept:
            return NextLevel(picks, picks[self._newly_kept(paths[order.argsort()])])
        return NextLevel(picks, picks)

    def _newly_kept(self, path_M: Tensor) -> Tensor:
        """Reranks the kept set with a new level [M]; returns the indices of its kept nodes. Synchronizes with the device."""
        pool = path_M if self._kept is None else torch.cat((self._kept, path_M))
        ranked = pool.sort(descending=True, stable=True)
        self._kept = ranked.values[: self.budget]
        is_kept = torch.zeros_like(pool, dtype=torch.bool)
        is_kept[ranked.indices[: self.budget]] = True
        return (is_kept[-len(path_M) :] & (path_M >= self.min_confidence)).nonzero()[:, 0]

    def select(self, drafted: DraftedTree) -> Tensor | None:
        keep = best_nodes(drafted, self.budget + 1)
        if self.min_confidence:
            return keep[drafted.path_probs[keep] >= self.min_confidence]
        return keep if len(keep) < len(drafted) else None


def level_widths(budget: int, branch: int, levels: int) -> list[int]:
    """Returns the most nodes of each level that the best `budget` nodes can contain, without levels that can contain none.

    A kept node implies its ancestors: r nodes of level l have at least ceil(r / b^j) distinct ancestors j levels up.
    For B = 16, b = 2, level 2 holds at most 10 (with 5 parents: 15; 11 with 6 would be 17), level 3 at most 8 (8 + 4 + 2 = 14).
    """

    def size(width: int, level: int) -> int:
        return sum(-(-width // branch**above) for above in range(level))

    widths = (max(r for r in range(budget + 1) if size(r, level) <= budget) for level in range(1, levels + 1))
    return [width for width in widths if width > 0]
