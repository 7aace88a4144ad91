"""Prices of nodes and levels in tokens, and the acceptance mass of unexpanded levels."""

from __future__ import annotations

from typing import NamedTuple

from sage.costs.tables import Costs

CONFIDENCE_BINS = 4
LEAST_SIZE = 4  # nodes of the smallest tree that the price of a node is taken from


class ChildMass:
    """s(depth, confidence): mean acceptance mass of the candidates below a node, used before the node is expanded.

    `confidence` is the acceptance probability of the node itself, in CONFIDENCE_BINS equal bins.
    """

    def __init__(self, most_depth: int, start: float = 0.75, weight: float = 2.0, memory: float = 0.995) -> None:
        self.memory = memory
        self.sums = [[start * weight] * CONFIDENCE_BINS for _ in range(most_depth + 1)]
        self.counts = [[weight] * CONFIDENCE_BINS for _ in range(most_depth + 1)]

    def table(self, most_depth: int) -> list[list[float]]:
        """Returns, by depth, the mean mass below a node of acceptance probability a, at index int(a * CONFIDENCE_BINS)."""
        cells = zip(self.sums, self.counts, strict=True)
        means = [[total / count for total, count in zip(*row, strict=True)] for row in cells]
        means = [[*row, row[-1]] for row in means]  # a = 1
        return [means[min(depth, len(means) - 1)] for depth in range(most_depth + 1)]

    def learn(self, depth: int, acceptance: float, mass: float) -> None:
        """Adds the mass observed below one node."""
        depth, column = min(depth, len(self.sums) - 1), min(int(acceptance * CONFIDENCE_BINS), CONFIDENCE_BINS - 1)
        sums, counts = self.sums[depth], self.counts[depth]
        sums[column] = self.memory * sums[column] + mass
        counts[column] = self.memory * counts[column] + 1


class Prices(NamedTuple):
    """Prices of one round; constant between two learning steps.

    Attributes:
        time: lambda, tokens per second.
        node: price of one more node of a tree of usual size, in tokens.
        levels: price of a level of 1, 2, .. expanded nodes, verification of as many nodes included, in tokens.
        level_s: seconds of drafting such a level.
        first_s: seconds of the draft pass over the accepted tokens, whose candidates are the first level.
        verify_s: seconds of verifying 1, 2, .. nodes.
        masses: acceptance mass of children, by depth and confidence (`ChildMass.table`).
    """

    time: float
    node: float
    levels: list[float]
    level_s: list[float]
    first_s: float
    verify_s: list[float]
    masses: list[list[float]]

    @classmethod
    def of(
        cls, time: float, costs: Costs, usual_size: float, left_out: float, nodes: int, width: int, masses: list[list[float]]
    ) -> Prices:
        """Returns the prices under measured costs.

        Args:
            time: tokens per second.
            usual_size: usual number of nodes of a tree. The mean slope of the cost curve up to it is the price of a node while
                levels are drafted; the final selection uses the curve itself. Beyond it, a kernel may need one more tile of
                rows, at the price of a third of a pass: no reason to draft less than fits into those that are needed anyway.
            left_out: usual P of the best node that was drafted and not verified. A node must promise half of it at least:
                where rows of a tile are free, the slope alone would let any number of nodes be drafted for a few rows.
            nodes, width: maximum number of verified nodes, and of expanded nodes of a level.
        """
        size = max(round(usual_size), LEAST_SIZE)
        node = max(time * (costs.verify(size) - costs.verify(2)) / (size - 2), left_out / 2, 0.0)
        level_s = costs.draft.up_to(width)
        levels = [time * seconds + count * node for count, seconds in enumerate(level_s, start=1)]
        return cls(time, node, levels, level_s, costs.first_level_s, costs.verify.up_to(nodes + 1), masses)
