"""Examples that are longer than `data.max_length`: their outcome, and the value that keeps them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from data_prep.chat import Fit, Lengths
from data_prep.config import DataConfig, OnLong


@dataclass
class LongExamples:
    """The examples of a data set that exceed `max_length`.

    Attributes:
        total: examples of the data set; None for a stream.
        counts: measured examples by outcome.
        longest: tokens of the longest measured example before it is shortened.
        shortest: tokens of the shortest first turn.
    """

    total: int | None
    max_length: int | None
    on_long: OnLong
    counts: Counter[Fit] = field(default_factory=Counter)
    longest: int = 0
    shortest: int = 0

    def add(self, lengths: Lengths) -> None:
        """Counts one example."""
        self.shortest = min(self.shortest or lengths.first_turn, lengths.first_turn)
        self.longest = max(self.longest, lengths.total)
        self.counts[lengths.fit(self.max_length, self.on_long)] += 1

    @property
    def num_measured(self) -> int:
        return self.counts.total()

    @property
    def num_long(self) -> int:
        return self.num_measured - self.counts[Fit.kept]

    @property
    def dropped_share(self) -> float:
        """Share of the measured examples that are dropped."""
        return self.counts[Fit.dropped] / max(1, self.num_measured)

    def line(self) -> str:
        """Returns one line: the number of examples that are too long, their outcome, and the value that keeps them."""
        if not self.num_long:
            limit = "no data.max_length" if self.max_length is None else f"data.max_length={self.max_length}"
            return f"the longest of {self._extent()} has {self.longest} tokens ({limit})"
        fates = [f"{self.counts[Fit.shortened]} shortened"] if self.counts[Fit.shortened] else []
        fates += [f"{self.counts[Fit.dropped]} dropped, {self.dropped_share:.0%} of all"] if self.counts[Fit.dropped] else []
        return (
            f"{self.num_long} of {self._extent()} are too long for data.max_length={self.max_length}: {' and '.join(fates)} "
            f"(data.on_long={self.on_long}); data.max_length={self.longest} keeps all of them complete"
        )

    def check(self, allowed: float = 1.0) -> None:
        """Raises ValueError with the `refusal`, if there is one."""
        if reason := self.refusal(allowed):
            raise ValueError(reason)

    def refusal(self, allowed: float = 1.0) -> str:
        """Returns why these examples are refused: all measured ones would be dropped, or more than the share `allowed` without
        `data.on_long=drop`; else "".
        """
        share = self.dropped_share
        if share < 1 and (share <= allowed or self.on_long is OnLong.drop):
            return ""
        number = "all" if share == 1 else f"{share:.0%}"
        reason = f"whose first turns have at least {self.shortest} tokens" if share == 1 else f"more than {allowed:.0%}"
        accepted = "" if share == 1 else ", data.on_long=drop trains on the others"
        return (
            f"data.max_length: {self.max_length}; drops {number} of {self._extent()} (data.on_long={self.on_long}), {reason}; "
            f"data.max_length={self.longest} keeps all of them complete{accepted}, "
            "and data.max_pixels scales images down"
        )

    def _extent(self) -> str:
        if self.num_measured == self.total:
            return f"{self.total} examples"
        return f"{self.num_measured} measured examples" + (f" (of {self.total})" if self.total is not None else "")


def find_long(config: DataConfig, lengths: Iterable[Lengths], total: int | None) -> LongExamples:
    """Counts examples by their lengths."""
    found = LongExamples(total, config.max_length, config.on_long)
    for item in lengths:
        found.add(item)
    return found


def as_array(lengths: Iterable[Lengths]) -> np.ndarray:
    """Returns lengths as int64 [N, 3], the columns in the order of `Lengths`."""
    return np.array(list(lengths), dtype=np.int64).reshape(-1, len(Lengths._fields))
