"""Timers: seconds per phase of a generation, and repeated timing of single calls. All wait for the device where it matters."""

from __future__ import annotations

import time
from bisect import bisect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any

import torch

PREPARATIONS: list[tuple[float, float]] = []  # spent in `preparation`, in seconds of `time.perf_counter`
PHASES = ("vision", "target_prefill", "draft_prefill", "draft_steps", "verify", "accept", "commit", "policy", "other")
UNTIMED = "untimed"
MAX_MARKS = 512  # events that may be pending when a round starts, and those of them that are kept then
RECENT_MARKS = 128


@contextmanager
def preparation() -> Iterator[None]:
    """Marks what is done once and kept, such as compiling a pass or measuring its cost: it counts for no decoding time."""
    start, known = time.perf_counter(), len(PREPARATIONS)
    try:
        yield
    finally:
        del PREPARATIONS[known:]  # those within this one
        PREPARATIONS.append((start, time.perf_counter()))


def prepared_s(start: float, end: float) -> float:
    """Returns the seconds between two times of `time.perf_counter` that were spent in `preparation`."""
    return sum(last - first for first, last in PREPARATIONS if start <= first and last <= end)


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

    On CUDA each lap records an event, which does not wait. All events so far are resolved together, with one synchronization,
    when times are first requested, and are reused.

    Args:
        left_out: intervals of `time.perf_counter` that count for no phase; the list may grow. Without effect on CUDA.
    """

    def __init__(self, device: torch.device, left_out: Sequence[tuple[float, float]] = ()) -> None:
        self._device, self._is_cuda, self._left_out = device, device.type == "cuda", left_out
        self._now: Callable[[], Any] = self._event if self._is_cuda else time.perf_counter
        self._laps: list[tuple[str, int]] = []
        self._seconds: list[float] = []  # of the laps resolved so far
        self._free: list[torch.cuda.Event] = []
        self._marks: list[Any] = [self._now()]  # ends of the other laps, after the end of the last resolved one
        self._round_start = 0

    def lap(self, phase: str, num_nodes: int = 0) -> None:
        """Ends a phase that processed `num_nodes` nodes."""
        self._laps.append((phase, num_nodes))
        self._marks.append(self._now())

    def skip(self) -> None:
        """Ends a stretch of time that counts for no phase."""
        self.lap(UNTIMED)

    def start_round(self) -> None:
        """Starts a round; the time since the last one, spent by the caller, counts for no phase."""
        self.skip()
        self._round_start = len(self._laps)
        if len(self._marks) > MAX_MARKS:  # the decoder has waited for those of the last round but one
            self._resolve(len(self._marks) - RECENT_MARKS)

    def round_times(self) -> Callable[[], RoundTimes]:
        """Returns a function that computes the timings from `start_round` to here; calling it may synchronize."""
        return partial(self._times_between, self._round_start, len(self._laps))

    def _times_between(self, start: int, end: int) -> RoundTimes:
        if end > len(self._seconds):
            self._resolve(len(self._marks))
        times, policy_s = RoundTimes(), 0.0
        for (phase, num_nodes), seconds in zip(self._laps[start:end], self._seconds[start:end], strict=True):
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
        """Seconds of every phase; synchronizes with the device."""
        self._resolve(len(self._marks))
        total = dict.fromkeys(PHASES, 0.0)
        for (phase, _), seconds in zip(self._laps, self._seconds, strict=True):
            if phase != UNTIMED:
                total[phase] += seconds
        return total

    def _resolve(self, count: int) -> None:
        """Computes the seconds of the laps between the first `count` marks; waits for the last of these."""
        done, self._marks = self._marks[:count], self._marks[count - 1 :]
        if self._is_cuda:
            done[-1].synchronize()
            self._seconds += [before.elapsed_time(now) / 1e3 for before, now in pairwise(done)]
            self._free += done[:-1]
        else:
            seconds = [now - before for before, now in pairwise(done)]
            for start, end in self._left_out:
                if done[0] <= start < done[-1]:
                    seconds[bisect(done, start) - 1] -= end - start
            self._seconds += seconds

    def _event(self) -> torch.cuda.Event:
        event = self._free.pop() if self._free else torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event
