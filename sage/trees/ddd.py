"""Dynamic Depth Decoding: EAGLE-2's trees, drafted only as deep as the draft is sure. Ref: DDD, arXiv 2409.00142."""

from __future__ import annotations

from torch import Tensor

from sage.trees.eagle2 import Eagle2
from sage.trees.options import check_count, check_share


class Ddd(Eagle2):
    """EAGLE-2 that stops deepening when the beam's summed path probability falls below a threshold.

    The paper's heuristic is H = log sum_i exp(logprobsum_i) over the beam, compared with a threshold after chosen draft steps
    only, since each comparison makes the host wait for the device. exp(H) is, for a calibrated draft, the probability that the
    target's text is still in the beam, and so an upper bound of the tokens that the next level can bring.

    Ref: DDD, arXiv 2409.00142 (EAGLE-2 with 11 draft steps, beam 10). Differs by: the threshold is given as the probability
    exp(H), and the checked levels are every `check_every`-th one instead of a hand-picked list; the last level needs no check.
    The level at which drafting stops stays in the tree: it is drafted already. No more than `total - 1` nodes of a beam count.

    Args:
        total, depth, top_k: as for `eagle2`; `depth` is the most that is drafted.
        threshold: the beam's summed probability below which no further level is drafted.
        check_every: levels between two checks; 1 checks after every level.

    Raises:
        ValueError: an option that is out of range, or a check that would never take place.
    """

    name = "ddd"

    def __init__(self, total: int = 60, depth: int = 11, top_k: int = 10, threshold: float = 0.3, check_every: int = 2) -> None:
        super().__init__(total, depth, top_k)
        check_share("policy.ddd.threshold", threshold)
        check_count("policy.ddd.check_every", check_every, 1)
        if check_every >= depth:
            raise ValueError(
                f"policy.ddd.check_every: {check_every} checks nothing before the last level, depth={depth}; give less than "
                f"the depth, or take the policy eagle2"
            )
        self.threshold, self.check_every = threshold, check_every

    def _is_last(self, level: int, beam: Tensor) -> bool:
        if level >= self.depth:
            return True
        return level % self.check_every == 0 and bool(beam.sum() < self.threshold)
