"""Timers and host tensors."""

from __future__ import annotations

import threading
from functools import partial

import pytest
import torch

from sage.runtime import timing
from sage.runtime.host_tensors import CPU, TokenStagingBuffer


def test_round_times_can_be_resolved_later(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([0.0, 1.0, 3.0, 3.5, 3.75, 6.75, 7.0, 11.0])
    monkeypatch.setattr(timing.time, "perf_counter", lambda: next(now))
    clock = timing.Clock(CPU)
    clock.lap("commit")  # the round before
    clock.start_round()  # two seconds later, spent by the caller
    clock.lap("policy")
    clock.lap("draft_steps", 3)
    clock.lap("verify", 8)
    clock.lap("accept")
    times = clock.round_times()
    clock.lap("verify", 99)  # the round after
    assert times() == times() == timing.RoundTimes(verify_s=3.0, draft=[(3, 0.75)], total_s=4.0)
    seconds = clock.seconds()
    assert seconds["verify"] == 7.0 and seconds["commit"] == 1.0 and sum(seconds.values()) == 9.0


class Event:
    """Stands in for a CUDA event: the clock advances by a second per record, and waits are counted."""

    now_s, num_waits = 0.0, 0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self, stream: str) -> None:
        assert stream == "stream of cuda:1"
        Event.now_s += 1.0
        self.at_s = Event.now_s

    def synchronize(self) -> None:
        Event.num_waits += 1

    def elapsed_time(self, end: Event) -> float:
        return 1e3 * (end.at_s - self.at_s)


def test_events_of_many_rounds_are_resolved_with_one_synchronization(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing.torch.cuda, "Event", Event)
    monkeypatch.setattr(timing.torch.cuda, "current_stream", lambda device: f"stream of {device}")
    clock = timing.Clock(torch.device("cuda", 1))
    times = []
    for _ in range(20):
        clock.start_round()
        clock.lap("draft_steps", 3)
        clock.lap("verify", 8)
        times.append(clock.round_times())
    assert Event.num_waits == 0 and [one() for one in times] == [timing.RoundTimes(1.0, [(3, 1.0)], 2.0)] * 20
    assert Event.num_waits == 1
    seconds = clock.seconds()
    assert (seconds["draft_steps"], seconds["verify"]) == (20.0, 20.0)


def test_staging_buffer_holds_the_tokens_of_the_last_call() -> None:
    buffer = TokenStagingBuffer(CPU)
    for values in ([7], [3, -1, 2**40], [], [5, 6, 7], list(range(200)), [4]):
        assert torch.equal(buffer.stage(values), torch.tensor(values, dtype=torch.long))
    tensor = torch.tensor([1, 2])
    assert buffer.stage(tensor) is tensor


def test_only_the_run_of_a_call_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(timing.time, "perf_counter", lambda: now[0])

    def spend(seconds: float) -> None:
        now[0] += seconds

    calls = [timing.TimedCall(partial(spend, 2.0), reset=partial(spend, 50.0)), timing.TimedCall(partial(spend, 3.0))]
    assert timing.interleaved_s(calls, 2, CPU) == [[2.0, 2.0], [3.0, 3.0]]


def test_clocks_stand_still_in_preparations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of several threads, and one within another: what begins in one of them and ends in none counts its rest."""
    now = [0.0]
    monkeypatch.setattr(timing.time, "perf_counter", lambda: now[0])
    has_begun, may_end = threading.Event(), threading.Event()

    def other() -> None:
        with timing.preparation():
            has_begun.set()
            assert may_end.wait(10)

    thread, clock, start = threading.Thread(target=other), timing.Clock(CPU), timing.decoding_now_s()
    now[0] = 1.0
    with timing.preparation():
        thread.start()
        assert has_begun.wait(10)
        now[0] = 3.0
        with timing.preparation():  # within the first
            now[0] = 6.0
        clock.lap("policy")
    now[0] = 10.0  # that of the other thread is in progress
    assert timing.decoding_now_s() - start == 1.0
    may_end.set()
    thread.join()
    now[0] = 10.5
    clock.lap("verify")
    seconds = clock.seconds()
    assert (seconds["policy"], seconds["verify"]) == (1.0, 0.5) and timing.decoding_now_s() - start == 1.5
