"""Signals around validations: what is saved by then, what is made up later, what a person is told."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.train_helpers import command, make_target, quiet_process, stopped_after

from checkpoints.store import StateStore
from train.config.hydra_app import compose
from train.config.schema import Config
from train.launch.failures import RankFailed
from train.launch.launcher import launch, run_rank
from train.launch.ranks import Ranks, joined
from train.launch.signals import StopSignal
from train.validation.in_loop import Part, Stopped, part_of


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with quiet_process(monkeypatch):
        yield


class Judge:
    """Stands in for the decoder on two prompts; `signals[step]` arrive between them."""

    def __init__(self, signals: dict[int, list[signal.Signals]]) -> None:
        self.signals, self.steps, self.saved = signals, list[int](), list[list[int]]()

    def __call__(self, config: Config, _: Any, __: Any, step: int, *___: Any, progress: Any, **____: Any) -> dict[str, Any]:
        self.saved.append(StateStore(Path(config.run.dir) / "state").steps())
        for number in self.signals.pop(step, []):
            signal.raise_signal(number)
        progress(1, 2)
        progress(2, 2)
        self.steps.append(step)
        return {"policies": {"sage": {"tokens_per_target_pass": 1.0 + len(self.steps)}}}


def judged_by(monkeypatch: pytest.MonkeyPatch, **signals: list[signal.Signals]) -> Judge:
    judge = Judge({int(name.removeprefix("step_")): numbers for name, numbers in signals.items()})
    monkeypatch.setattr("train.validation.in_loop.validate", judge)
    return judge


def configure(target: Path, run: Path, *overrides: str) -> Config:
    arguments = [*command(target, run), "deepspeed=zero0", "launch.device=cpu", "train.save_every=0", *overrides]
    config: Config = compose("config", arguments, Config)
    return config


def trainer(run: Path, step: int) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run / "state" / f"step_{step:08d}" / "trainer.json").read_text())
    return found


@pytest.mark.slow
def test_ctrl_c_twice_in_the_last_validation_loses_nothing(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    judge = judged_by(monkeypatch, step_2=[signal.SIGINT, signal.SIGINT])
    with pytest.raises(RankFailed, match="what was saved before is whole, go on with run.resume=true") as caught:
        launch(configure(target, run))
    assert caught.value.exit_code == 3 and judge.saved == [[2]] and judge.steps == []
    assert trainer(run, 2)["best"] is None
    assert run_rank(configure(target, run, "run.resume=true")) == 0
    assert judge.steps == [2] and trainer(run, 2)["best"] == 2.0  # saved again, with what the validation found


@pytest.mark.slow
def test_ctrl_c_twice_before_anything_is_saved_is_no_error_of_ours(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    judged_by(monkeypatch, step_1=[signal.SIGINT, signal.SIGINT])
    with pytest.raises(KeyboardInterrupt):
        launch(configure(target, tmp_path / "run", "train.validate_every=1"))


@pytest.mark.slow
def test_a_validation_that_a_signal_cuts_short_is_made_up(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, length = tmp_path / "run", ["train.max_steps=4", "train.validate_every=2"]
    judge = judged_by(monkeypatch, step_2=[signal.SIGTERM], step_4=[signal.SIGTERM])
    assert launch(configure(target, run, *length)) == 3
    assert judge.steps == [] and trainer(run, 2)["validated_step"] == 0
    assert launch(configure(target, run, *length, "run.resume=true")) == 3
    assert judge.steps == [2] and trainer(run, 4)["validated_step"] == trainer(run, 4)["best_step"] == 2
    assert launch(configure(target, run, *length, "run.resume=true")) == 0
    assert judge.steps == [2, 4] and trainer(run, 4)["best_step"] == 4


@pytest.mark.slow
def test_a_validation_that_was_due_when_a_run_stopped_is_made_up(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    judge, run = judged_by(monkeypatch), tmp_path / "run"
    length = ["train.max_steps=3", "train.validate_every=2"]
    with joined("cpu", 60) as ranks:
        stopped_after(configure(target, run, *length), ranks, 2)
    assert judge.steps == []
    assert run_rank(configure(target, run, *length, "run.resume=true")) == 0
    assert judge.steps == [2, 3]
    assert run_rank(configure(target, run, *length, "run.resume=true", "train.max_steps=4")) == 0
    assert judge.steps == [2, 3, 4]  # nothing is due at 3, and nothing twice


def test_where_all_ranks_decode_one_that_gives_up_ends_it_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    config: Config = compose("config", ["train.validate_on=all"], Config)
    others: list[tuple[Any, bool]] = [(None, False)]
    monkeypatch.setattr(Ranks, "gather", lambda _, item: [item, *others])
    run: Any = SimpleNamespace(config=config, ranks=Ranks(1, 2, torch.device("cpu")))
    part, stop = part_of(run, ["a", "b", "c"]), StopSignal()
    part.look(stop, 1, 2)
    assert part.prompts == ["b"] and part.merge(None) is None
    stop.is_set = True
    part.look(stop, 2, 2)  # it is done: too late
    with pytest.raises(Stopped):
        part.look(stop, 1, 2)
    others[0] = (None, True)
    with pytest.raises(Stopped):
        part.merge(None)
    assert isinstance(part, Part)
