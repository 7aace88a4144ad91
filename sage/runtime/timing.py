"""Timers: seconds per phase of a generation, and repeated timing of single calls. All wait for the device where it matters."""

from __future__ import annotations

import gc
import threading
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
_PREPARATIONS_LOCK = threading.Lock()
PHASES = ("vision", "target_prefill", "draft_prefill", "draft_steps", "verify", "accept", "commit", "policy", "other")
UNTIMED = "untimed"
MAX_MARKS = 512  # events that may be pending when a round starts, and those of them that are kept then
RECENT_MARKS = 128


@contextmanager
def preparation() -> Iterator[None]:
    """Marks what is done once and kept, such as compiling a pass or measuring its cost: it counts for no decoding time."""
    start = time.perf_counter()
    try:
        yield
    finally:
        with _PREPARATIONS_LOCK:  # another thread may have added one that this one does not contain
            before = [interval for interval in PREPARATIONS if interval[0] < start]
            PREPARATIONS[:] = [*before, (start, time.perf_counter())]


@contextmanager
def frozen_heap() -> Iterator[None]:
    """Leaves the objects that exist out of Python's garbage collection: to search those of torch and of a loaded model takes
    tenths of a second, which is the time of a hundred rounds of a small target.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def prepared_s(start: float, end: float) -> float:
    """Returns the seconds between two times of `time.perf_counter` that were spent in `preparation`."""
    if not PREPARATIONS or PREPARATIONS[-1][1] <= start:  # the last one ended last
        return 0.0
    return sum(last - first for first, last in PREPARATIONS if start <= first and last <= end)


def synchronize(device: torch.device) -> None:
    """Waits for all work queued on `device`; does nothing on the CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def now_s(device: torch.device) -> float:
    """Seconds of a monotonic clock after all work queued on `device`."""
    synchronize(device)
    return time.perf_counter()


@contextmanager
def shared_time(clocks: Sequence[Clock]) -> Iterator[None]:
    """Divides the time of the block among clocks that are shared."""
    start = now_s(clocks[0].device)
    yield
    end = now_s(clocks[0].device)
    for clock in clocks:
        clock.count((end - start - prepared_s(start, end)) / len(clocks))


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
        for runs, call in zip(times, calls, strict=True):
            call.reset()
            start = now_s(device)
            call.run()
            runs.append(now_s(device) - start)
    return [runs[1:] for runs in times]


@dataclass
class RoundTimes:
    """Timings of one round; `total_s` includes the synchronization of the draft.

    `draft`: (width, seconds) of each draft pass, including the policy's time before it; the first, over the accepted tokens,
    has width 0.
    """

    verify_s: float = 0.0
    draft: list[tuple[int, float]] = field(default_factory=list)
    total_s: float = 0.0


