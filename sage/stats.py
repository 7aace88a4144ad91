"""Counts and times of one generation, one meaning per name."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

PHASES = (
    "vision",
    "target_prefill",
    "draft_prefill",
    "draft_steps",
    "verify",
    "accept",
    "commit",
    "policy",
    "other",
)
OUTSIDE = "outside"
PREFILL_PHASES = ("vision", "target_prefill", "draft_prefill")


@dataclass
class RoundTimes:
    """Live timings of one round.

    Attributes:
        verify_s: seconds of the target pass.
        draft: (width, seconds) of each draft pass, with the policy's own time before it: a level costs both.
        total_s: seconds of the whole round, the re-synchronisation of the draft included.
    """

    verify_s: float = 0.0
    draft: list[tuple[int, float]] = field(default_factory=list)
    total_s: float = 0.0


class Clock:
    """Adds up time per phase. `lap(name)` books everything since the last lap under `name`.

    On CUDA each lap records an event and nothing waits; `seconds()` resolves them at the end.
    """

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._now: Callable[[], Any] = _event if self._is_cuda else time.perf_counter
        self._laps: list[tuple[str, int, Any]] = [("start", 0, self._now())]
        self._round_start = 0

    def lap(self, phase: str, count: int = 0) -> None:
        """Ends a stretch of work on `count` nodes and books it."""
        self._laps.append((phase, count, self._now()))

    def skip(self) -> None:
        """Ends a stretch of work that is booked nowhere."""
        self.lap(OUTSIDE)

    def start_round(self) -> None:
        """Starts a round; what was done with the last one since, outside of the decoder, is booked nowhere."""
        self._round_start = len(self._laps)
        self.skip()

    def round_times(self) -> Callable[[], RoundTimes]:
        """How to get the timings from `start_round` to here; that waits for the device, and can wait."""
        return partial(self._times_of, self._round_start, len(self._laps))

    def _times_of(self, start: int, end: int) -> RoundTimes:
        times, waiting = RoundTimes(), 0.0
        for phase, count, seconds in self._resolve(start, end):
            times.total_s += seconds
            if phase == "policy":
                waiting += seconds
            elif phase == "draft_steps":
                times.draft.append((count, waiting + seconds))
                waiting = 0.0
            elif phase == "verify":
                times.verify_s += seconds
        return times

    def seconds(self) -> dict[str, float]:
        """Seconds per phase, every phase named."""
        total = dict.fromkeys(PHASES, 0.0)
        for phase, _, seconds in self._resolve(0):
            if phase != OUTSIDE:
                total[phase] += seconds
        return total

    def _resolve(self, start: int, end: int | None = None) -> list[tuple[str, int, float]]:
        if self._is_cuda:
            torch.cuda.synchronize()
        marks = self._laps[start:end]
        return [
            (phase, count, before.elapsed_time(now) / 1e3 if self._is_cuda else now - before)
            for (_, _, before), (phase, count, now) in zip(marks, marks[1:], strict=False)
        ]


def _event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


@dataclass
class Stats:
    """What one generation did.

    Attributes:
        rounds: draft-and-verify rounds.
        target_passes: passes of the target after prefill; equals `rounds`.
        draft_steps: passes of the draft after its prefill, one per level and one per re-synchronisation.
        prompt_tokens: of the prompt, as the target reads it.
        draft_context: rows that stand for the prompt in the draft's cache; 0 without a draft.
        accepted: drafted tokens accepted in each round, after cutting at the end of the answer.
        new_tokens: emitted tokens, the first one (from the prefill) included.
        time_s: seconds per phase.
        rounds_log: per round: depth, nodes, accepted and what the policy planned.
    """

    rounds: int = 0
    target_passes: int = 0
    draft_steps: int = 0
    prompt_tokens: int = 0
    draft_context: int = 0
    accepted: list[int] = field(default_factory=list)
    new_tokens: int = 0
    time_s: dict[str, float] = field(default_factory=dict)
    rounds_log: list[dict[str, Any]] = field(default_factory=list)

    def note_round(self, depth: int, nodes: int, accepted: int, figures: dict[str, float]) -> None:
        """Records one verified tree of `nodes` drafted nodes, `accepted` of them accepted, and the policy's figures."""
        self.rounds += 1
        self.target_passes += 1
        self.accepted.append(accepted)
        self.rounds_log.append({**figures, "depth": depth, "nodes": nodes, "accepted": accepted})

    @property
    def mean_accepted_draft(self) -> float:
        """Drafted tokens accepted per round (the SAGE paper's tau)."""
        return sum(self.accepted) / len(self.accepted) if self.accepted else 0.0

    @property
    def tokens_per_target_pass(self) -> float:
        """Tokens per verification pass, bonus token included (the EAGLE papers' tau); the prefill's token is not counted."""
        return (self.new_tokens - 1) / self.target_passes if self.target_passes else 0.0

    @property
    def decode_s(self) -> float:
        """Seconds after vision and prefill."""
        return sum(seconds for phase, seconds in self.time_s.items() if phase not in PREFILL_PHASES)

    @property
    def total_s(self) -> float:
        """Seconds of everything."""
        return sum(self.time_s.values())
