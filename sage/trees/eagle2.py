"""EAGLE-2's dynamic trees. Ref: EAGLE-2, arXiv 2406.16858, section 4: expansion (4.1) and reranking (4.2).

Shapes: F frontier nodes, K children per node.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from sage.io.ranges import PositiveInt, Range
from sage.planning.base import Policy, best, best_children
from sage.planning.tree import Frontier, NextLevel


@dataclass(eq=False, kw_only=True)
class Eagle2(Policy):
    """A beam of fixed width by path probability; the most probable nodes of all levels are verified (arXiv 2406.16858).

    Expansion: each level gives every frontier node its `top_k` best children; the `top_k` of those with the largest path
    probability (the paper's value V_i, a product of draft probabilities) are the next frontier. Reranking: after `depth`
    levels the `total - 1` drafted nodes of largest V_i are verified; ties go to the shallower node (section 4.2).

    Ref: EAGLE-2, arXiv 2406.16858, sections 4.1 and 4.2. Differs by: `depth` counts levels of the tree, while the authors' code
    counts draft passes after the first level; children outside the beam that cannot survive the reranking do not become
    nodes, which changes no tree: those outside the level's best `total - 1`, and those not above `total - 1` earlier nodes.

    Args:
        total: verified nodes per round, the root included.
        depth: levels drafted per round.
        top_k: children of a frontier node, and nodes of the next frontier.
    """

    name = "eagle2"

    total: Annotated[int, Range(ge=2, remedy="the policy autoregressive drafts nothing")] = 60
    depth: Annotated[int, Range(ge=1, remedy="the policy autoregressive drafts nothing")] = 7
    top_k: PositiveInt = 10

    def __post_init__(self) -> None:
        super().__post_init__()
        self.num_candidates = self.top_k
        num_expanded = (self.depth - 1) * min(self.top_k, self.total - 1)
        self.tree_capacity = max(self.total, num_expanded + 1)

    def begin(self) -> None:
        self._paths = [1.0]  # path probabilities of all nodes, the root first
        self._beam = [1.0]  # those of the frontier

    def next_level(self, frontier: Frontier) -> NextLevel:
        # What a further node must exceed to survive the reranking.
        least = sorted(self._paths)[-self.total] if len(self._paths) >= self.total else -1.0
        picks, paths = best_children(frontier.rows, self._beam, self.total - 1, above=least)
        if len(picks) < self.top_k:  # the beam is drafted from, whether it survives or not
            picks, paths = best_children(frontier.rows, self._beam, min(self.top_k, self.total - 1))
        self._paths += paths
        beam = best(paths, self.top_k)
        self._beam = [paths[i] for i in beam]
        if self._is_last(frontier.level):
            return NextLevel(picks, [])
        return NextLevel(picks, [picks[i] for i in beam])

    def _is_last(self, level: int) -> bool:
        """Returns whether drafting ends at `level`."""
        return level >= self.depth

    def select(self) -> list[int] | None:
        return best(self._paths, self.total) if len(self._paths) > self.total else None