class Clock:
    """Adds up time per phase; `lap(phase)` assigns the time since the last lap to `phase`.

    On CUDA each lap records an event, which does not wait. All events so far are resolved together, with one synchronization,
    when times are first requested, and are reused.

    Args:
        left_out: intervals of `time.perf_counter` that count for no phase; the list may grow. On CUDA, nothing else may run on
            the device in them.

    Attributes:
        is_shared: whether the time is shared with that of other requests, see `share`.
    """

    def __init__(self, device: torch.device, left_out: Sequence[tuple[float, float]] = ()) -> None:
        self.device, self._is_cuda, self._left_out = device, device.type == "cuda", left_out
        self._laps: list[tuple[str, int]] = []
        self._seconds: list[float] = []  # of the laps resolved so far
        self._free: list[torch.cuda.Event] = []
        self._marks: list[float] = []  # ends of the other laps on the host, after the end of the last resolved one
        self._events: list[torch.cuda.Event] = []  # the same on the device
        self.is_shared = False
        self._paused_s = self._paused_at = 0.0
        self._mark()
        self._round_start = 0

    def lap(self, phase: str, num_nodes: int = 0) -> None:
        """Ends a phase that processed `num_nodes` nodes."""
        self._laps.append((phase, num_nodes))
        self._mark()

    def skip(self) -> None:
        """Ends a stretch of time that counts for no phase."""
        self.lap(UNTIMED)

    def start_round(self) -> None:
        """Starts a round; the time since the last one, spent by the caller, counts for no phase."""
        self.skip()
        self._round_start = len(self._laps)
        if len(self._marks) > MAX_MARKS:  # the decoder has waited for those of the last round but one
            self._resolve(len(self._marks) - RECENT_MARKS)

    def share(self) -> None:
        """Counts from now on only the time within `running` and shares of `shared_time`: time of the host, also on a GPU,
        without preparations.
        """
        self._resolve(len(self._marks))
        self.is_shared, self._is_cuda, self._left_out = True, False, ()
        self._paused_at = time.perf_counter()

    @contextmanager
    def running(self) -> Iterator[None]:
        """Counts the time of the block, if the time is shared."""
        start = time.perf_counter()
        self._paused_s += start - self._paused_at
        try:
            yield
        finally:
            self._paused_at = time.perf_counter()
            self._paused_s += prepared_s(start, self._paused_at)

    def count(self, seconds: float) -> None:
        """Counts further seconds."""
        self._paused_s -= seconds

    def round_times(self) -> Callable[[], RoundTimes]:
        """Returns a function that computes the timings from `start_round` to here; calling it may synchronize."""
        return partial(self._times_between, self._round_start, len(self._laps))

    def round_phases(self) -> Callable[[], dict[str, float]]:
        """Returns a function that computes the seconds of each phase from `start_round` to here; calling it may synchronize."""
        return partial(self._phases_between, self._round_start, len(self._laps))

    def seconds(self) -> dict[str, float]:
        """Seconds of every phase; synchronizes with the device."""
        return dict.fromkeys(PHASES, 0.0) | self._phases_between(0, len(self._laps))

    def _between(self, start: int, end: int) -> Iterator[tuple[str, int, float]]:
        """Yields phase, nodes and seconds of laps."""
        if end > len(self._seconds):
            self._resolve(len(self._marks))
        for (phase, num_nodes), seconds in zip(self._laps[start:end], self._seconds[start:end], strict=True):
            yield phase, num_nodes, seconds

    def _times_between(self, start: int, end: int) -> RoundTimes:
        times, policy_s = RoundTimes(), 0.0
        for phase, num_nodes, seconds in self._between(start, end):
            times.total_s += seconds
            if phase == "policy":
                policy_s += seconds
            elif phase == "draft_steps":
                times.draft.append((num_nodes, policy_s + seconds))
                policy_s = 0.0
            elif phase == "verify":
                times.verify_s += seconds
        return times

    def _phases_between(self, start: int, end: int) -> dict[str, float]:
        total: dict[str, float] = {}
        for phase, _, seconds in self._between(start, end):
            if phase != UNTIMED:
                total[phase] = total.get(phase, 0.0) + seconds
        return total

    def _resolve(self, count: int) -> None:
        """Computes the seconds of the laps between the first `count` marks; waits for the last of these."""
        done, self._marks = self._marks[:count], self._marks[count - 1 :]
        seconds = [now - before for before, now in pairwise(done)]
        if self._is_cuda:
            events, self._events = self._events[:count], self._events[count - 1 :]
            events[-1].synchronize()
            self._free += events[:-1]
            seconds = [before.elapsed_time(now) / 1e3 for before, now in pairwise(events)]
        for start, end in self._left_out:
            if done[0] <= start < done[-1]:
                lap = bisect(done, start) - 1
                seconds[lap] = max(seconds[lap] - (end - start), 0.0)
        self._seconds += seconds

    def _mark(self) -> None:
        self._marks.append(time.perf_counter() - self._paused_s)
        if self._is_cuda:
            event = self._free.pop() if self._free else torch.cuda.Event(enable_timing=True)
            event.record(torch.cuda.current_stream(self.device))
            self._events.append(event)
