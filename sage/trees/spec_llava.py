"""Spec-LLaVA's trees: a fixed node budget with global re-ranking. Ref: Spec-LLaVA, arXiv 2509.11961.

Shapes: N tree nodes, F frontier nodes, M chosen.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sage.trees.base import Policy
from sage.trees.options import check_count, check_share, check_switch
from sage.trees.ranking import best_children, best_nodes
from sage.trees.tree import Drafted, Frontier, Growth


class SpecLlava(Policy):
    """The `budget` most probable nodes of a wide tree.

    The root takes its top-B tokens. Each growth step gives every unexpanded node of the kept set its top-b children and keeps
    the B nodes of the best path score, over all depths; so one long sure path can push out every alternative beside it.

    Ref: Spec-LLaVA, arXiv 2509.11961, dynamic tree construction. Differs by:

    * Score. The path's probability (sum of log-probabilities). The authors' code sums raw logits; policies see
      probabilities only, so that option would need the logits in `Frontier` and a running sum of them. It also
      lets a child outscore its parent, so that the kept set would have to be closed again.
    * What is asked. How many nodes of a level are kept is known to the device alone. Unless `follow_kept`, the host does
      not wait for it: each level asks the draft about as many nodes as could be kept at all (`level_widths`). That leads to
      the same tree, because a node outside the best B has only descendants outside it.
    * Pruning. `min_confidence` drops improbable nodes before verification; with `follow_kept` they are not asked about either.

    Args:
        budget: B, nodes kept, the root not counted.
        branch: b, children of an expanded node.
        steps: growth steps after the root's; the tree has at most `steps + 1` levels.
        min_confidence: path probability below which a node is not verified; 0 = no pruning.
        follow_kept: ask the draft about kept nodes only, at the price of one wait per level; free on a CPU.

    Raises:
        ValueError: an option that is out of range.
    """

    name = "spec_llava"

    def __init__(
        self,
        budget: int = 127,
        branch: int = 31,
        steps: int = 6,
        min_confidence: float = 0.0,
        follow_kept: bool = False,
    ) -> None:
        check_count("policy.spec_llava.budget", budget, 1, "; the policy autoregressive drafts nothing")
        check_count("policy.spec_llava.branch", branch, 1)
        check_count("policy.spec_llava.steps", steps, 0)
        check_share("policy.spec_llava.min_confidence", min_confidence, is_zero_allowed=True)
        check_switch("policy.spec_llava.follow_kept", follow_kept)
        self.budget, self.branch, self.steps = budget, branch, steps
        self.min_confidence, self.follow_kept = min_confidence, follow_kept
        self.candidates = max(budget, branch)
        self.widths = level_widths(budget, branch, steps + 1)
        self.max_nodes = max(budget, sum(self.widths[:-1])) + 1

    def begin(self) -> dict[str, float]:
        self._kept: Tensor | None = None
        return {}

    def grow(self, frontier: Frontier) -> Growth | None:
        branching = self.budget if frontier.level == 1 else self.branch
        picks, order, paths = best_children(frontier, branching, self.widths[frontier.level - 1])
        if frontier.level == len(self.widths):
            return Growth(picks, picks[:0])
        if self.follow_kept:
            return Growth(picks, picks[self._newly_kept(paths[order.argsort()])])
        return Growth(picks, picks)

    def _newly_kept(self, path_M: Tensor) -> Tensor:
        """Re-ranks the kept set with a new level [M] in it; indices of the new nodes that stay. Waits for the device."""
        pool = path_M if self._kept is None else torch.cat((self._kept, path_M))
        ranked = pool.sort(descending=True, stable=True)
        self._kept = ranked.values[: self.budget]
        is_kept = torch.zeros_like(pool, dtype=torch.bool)
        is_kept[ranked.indices[: self.budget]] = True
        return (is_kept[-len(path_M) :] & (path_M >= self.min_confidence)).nonzero()[:, 0]

    def select(self, drafted: Drafted) -> Tensor | None:
        keep = best_nodes(drafted, self.budget + 1)
        if self.min_confidence:
            return keep[drafted.path_probs[keep] >= self.min_confidence]
        return keep if len(keep) < len(drafted) else None


def level_widths(budget: int, branch: int, levels: int) -> list[int]:
    """How many nodes of each level the best `budget` can hold at most; levels that can hold none are left out.

    A kept node brings its ancestors: r nodes of level l have at least ceil(r / b^j) distinct ancestors j levels up. For B = 16,
    b = 2 level 2 holds at most 10 (with 5 parents: 15; 11 with 6 would be 17), level 3 at most 8 (8 + 4 + 2 = 14).
    """

    def size(width: int, level: int) -> int:
        return sum(-(-width // branch**above) for above in range(level))

    rooms = (max(r for r in range(budget + 1) if size(r, level) <= budget) for level in range(1, levels + 1))
    return [room for room in rooms if room > 0]
