"""Timers: seconds per phase of a generation, and repeated timing of single calls. All wait for the device where it matters."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

PHASES = ("vision", "target_prefill", "draft_prefill", "draft_steps", "verify", "accept", "commit", "policy", "other")
UNTIMED = "untimed"


def synchronize(device: torch.device) -> None:
    """Waits for all work queued on `device`; does nothing on the CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def now_s(device: torch.device) -> float:
    """Seconds of a monotonic clock after all work queued on `device`."""
    synchronize(device)
    return time.perf_counter()


@dataclass
class TimedCall:
    """A call to be timed; `reset` restores the state that it starts from, outside the clock."""

    run: Callable[[], Any]
    reset: Callable[[], object] = lambda: None


def interleaved_s(calls: Sequence[TimedCall], repeats: int, device: torch.device) -> list[list[float]]:
    """Times several calls in turns, so that a slow spell of the machine affects all alike; returns, per call, the seconds of
    each of `repeats` runs after one warm-up.
    """
    times: list[list[float]] = [[] for _ in calls]
    for _ in range(repeats + 1):
        for own, call in zip(times, calls, strict=True):
            call.reset()
            start = now_s(device)
            call.run()
            own.append(now_s(device) - start)
    return [own[1:] for own in times]


@dataclass
class RoundTimes:
    """Timings of one round; `total_s` includes the synchronization of the draft.

    `draft`: (width, seconds) of each draft pass, including the policy's time before it.
    """

    verify_s: float = 0.0
    draft: list[tuple[int, float]] = field(default_factory=list)
    total_s: float = 0.0


class Clock:
    """Adds up time per phase; `lap(phase)` assigns the time since the last lap to `phase`.

    On CUDA each lap records an event without a device synchronization; `seconds()` resolves all of them at the end.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self._is_cuda = device, device.type == "cuda"
        self._now: Callable[[], Any] = partial(_event, device) if self._is_cuda else time.perf_counter
        self._laps: list[tuple[str, int, Any]] = [("start", 0, self._now())]
        self._round_start = 0

    def lap(self, phase: str, num_nodes: int = 0) -> None:
        """Ends a phase that processed `num_nodes` nodes."""
        self._laps.append((phase, num_nodes, self._now()))

    def skip(self) -> None:
        """Ends a stretch of time that counts for no phase."""
        self.lap(UNTIMED)

    def start_round(self) -> None:
        """Starts a round; the time since the last one, spent by the caller, counts for no phase."""
        self._round_start = len(self._laps)
        self.skip()

    def round_times(self) -> Callable[[], RoundTimes]:
        """Returns a function that computes the timings from `start_round` to here; calling it synchronizes with the device."""
        return partial(self._times_between, self._round_start, len(self._laps))

    def _times_between(self, start: int, end: int) -> RoundTimes:
        times, policy_s = RoundTimes(), 0.0
        for phase, num_nodes, seconds in self._resolve(start, end):
            times.total_s += seconds
            if phase == "policy":
                policy_s += seconds
            elif phase == "draft_steps":
                times.draft.append((num_nodes, policy_s + seconds))
                policy_s = 0.0
            elif phase == "verify":
                times.verify_s += seconds
        return times

    def seconds(self) -> dict[str, float]:
        """Seconds of every phase."""
        total = dict.fromkeys(PHASES, 0.0)
        for phase, _, seconds in self._resolve(0):
            if phase != UNTIMED:
                total[phase] += seconds
        return total

    def _resolve(self, start: int, end: int | None = None) -> list[tuple[str, int, float]]:
        synchronize(self.device)
        marks = self._laps[start:end]
        return [
            (phase, num_nodes, before.elapsed_time(now) / 1e3 if self._is_cuda else now - before)
            for (_, _, before), (phase, num_nodes, now) in zip(marks, marks[1:], strict=False)
        ]


def _event(device: torch.device) -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))  # the default would be the stream of the current device
    return event
