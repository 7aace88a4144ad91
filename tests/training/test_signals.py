"""Signals during validations: the saved state, the repeated validation, the message."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from support.messages import refused
from support.train_helpers import configured, quick_report, train_quickly

from checkpoints.store import StateStore
from data_prep.conversation import Conversation
from sage.bench.measurement import Interrupted
from train.config.hydra_app import compose
from train.config.schema import Config
from train.launch.launcher import launch
from train.launch.ranks import Ranks
from train.launch.supervisor import RankFailed, StopFlag
from train.validation.in_loop import shard_prompts
from train.validation.prompts import PromptSet

pytestmark = pytest.mark.usefixtures("alone")


class SignalledValidation:
    """Replaces decoding of two prompts; `signals[step]` are received between them.

    Attributes:
        saved: the steps of the saved states at each call.
        steps: of the completed validations; every one has a better score.
    """

    def __init__(self, **signals: list[signal.Signals]) -> None:
        self.signals = {int(name.removeprefix("step_")): numbers for name, numbers in signals.items()}
        self.steps, self.saved = list[int](), list[list[int]]()

    def __call__(self, *arguments: Any, progress: Any, **_: Any) -> dict[str, Any]:
        info = arguments[-1]
        self.saved.append(StateStore(Path(info.run_dir) / "state").steps())
        for number in self.signals.pop(info.step, []):
            signal.raise_signal(number)
        progress(1, 2)
        progress(2, 2)
        self.steps.append(info.step)
        return quick_report(tokens_per_target_pass=1.0 + len(self.steps))

    def train(self, config: Config) -> int:
        return train_quickly(config, self)


def configure(target: Path, run: Path, *overrides: str) -> Config:
    return configured(target, run, "train.save_every=0", *overrides)


def trainer(run: Path, step: int) -> Any:
    return json.loads((run / "state" / f"step_{step:08d}" / "trainer.json").read_text())


@pytest.mark.slow
def test_two_interrupts_during_the_last_validation_lose_nothing(target: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    validation = SignalledValidation(step_2=[signal.SIGINT, signal.SIGINT])
    with refused("run.resume=true", error=RankFailed) as caught:
        launch(configure(target, run), validation.train)
    assert caught.value.exit_code == 3 and validation.saved == [[2]] and validation.steps == []
    assert trainer(run, 2)["best"] is None
    assert validation.train(configure(target, run, "run.resume=true")) == 0
    assert validation.steps == [2] and trainer(run, 2)["best"] == 2.0  # saved again with the result of the validation


def test_a_rank_that_aborts_tells_rank_0(monkeypatch: pytest.MonkeyPatch) -> None:
    config, sent = compose("config", ["train.validate_on=all"], Config), list[object]()
    monkeypatch.setattr(Ranks, "gather_on_main", lambda _, item: sent.append(item) or [])
    prompts = [Conversation(id=name, messages=[]) for name in "abc"]
    shard = shard_prompts(config, Ranks(1, 2, torch.device("cpu")), PromptSet(None, config.decode, prompts))
    stop = StopFlag()
    shard.check_stop(stop, 1, 2)
    assert shard.prompts.prompts == prompts[1:2] and shard.num_turns == 3 and shard.merge(None) is None
    stop.is_set = True
    shard.check_stop(stop, 2, 2)  # all prompts are done: too late
    with pytest.raises(Interrupted):
        shard.check_stop(stop, 1, 2)
    assert shard.merge(None, is_interrupted=True) is None
    assert sent == [(None, False), (None, True)]


@pytest.mark.parametrize(("ends_process", "received"), [(True, True), (True, False), (False, True)])
def test_sigterm_after_a_stop(ends_process: bool, received: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that is about to exit ignores it, without a gap between the flag's handler and ignoring it."""
    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(StopFlag, "ends_process", ends_process)
    try:
        with StopFlag() as stop:
            stop.is_polled = True
            if received:
                signal.raise_signal(signal.SIGUSR1)
        expected = signal.SIG_IGN if ends_process and received else before
        assert signal.getsignal(signal.SIGTERM) == expected
    finally:
        signal.signal(signal.SIGTERM, before)
