"""TALON's trees: the level's width follows the draft's confidence, until a node budget is spent. Ref: arXiv 2601.07353.

Shapes: F frontier nodes, K children per node, M chosen.
"""

from __future__ import annotations

from sage.trees.base import Policy
from sage.trees.options import check_count, check_share
from sage.trees.ranking import best_children
from sage.trees.tree import Frontier, Growth


class Talon(Policy):
    """Deep and narrow where the draft is sure, shallow and wide where it is not.

    Robust initialisation: level 1 takes the root's top-K. Confidence gate: of the next levels' candidates, the top-K children
    of every node kept before, those stay whose path probability is at least `ratio` times the level's largest. The tree grows
    until `total` nodes; a level that does not fit keeps its most probable nodes.

    Ref: TALON, arXiv 2601.07353, hybrid expansion. Differs by: `total` includes the root, as for `eagle2`; `max_depth` can end
    the drafting earlier (the paper's only end is the budget, up to `total - 1` draft passes for a chain). How many nodes pass
    the gate is the device's to tell, so the host waits for it once per level.

    Args:
        total: nodes per round, the root included.
        top_k: K.
        ratio: mu, the share of the level's largest path probability that a node needs.
        max_depth: levels drafted at most; None = until the budget is spent.

    Raises:
        ValueError: an option that is out of range.
    """

    name = "talon"

    def __init__(self, total: int = 60, top_k: int = 10, ratio: float = 0.03, max_depth: int | None = None) -> None:
        check_count("policy.talon.total", total, 2, "; the policy autoregressive drafts nothing")
        check_count("policy.talon.top_k", top_k, 1)
        check_share("policy.talon.ratio", ratio)
        if max_depth is not None:
            check_count("policy.talon.max_depth", max_depth, 1, " or null")
        self.total, self.top_k, self.ratio, self.max_depth = total, top_k, ratio, max_depth
        self.candidates = top_k
        self.max_nodes = total

    def begin(self) -> dict[str, float]:
        self._left = self.total - 1
        return {}

    def grow(self, frontier: Frontier) -> Growth | None:
        picks, order, paths = best_children(frontier, self.top_k, self._left)
        if frontier.level > 1:
            num_sure = int((paths >= self.ratio * paths[0]).sum())
            picks = picks.take(order[:num_sure].sort().values)
        self._left -= len(picks)
        is_last = self._left == 0 or frontier.level == self.max_depth
        return Growth(picks, picks[:0] if is_last else picks)
