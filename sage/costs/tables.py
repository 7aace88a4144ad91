"""What a draft level and a verification pass cost on this machine, as tables that live timings correct.

Ref: SAGE, arXiv 2602.00523, Eq. 6 charges drafting per node; the real cost is per level, and verification depends on the
number of nodes and on the context, so both are tables here.

Owns the tables; `sage.costs.measure` measures them at start-up.

Shapes: N verified nodes (the root included), S context tokens.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import asdict, dataclass
from typing import Any


@dataclass
class Curve:
    """Seconds as a piecewise linear function of a count, with a live correction factor.

    Attributes:
        counts: increasing.
        seconds: at those counts, made non-decreasing.
        scale: what live timings multiply the table by.
    """

    counts: list[int]
    seconds: list[float]
    scale: float = 1.0

    def __post_init__(self) -> None:
        for i in range(1, len(self.seconds)):
            self.seconds[i] = max(self.seconds[i], self.seconds[i - 1])

    def __call__(self, count: float) -> float:
        """Seconds at `count`; beyond the table its last slope goes on."""
        return self.scale * self._interpolate(count)

    def up_to(self, count: int) -> list[float]:
        """Seconds at 1, 2, .. `count`."""
        return [self(one) for one in range(1, count + 1)]

    def _interpolate(self, count: float) -> float:
        upper = min(bisect_left(self.counts, count), len(self.counts) - 1)
        lower = max(upper - 1, 0)
        if lower == upper:
            return self.seconds[upper]
        share = (count - self.counts[lower]) / (self.counts[upper] - self.counts[lower])
        return self.seconds[lower] + share * (self.seconds[upper] - self.seconds[lower])

    def correct(self, expected: float, seconds: float, rate: float) -> None:
        """Moves the correction towards one live timing; timings over three times off are interruptions, not costs.

        Args:
            expected: seconds by this table, as it is corrected so far.
            seconds: what it took.
            rate: how far to follow, 0 to 1.
        """
        ratio = seconds / expected
        if 1 / 3 < ratio < 3:
            self.scale *= ratio**rate


@dataclass
class Costs:
    """Measured costs of one (target, draft, machine).

    Attributes:
        verify: seconds of a target pass by number of nodes, at `context` tokens.
        draft: seconds of a draft level by its width.
        context: S the verify curve was measured at.
        verify_per_token: extra seconds of a target pass per context token beyond `context`.
        overhead: seconds per round that neither passes nor levels explain.
    """

    verify: Curve
    draft: Curve
    context: int
    verify_per_token: float = 0.0
    overhead: float = 0.0

    def verify_s(self, nodes: int, context: int) -> float:
        """c_t(n, S); however short S is, half of what it takes at `context` remains."""
        at_context = self.verify(nodes)
        longer_s = self.verify.scale * self.verify_per_token * (context - self.context)
        return max(at_context + longer_s, at_context / 2)

    def state(self) -> dict[str, Any]:
        """As plain numbers, for JSON."""
        return asdict(self)

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Costs:
        """The reverse of `state`."""
        return cls(**{**state, "verify": Curve(**state["verify"]), "draft": Curve(**state["draft"])})
