"""Spec-LLaVA's trees: a fixed node budget with global re-ranking. Ref: Spec-LLaVA, arXiv 2509.11961."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from sage.io.ranges import NonNegativeInt, PositiveInt, Range
from sage.planning.base import Policy, best, best_children
from sage.planning.tree import Frontier, NextLevel


@dataclass(eq=False, kw_only=True)
class SpecLlava(Policy):
    """A fixed node budget, reranked over all depths after every level (arXiv 2509.11961).

    The root takes its top-B tokens. Each growth step gives every unexpanded node of the kept set its top-b children and keeps
    the B nodes of the best path score over all depths; a long, confident path can therefore displace all of its alternatives.

    Ref: Spec-LLaVA, arXiv 2509.11961, dynamic tree construction. Differs by:

    * Score. The path's probability (sum of log-probabilities). The authors' code sums raw logits; policies see
      probabilities only, so that option would need the logits in `Frontier` and a running sum of them. It also
      allows a child to outscore its parent, so the kept set would need a closure over ancestors.
    * Pruning. `min_confidence` drops improbable nodes before verification. Their descendants are no more probable, so they are
      not drafted at all.

    Args:
        budget: B, nodes kept, without the root.
        branch: b, children of an expanded node.
        steps: growth steps after the root's; the tree has at most `steps + 1` levels.
        min_confidence: path probability below which a node is not verified; 0 = no pruning.
    """

    name = "spec_llava"

    budget: Annotated[int, Range(ge=1, remedy="the policy autoregressive drafts nothing")] = 127
    branch: PositiveInt = 31
    steps: NonNegativeInt = 6
    min_confidence: Annotated[float, Range(ge=0, lt=1)] = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.num_candidates = max(self.budget, self.branch)
        self.tree_capacity = self.budget * max(self.steps, 1) + 1

    def begin(self) -> None:
        self._frontier = [1.0]  # path probabilities of the nodes that are expanded
        self._kept: list[float] = []  # those of the kept set, [<= budget], in the order of the tree
        self._paths = [1.0]  # those of all drafted nodes, the root first

    def num_candidates_at(self, level: int) -> int:
        return self.budget if level == 1 else self.branch

    def next_level(self, frontier: Frontier) -> NextLevel:
        least = min(self._kept) if len(self._kept) == self.budget else -1.0  # ties go to the kept node
        picks, paths = best_children(frontier.rows, self._frontier, self.budget, above=least)
        known, pool = len(self._kept), self._kept + paths
        ranked = best(pool, self.budget)
        self._kept = [pool[i] for i in ranked]
        added = [i - known for i in ranked if i >= known and pool[i] >= self.min_confidence]
        self._frontier = [paths[i] for i in added]
        self._paths += self._frontier
        picks = [picks[i] for i in added]
        return NextLevel(picks, [] if frontier.level > self.steps else picks)

    def select(self) -> list[int] | None:
        return best(self._paths, self.budget + 1) if len(self._paths) > self.budget + 1 else None
