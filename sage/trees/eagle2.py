"""EAGLE-2's dynamic trees. Ref: EAGLE-2, arXiv 2406.16858, section 4: expansion (4.1) and reranking (4.2).

Shapes: N tree nodes, F frontier nodes, K children per node.
"""

from __future__ import annotations

from torch import Tensor

from sage.trees.base import Policy
from sage.trees.options import check_count
from sage.trees.ranking import best_children, best_nodes
from sage.trees.tree import Drafted, Frontier, Growth


class Eagle2(Policy):
    """A beam of fixed width is drafted, then the most probable nodes of all are verified.

    Expansion: each level gives every frontier node its `top_k` best children; the `top_k` of those with the largest path
    probability (the paper's value V_i, a product of draft probabilities) are the next frontier. Reranking: after `depth`
    levels the `total - 1` drafted nodes of largest V_i are verified; of equals, the shallower one (section 4.2).

    Ref: EAGLE-2, arXiv 2406.16858, sections 4.1 and 4.2. Differs by: `depth` counts levels of the tree, where the authors' code
    counts draft passes after the first level; of a level's F * K children only the best `total - 1` become nodes, which
    changes no tree (no more can survive the reranking) and spares bookkeeping. The host never waits for the device.

    Args:
        total: verified nodes per round, the root included.
        depth: levels drafted per round.
        top_k: children of a frontier node, and nodes of the next frontier.

    Raises:
        ValueError: an option that is no whole number or too small.
    """

    name = "eagle2"

    def __init__(self, total: int = 60, depth: int = 7, top_k: int = 10) -> None:
        check_count(f"policy.{self.name}.total", total, 2, "; the policy autoregressive drafts nothing")
        check_count(f"policy.{self.name}.depth", depth, 1, "; the policy autoregressive drafts nothing")
        check_count(f"policy.{self.name}.top_k", top_k, 1)
        self.total, self.depth, self.top_k = total, depth, top_k
        self.candidates = top_k
        asked = (depth - 1) * min(top_k, total - 1)
        self.max_nodes = max(total, asked + 1)

    def grow(self, frontier: Frontier) -> Growth | None:
        picks, order, paths = best_children(frontier, self.top_k, self.total - 1)
        if self._is_last(frontier.level, paths[: self.top_k]):
            return Growth(picks, picks[:0])
        return Growth(picks, picks.take(order[: self.top_k]).sort().values)

    def _is_last(self, level: int, beam: Tensor) -> bool:
        """Whether no level follows this one, the path probabilities of whose next frontier are `beam`, most probable first."""
        return level >= self.depth

    def select(self, drafted: Drafted) -> Tensor | None:
        return best_nodes(drafted, self.total) if len(drafted) > self.total else None
