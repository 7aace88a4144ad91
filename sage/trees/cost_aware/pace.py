"""Whether rounds of several requests are faster with drafting or without it, by measurement of whole rounds.

Costs of passes are measured for one request, and work of the host adds up over requests, so prices alone do not decide where
the two are close. Once in a while a few rounds of the other kind are run; such trials become rare while they change nothing.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field

MEMORY = 0.98  # share of the evidence that is kept from one round to the next
COUNTS = (1, 2, 3, 5, 8, 12, 16, 24, 32)  # of requests; those up to one of them, beyond the last one, are taken to be alike
TRIAL_ROUNDS, TRIAL_REQUESTS = 6, 32  # a trial has at least as many rounds, and rounds of requests
FIRST_GAP, MIN_GAP, MAX_GAP = 6, 64, 1024  # rounds between two trials


@dataclass
class Speed:
    """Tokens and seconds of recent rounds."""

    tokens: float = 0.0
    seconds: float = 0.0

    @property
    def per_s(self) -> float:
        """Tokens per second; 0 before any round."""
        return self.tokens / self.seconds if self.seconds else 0.0

    def add(self, tokens: int, seconds: float) -> None:
        """Adds a round."""
        self.tokens = MEMORY * self.tokens + tokens
        self.seconds = MEMORY * self.seconds + seconds


@dataclass
class OfCount:
    """What is known for numbers of requests that are taken to be alike.

    Attributes:
        drafts: whether drafting is faster as far as known.
        gap: rounds until the next trial, of which `waited` have passed.
        trial: rounds of the present trial that are left.
    """

    drafts: bool
    gap: int = FIRST_GAP
    waited: int = 0
    trial: int = 0
    speeds: dict[bool, Speed] = field(default_factory=lambda: {True: Speed(), False: Speed()})


class Pace:
    """Decides for all requests of a round at once whether they draft."""

    def __init__(self) -> None:
        self._known: dict[int, OfCount] = {}
        self._last = 0  # place in COUNTS of the last round's number of requests
        self._round: tuple[OfCount, bool] | None = None

    def begin(self, requests: int) -> bool:
        """Starts a round of so many requests; returns whether they draft."""
        self._last = place = bisect_left(COUNTS, requests)
        if place not in self._known:
            self._known[place] = OfCount(self.drafts)
        own = self._known[place]
        if own.trial == 0 and own.waited >= own.gap:
            own.trial, own.waited = max(TRIAL_ROUNDS, TRIAL_REQUESTS // requests), 0
        drafts = own.drafts != (own.trial > 0)
        self._round = own, drafts
        return drafts

    def observe(self, tokens: int, seconds: float) -> None:
        """Learns from the round that was started last."""
        if self._round is None:
            return
        (own, drafts), self._round = self._round, None
        own.speeds[drafts].add(tokens, seconds)
        if own.trial == 0:
            own.waited += 1
            return
        own.trial -= 1
        if own.trial == 0:
            changes = own.speeds[drafts].per_s > own.speeds[not drafts].per_s
            own.gap = MIN_GAP if changes else min(max(2 * own.gap, MIN_GAP), MAX_GAP)
            own.drafts = drafts if changes else not drafts

    @property
    def drafts(self) -> bool:
        """Whether drafting is taken to be faster for as many requests as in the last round; as for the nearest known number."""
        nearest = min(self._known, key=lambda place: abs(place - self._last), default=None)
        return nearest is None or self._known[nearest].drafts
