"""Timers: seconds per phase of a generation, and repeated timing of single calls. All wait for the device where it matters."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any

import torch

PHASES = ("vision", "target_prefill", "draft_prefill", "draft_steps", "verify", "accept", "commit", "policy", "other")
UNTIMED = "untimed"
MAX_MARKS = 512  # events that may be pending when a round starts


class Preparations:
    """Seconds in which a thread of this process was in `preparation`; `since`: the start of the present ones."""

    seconds, num_active, since = 0.0, 0, 0.0
    lock = threading.Lock()


@contextmanager
def preparation() -> Iterator[None]:
    """Marks what is done once and kept, such as compiling a pass or measuring its cost: it counts for no decoding time."""
    with Preparations.lock:
        if Preparations.num_active == 0:
            Preparations.since = time.perf_counter()
        Preparations.num_active += 1
    try:
        yield
    finally:
        with Preparations.lock:
            Preparations.num_active -= 1
            if Preparations.num_active == 0:
                Preparations.seconds += time.perf_counter() - Preparations.since


def decoding_now_s() -> float:
    """Seconds of a clock of the host that stands still in `preparation`."""
    with Preparations.lock:
        now = Preparations.since if Preparations.num_active else time.perf_counter()
        return now - Preparations.seconds


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
    synchronize(clocks[0].device)
    start = decoding_now_s()
    yield
    synchronize(clocks[0].device)
    seconds = decoding_now_s() - start
    for clock in clocks:
        clock.count(seconds / len(clocks))


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
    """Adds up time per phase, without preparations; `lap(phase)` assigns the time since the last lap to `phase`.

    On CUDA each lap records an event, which does not wait. All events so far are resolved together, with one synchronization,
    when times are first requested, and are reused. Nothing else may run on the device in a preparation.

    Attributes:
        is_shared: whether the time is shared with that of other requests, see `share`.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self._is_cuda, self.is_shared = device, device.type == "cuda", False
        self._laps: list[tuple[str, int]] = []
        self._seconds: list[float] = []  # of the laps resolved so far
        self._free: list[torch.cuda.Event] = []
        # Ends of the other laps on the host, after the end of the last resolved one; on the device; preparations until then.
        self._marks: list[float] = []
        self._events: list[torch.cuda.Event] = []
        self._prepared_s: list[float] = []
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
        if len(self._marks) > MAX_MARKS:
            self._resolve()

    def share(self) -> None:
        """Counts from now on only the time within `running` and shares of `shared_time`: time of the host, also on a GPU."""
        self._resolve()
        self.is_shared, self._is_cuda = True, False
        self._paused_at = decoding_now_s()

    @contextmanager
    def running(self) -> Iterator[None]:
        """Counts the time of the block, if the time is shared."""
        self._paused_s += decoding_now_s() - self._paused_at
        try:
            yield
        finally:
            self._paused_at = decoding_now_s()

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
            self._resolve()
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

    def _resolve(self) -> None:
        """Computes the seconds of all laps so far; waits for the last of them."""
        if self._is_cuda:
            self._events[-1].synchronize()
            elapsed_s = [before.elapsed_time(now) / 1e3 for before, now in pairwise(self._events)]
            prepared_s = [now - before for before, now in pairwise(self._prepared_s)]
            self._seconds += [max(lap - left_out, 0.0) for lap, left_out in zip(elapsed_s, prepared_s, strict=True)]
            self._free += self._events[:-1]
            del self._events[:-1], self._prepared_s[:-1]
        else:
            self._seconds += [now - before for before, now in pairwise(self._marks)]
        del self._marks[:-1]

    def _mark(self) -> None:
        self._marks.append(decoding_now_s() - self._paused_s)
        if self._is_cuda:
            event = self._free.pop() if self._free else torch.cuda.Event(enable_timing=True)
            event.record(torch.cuda.current_stream(self.device))
            self._events.append(event)
            self._prepared_s.append(Preparations.seconds)
