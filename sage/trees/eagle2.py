"""EAGLE-2's dynamic trees. Ref: EAGLE-2, arXiv 2406.16858, section 4: expansion (4.1) and reranking (4.2).

Shapes: N tree nodes, F frontier nodes, K children per node.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from torch import Tensor

from sage.trees.base import Policy
from sage.trees.options import Range
from sage.trees.ranking import best_children, best_nodes
from sage.trees.tree import DraftedTree, Frontier, NextLevel


@dataclass(eq=False, kw_only=True)
class Eagle2(Policy):
    """A beam of fixed width by path probability; the most probable nodes of all levels are verified (arXiv 2406.16858).

    Expansion: each level gives every frontier node its `top_k` best children; the `top_k` of those with the largest path
    probability (the paper's value V_i, a product of draft probabilities) are the next frontier. Reranking: after `depth`
    levels the `total - 1` drafted nodes of largest V_i are verified; ties go to the shallower node (section 4.2).

    Ref: EAGLE-2, arXiv 2406.16858, sections 4.1 and 4.2. Differs by: `depth` counts levels of the tree, while the authors' code
    counts draft passes after the first level; of a level's F * K children only the best `total - 1` become nodes, which
    changes no tree (no more can survive the reranking). Needs no device synchronization.

    Args:
        total: verified nodes per round, the root included.
        depth: levels drafted per round.
        top_k: children of a frontier node, and nodes of the next frontier.
    """

    name = "eagle2"

    total: Annotated[int, Range(ge=2, remedy="the policy autoregressive drafts nothing")] = 60
    depth: Annotated[int, Range(ge=1, remedy="the policy autoregressive drafts nothing")] = 7
    top_k: Annotated[int, Range(ge=1)] = 10

    def __post_init__(self) -> None:
        super().__post_init__()
        self.num_candidates = self.top_k
        num_expanded = (self.depth - 1) * min(self.top_k, self.total - 1)
        self.tree_capacity = max(self.total, num_expanded + 1)

    def next_level(self, frontier: Frontier) -> NextLevel[Tensor]:
        picks, order, paths = best_children(frontier, self.top_k, self.total - 1)
        if self._is_last(frontier.level, paths[: self.top_k]):
            return NextLevel(picks, picks[:0])
        return NextLevel(picks, picks.take(order[: self.top_k]).sort().values)

    def _is_last(self, level: int, beam: Tensor) -> bool:
        """Returns whether drafting ends at `level`; `beam` [<= top_k] are the best path probabilities, descending."""
        return level >= self.depth

    def select(self, drafted: DraftedTree) -> Tensor | None:
        return best_nodes(drafted, self.total) if len(drafted) > self.total else None
