"""The schedule of a run: what is due before the first step, after each step and at the end."""

import math
from types import SimpleNamespace

import pytest
from support.messages import refused

from train.config.derived import RunLength
from train.config.schema import ConfigError, OptimConfig, Schedule, TrainConfig
from train.job.schedule import RunSchedule, learning_rate
from train.state.resume import TrainState, check_space, num_states

TOTAL = 10


@pytest.mark.parametrize(
    ("settings", "expected"),
    [({}, 4), ({"keep_last": 1}, 3), ({"keep_every": 4}, 6), ({"save_every": 0}, 2), ({"save_every": 6}, 3)],
)
def test_space_for_all_states_is_checked_before_training(settings, expected, tmp_path, monkeypatch):
    """States every 2 of 10 steps: the last ones, that of the best draft and the new one; 12 bytes per trained parameter."""
    train = TrainConfig(**{"save_every": 2} | settings)  # type: ignore[arg-type]
    assert num_states(train, TOTAL) == expected
    needed, free = expected * 12_000_000 + 3 * 5_000_000, [0]
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=free[0]))
    (tmp_path / "run" / "state").mkdir(parents=True)
    (tmp_path / "run" / "state" / "part").write_bytes(bytes(1000))  # is replaced
    free[0] = needed - 1000
    check_space(tmp_path / "run", train, TOTAL, 1_000_000, 5_000_000)
    free[0] -= 1
    with refused(f"run.dir={tmp_path / 'run'}", f"{needed / 1e6:.2f} MB", "are free", "train.keep_last", error=ConfigError):
        check_space(tmp_path / "run", train, TOTAL, 1_000_000, 5_000_000)


def schedule(**settings: int) -> RunSchedule:
    every = {"log_every": 4, "validate_every": 3, "save_every": 2, "patience": 0} | settings
    return RunSchedule(TrainConfig(**every), RunLength(TOTAL))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("step", "settings", "stale", "is_stopping", "expected"),
    [
        (4, {}, 0, False, "log show save"),
        (6, {}, 0, False, "show save validate"),
        (10, {"save_every": 0, "log_every": 99}, 0, False, "log show"),
        (9, {"save_every": 3, "validate_every": 0}, 9, False, "show save"),
        (3, {"patience": 2}, 1, False, "log show validate"),  # without a better score the run ends here
        (6, {}, 0, True, "log show save"),  # a signal: validated when the run is resumed
    ],
)
def test_what_is_due_after_a_step(step: int, settings: dict[str, int], stale: int, is_stopping: bool, expected: str) -> None:
    assert " ".join(schedule(**settings).after_step(TrainState(step=step, stale=stale), is_stopping)) == expected


@pytest.mark.parametrize(
    ("step", "validated_step", "validate_every", "expected"),
    [
        (0, 0, 3, ""),  # a new run
        (6, 3, 3, "validate"),  # the validation of step 6 was interrupted
        (5, 3, 3, ""),
        (10, 0, 5, ""),  # at the end there is a validation anyway
    ],
)
def test_an_interrupted_validation_is_due_before_the_first_step(step, validated_step, validate_every, expected):
    state = TrainState(step=step, validated_step=validated_step)
    assert " ".join(schedule(validate_every=validate_every).before_steps(state)) == expected


def test_what_is_due_at_the_end() -> None:
    for is_stopping, validated_at, expected in ((False, 3, "save validate save"), (False, 10, "save"), (True, None, "save")):
        assert " ".join(schedule().at_end(TrainState(step=10), is_stopping, validated_at)) == expected


@pytest.mark.parametrize(
    ("step", "stale", "patience", "is_stopping", "expected"),
    [
        (12, 0, 0, False, True),  # resumed with a smaller train.max_steps
        (1, 0, 0, True, True),
        (3, 1, 2, False, False),
        (3, 2, 2, False, True),
    ],
)
def test_a_run_is_over_at_its_length_after_a_signal_or_without_progress(step, stale, patience, is_stopping, expected):
    assert schedule(patience=patience).is_over(TrainState(step=step, stale=stale), is_stopping) is expected


def test_learning_rates() -> None:
    constant = OptimConfig(lr=1.0, grad_clip=1.0)
    assert [learning_rate(constant, step, 10) for step in (0, 5, 9)] == [1, 1, 1]
    cosine = OptimConfig(lr=1.0, grad_clip=1.0, schedule=Schedule.cosine, warmup_steps=2, min_lr_ratio=0.1)
    rates = [learning_rate(cosine, step, 10) for step in range(11)]
    assert rates[:3] == [0.5, 1.0, 1.0]
    assert rates[6] == pytest.approx(0.1 + 0.9 / 2)  # half-way down
    assert rates[10] == pytest.approx(0.1)
    assert all(one >= other for one, other in zip(rates[1:], rates[2:], strict=False))


def test_the_learning_rate_of_a_run_with_a_time_limit_follows_the_time() -> None:
    """The shorter limit counts; the steps that the run will have are estimated from the time of those so far."""
    cosine, length = OptimConfig(lr=1.0, grad_clip=1.0, schedule=Schedule.cosine), RunLength(None, time_s=100.0)
    assert [length.expected_steps(*at) for at in ((0, 0.0), (5, 10.0), (30, 50.0))] == [math.inf, 50.0, 60.0]
    assert learning_rate(cosine, 30, length.expected_steps(30, 50.0)) == pytest.approx(0.5)
    assert learning_rate(cosine, 61, length.expected_steps(61, 100.0)) == pytest.approx(0.0)
    limited = RunSchedule(TrainConfig(), RunLength(40, time_s=100.0))
    ends = [
        limited.is_over(TrainState(step=step, time_s=time_s), False) for step, time_s in ((39, 99.0), (40, 9.0), (2, 100.0))
    ]
    assert ends == [False, True, True]
