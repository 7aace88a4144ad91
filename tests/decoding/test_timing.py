"""Timers and host tensors."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from sage.costs import timing
from sage.host_tensors import CPU, TokenStagingBuffer, double_tensor, long_tensor


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


@pytest.mark.parametrize("values", [[], [7], [3, -1, 2**40]])
def test_host_tensors_equal_torch_tensor(values: list[int]) -> None:
    assert torch.equal(long_tensor(values, CPU), torch.tensor(values, dtype=torch.long))
    assert torch.equal(double_tensor([0.5 * value for value in values]), 0.5 * torch.tensor(values, dtype=torch.float64))


def test_staging_buffer_holds_the_tokens_of_the_last_call() -> None:
    buffer = TokenStagingBuffer(CPU)
    for values in ([7], [3, -1, 2**40], [], [5, 6, 7], list(range(200)), [4]):
        assert torch.equal(buffer.stage(values), torch.tensor(values, dtype=torch.long))
    tensor = torch.tensor([1, 2])
    assert buffer.stage(tensor) is tensor


def test_skipped_time_counts_for_no_phase(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([0.0, 1.0, 51.0, 53.0])
    monkeypatch.setattr(timing.time, "perf_counter", lambda: next(now))
    clock = timing.Clock(CPU)
    clock.lap("vision")
    clock.skip()
    clock.lap("vision")
    assert clock.seconds()["vision"] == sum(clock.seconds().values()) == 3.0


def test_only_the_run_of_a_call_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(timing.time, "perf_counter", lambda: now[0])

    def spend(seconds: float) -> None:
        now[0] += seconds

    calls = [timing.TimedCall(partial(spend, 2.0), reset=partial(spend, 50.0)), timing.TimedCall(partial(spend, 3.0))]
    assert timing.interleaved_s(calls, 2, CPU) == [[2.0, 2.0], [3.0, 3.0]]
