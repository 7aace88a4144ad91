"""What time is worth while a tree is planned by its costs; for `cost_aware`."""

from __future__ import annotations

from typing import NamedTuple

from sage.costs.tables import Costs

CONFIDENCE_BINS = 4


class ChildMass:
    """s(depth, confidence): the acceptance mass that a node's candidates keep, learned before it has to be paid for.

    `confidence` is the probability that the node itself is accepted, in CONFIDENCE_BINS equal bins.
    """

    def __init__(self, most_depth: int, start: float = 0.75, weight: float = 2.0, memory: float = 0.995) -> None:
        self.memory = memory
        self.sums = [[start * weight] * CONFIDENCE_BINS for _ in range(most_depth + 1)]
        self.counts = [[weight] * CONFIDENCE_BINS for _ in range(most_depth + 1)]

    def table(self, most_depth: int) -> list[list[float]]:
        """By depth: the expected mass below a node that is itself accepted with probability a, at int(a * CONFIDENCE_BINS)."""
        cells = zip(self.sums, self.counts, strict=True)
        means = [[total / count for total, count in zip(*row, strict=True)] for row in cells]
        means = [[*row, row[-1]] for row in means]  # a = 1
        return [means[min(depth, len(means) - 1)] for depth in range(most_depth + 1)]

    def learn(self, depth: int, acceptance: float, mass: float) -> None:
        """Books the mass found below one node."""
        depth, column = min(depth, len(self.sums) - 1), min(int(acceptance * CONFIDENCE_BINS), CONFIDENCE_BINS - 1)
        sums, counts = self.sums[depth], self.counts[depth]
        sums[column] = self.memory * sums[column] + mass
        counts[column] = self.memory * counts[column] + 1


class Prices(NamedTuple):
    """What a round is planned by; computed once for everything learned.

    Attributes:
        time: lambda, tokens per second.
        node: of verifying one more node of a usual tree, in tokens.
        levels: of drafting a level that is 1, 2, .. nodes wide, and of verifying what it brings, in tokens.
        level_s: seconds of such a level.
        verify_s: seconds of verifying 1, 2, .. nodes.
        masses: of children, by depth and confidence (`ChildMass.table`).
    """

    time: float
    node: float
    levels: list[float]
    level_s: list[float]
    verify_s: list[float]
    masses: list[list[float]]

    @classmethod
    def of(cls, time: float, costs: Costs, usual_size: float, nodes: int, width: int, masses: list[list[float]]) -> Prices:
        """Prices under measured costs.

        Args:
            time: tokens per second.
            usual_size: nodes of a usual tree. The slope of the cost curve around it is what a node costs while its level is
                being drafted; once all are there the curve itself decides.
            nodes, width: the most that are verified, and the widest level.
        """
        low, high = max(round(usual_size / 2), 2), max(round(1.5 * usual_size), 4)
        node = time * (costs.verify(high) - costs.verify(low)) / (high - low)
        level_s = costs.draft.up_to(width)
        levels = [time * seconds + count * node for count, seconds in enumerate(level_s, start=1)]
        return cls(time, node, levels, level_s, costs.verify.up_to(nodes + 1), masses)
