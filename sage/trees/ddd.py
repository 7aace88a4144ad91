"""Dynamic Depth Decoding. Ref: DDD, arXiv 2409.00142."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from sage.io.ranges import PositiveInt, Range
from sage.planning.base import OptionError
from sage.trees.eagle2 import Eagle2


@dataclass(eq=False, kw_only=True)
class Ddd(Eagle2):
    """`eagle2` whose depth ends when the summed path probability of the beam falls below a threshold (arXiv 2409.00142).

    The paper's heuristic is H = log sum_i exp(logprobsum_i) over the beam, compared with a threshold after selected draft steps
    only. For a calibrated draft, exp(H) is the probability that the
    target's text is still in the beam, and thus an upper bound of the tokens that the next level can add.

    Ref: DDD, arXiv 2409.00142 (EAGLE-2 with 11 draft steps, beam 10). Differs by: the threshold is given as the probability
    exp(H), and every `check_every`-th level is checked instead of a hand-picked list; the last level needs no check. The level
    after which drafting stops stays in the tree. At most `total - 1` nodes of a beam are summed.

    Args:
        depth: levels drafted per round at most; `total` and `top_k` as for `eagle2`.
        threshold: summed probability of the beam below which no further level is drafted.
        check_every: levels between two checks; 1 checks every level.
    """

    name = "ddd"

    depth: PositiveInt = 11
    threshold: Annotated[float, Range(gt=0, lt=1)] = 0.3
    check_every: PositiveInt = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.check_every >= self.depth:
            raise OptionError(
                self.name,
                "check_every",
                f"{self.check_every} allows no check before the last level, depth={self.depth}; give less than the depth, "
                f"or use the policy eagle2",
            )

    def _is_last(self, level: int) -> bool:
        return level >= self.depth or (level % self.check_every == 0 and sum(self._beam) < self.threshold)
