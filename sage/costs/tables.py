"""Cost tables of draft levels and verification passes, corrected by live timings.

Ref: SAGE, arXiv 2602.00523, Eq. 6. Differs by: the paper charges drafting per node; here drafting has a cost per level, and
verification a cost by number of nodes and context length.

A pass whose numbers of nodes and keys are dynamic, eager or compiled, computes exactly its nodes, so its cost grows with every
one of them and is interpolated between the measured counts. A captured pass computes the bucket that they are padded to
(`node_bucket`), so its cost is a step function: that of the bucket's edge. The keys of a target pass that reads their number
from the device are not padded.

Shapes: N verified nodes (the root included), S context tokens.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from sage.runtime.pass_function import key_bucket, node_bucket


@dataclass
class Curve:
    """Seconds as a piecewise linear function of a count, with live corrections.

    `counts` increase; `seconds` are made non-decreasing (isotonic regression); `scale` is a factor from live timings;
    `is_stepped`: whether a count costs as much as the edge of its bucket.
    """

    counts: list[int]
    seconds: list[float]
    scale: float = 1.0
    is_stepped: bool = False

    def __post_init__(self) -> None:
        if not self.counts or len(self.counts) != len(self.seconds) or not all(0 < value < math.inf for value in self.seconds):
            raise ValueError(f"costs: {self.seconds} is not one positive number of seconds for each of {self.counts}")
        self.seconds = _non_decreasing(self.seconds)

    def __call__(self, count: float) -> float:
        """Returns the seconds at `count`, at least those at the table's first one; extrapolates linearly beyond the table."""
        if len(self.counts) == 1:
            return self.scale * self.seconds[0]
        count = node_bucket(math.ceil(count)) if self.is_stepped else count
        upper = min(max(bisect_left(self.counts, count), 1), len(self.counts) - 1)
        (first, last), (first_s, last_s) = self.counts[upper - 1 : upper + 1], self.seconds[upper - 1 : upper + 1]
        return self.scale * max(first_s + (count - first) / (last - first) * (last_s - first_s), self.seconds[0])

    def up_to(self, count: int) -> list[float]:
        """Returns the seconds at 1, 2, .. `count`."""
        return [self(number) for number in range(1, count + 1)]

    def correct(self, expected: float, seconds: float, rate: float) -> None:
        """Moves the correction towards a timing of `seconds`, predicted as `expected`, by a learning rate in [0, 1]."""
        self.scale *= correction(expected, seconds, rate)


def _non_decreasing(values: Sequence[float]) -> list[float]:
    """Returns the non-decreasing sequence of least squared distance, by pooling of adjacent violators."""
    pools: list[tuple[float, int]] = []  # mean and number of values
    for value in values:
        count = 1
        while pools and pools[-1][0] > value:
            mean, number = pools.pop()
            value = (mean * number + value * count) / (number + count)
            count += number
        pools.append((value, count))
    return [mean for mean, number in pools for _ in range(number)]


def correction(expected: float, seconds: float, rate: float) -> float:
    """Returns the factor that moves a prediction towards a timing, by a learning rate in [0, 1].

    Timings off by a factor above three, which are interruptions, are ignored.
    """
    ratio = seconds / expected
    return float(ratio**rate) if 1 / 3 < ratio < 3 else 1.0


@dataclass
class Costs:
    """Measured costs of one (target, draft, machine).

    Attributes:
        verify: seconds of a target pass by number of nodes, at `context` tokens.
        draft: seconds of a draft level by its width.
        context: S the verify curve was measured at.
        verify_per_token: additional seconds of a target pass over one node per context token beyond `context`.
        verify_per_pair: the same for every further node.
        commit_s: seconds of the draft pass that starts a round, over the accepted tokens; None: as a level of one node.
        overhead: seconds per round beyond passes and levels.
        has_key_buckets: whether a target pass costs as much as the bucket of its keys.
    """

    verify: Curve
    draft: Curve
    context: int
    verify_per_token: float = 0.0
    verify_per_pair: float = 0.0
    commit_s: float | None = None
    overhead: float = 0.0
    has_key_buckets: bool = False

    def drafting_s(self, widths: Sequence[int]) -> list[float]:
        """Returns the seconds of draft passes by width; 0 stands for the pass that starts a round."""
        return [self.draft(width) if width else self.first_level_s for width in widths]

    def verify_s(self, nodes: int, context: int) -> float:
        """Returns c_t(n, S), at least half of the value at `context`."""
        at_context = self.verify(nodes)
        longer = context - self.context
        if self.has_key_buckets:
            longer = key_bucket(context + nodes + 1) - key_bucket(self.context + nodes + 1)
        per_token = self.verify_per_token + self.verify_per_pair * (nodes - 1)
        return max(at_context + self.verify.scale * per_token * longer, at_context / 2)

    @property
    def first_level_s(self) -> float:
        """Seconds of the draft pass that starts a round; its candidates are the first level."""
        return self.draft(1) if self.commit_s is None else self.commit_s

    def shared(self, rows: int, requests: int) -> Costs:
        """Returns the costs for one of several requests that share their passes; these costs if there is one.

        A target pass costs that over all nodes, so that one more node costs what it adds to them; a draft pass costs the
        request's share of that of all, as if all drafted alike.

        Args:
            rows: nodes of the other requests.
            requests: number of requests, this one included.
        """
        if requests == 1:
            return self
        counts = [1, *(count - rows for count in self.verify.counts if count - rows > 1)]
        counts += [counts[-1] + 1]  # beyond the table, the last slope
        shares = [self.draft(requests * width) / requests for width in self.draft.counts]
        return replace(
            self,
            verify=Curve(counts, [self.verify(rows + count) for count in counts]),
            draft=Curve(list(self.draft.counts), shares),
            commit_s=self.first_level_s / requests,
        )

    def state(self) -> dict[str, Any]:
        """Returns the tables as JSON-serializable numbers."""
        return asdict(self)

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Costs:
        """Restores the result of `state`, also of earlier versions, which stored two fields more."""
        numbers = {name: value for name, value in state.items() if name != "is_disturbed"}
        for name in ("verify", "draft"):
            numbers[name] = Curve(**{key: value for key, value in dict(state[name]).items() if key != "growth"})
        return cls(**numbers)
