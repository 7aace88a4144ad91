"""Runs from Python and from the command to the first step: events, mistakes, and nothing built or checked twice."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping
from functools import wraps
from pathlib import Path
from typing import Any, NoReturn

import pytest
from support.messages import exit_code, refused
from support.train_helpers import command

import train
from data_prep.batching.loader import StepLoader
from sage.bench.runners import HFRunner, PolicyRunner
from sage.trees import policy
from train.cli.train import main
from train.config.checks import check, check_batch
from train.config.hydra_app import compose
from train.config.schema import Config
from train.engine.engine import Engine
from train.job import build, loop
from train.job.rank import run_rank
from train.monitor.sinks import check_tracking
from train.state.space import check_space
from train.validation.prompts import PromptSet
from train.validation.validate import validate

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("alone")]


class Recorder(train.Callback):
    def __init__(self) -> None:
        self.events: list[tuple[str, int]] = []

    def on_log(self, step: int, metrics: Mapping[str, float]) -> None:
        assert metrics["loss"] > 0
        self.events.append(("log", step))

    def on_save(self, step: int, folder: Path) -> None:
        assert (folder / "manifest.json").is_file()
        self.events.append(("save", step))

    def on_validate(self, step: int, report: Mapping[str, Any]) -> None:
        assert (Path(report["path"]) / "report.json").is_file()
        self.events.append(("validate", step))


class Stopper(train.Callback):
    def on_log(self, step: int, metrics: Mapping[str, float]) -> None:
        raise ValueError("enough")


def test_a_run_returns_its_report_and_calls_back(target: Path, tmp_path: Path) -> None:
    recorder = Recorder()
    report = train.run(train.compose(*command(target, tmp_path / "run"), "train.save_every=1"), [recorder])
    assert report["policies"]["sage"]["total"] == 1
    assert recorder.events[:4] == [("log", 1), ("save", 1), ("log", 2), ("save", 2)]
    assert ("validate", 2) in recorder.events


def test_an_exception_in_a_callback_stops_the_run(target: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="enough"):
        train.run(train.compose(*command(target, tmp_path / "run")), [Stopper()])


def test_mistakes_are_errors_of_one_line(target: Path, tmp_path: Path) -> None:
    with refused("optim.lr", error=train.ConfigError):
        train.compose("optim.lr=fast")
    with refused("optim.lr=-1", error=train.ConfigError):
        train.run(train.compose(*command(target, tmp_path / "run"), "optim.lr=-1"))
    with refused("launch.plan", error=train.ConfigError):
        train.run(train.compose(*command(target, tmp_path / "run"), "launch.plan=true"))
    assert not (tmp_path / "run").exists()


ONCE = (check, check_batch, check_tracking, check_space, StepLoader, Engine, PromptSet, build.build_target, build.build_student)


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Calls and constructions so far; those of policies by the name of the policy."""
    found = Counter[str]()

    def count_function(function: Any, name_of: Any) -> None:
        @wraps(function)
        def counted(*arguments: Any, **options: Any) -> Any:
            found[name_of(*arguments)] += 1
            return function(*arguments, **options)

        for module in [module for name, module in sys.modules.items() if name.startswith(("train.", "sage.", "data_prep"))]:
            for name in [name for name, value in vars(module).items() if value is function]:
                monkeypatch.setattr(module, name, counted)

    def count_class(kind: Any) -> None:
        construct = kind.__init__

        def counted(self: Any, *arguments: Any, **options: Any) -> None:
            found[kind.__name__] += 1
            construct(self, *arguments, **options)

        monkeypatch.setattr(kind, "__init__", counted)

    for counted in (*ONCE, PolicyRunner, HFRunner):
        count_class(counted) if isinstance(counted, type) else count_function(counted, lambda *_, name=counted.__name__: name)
    count_function(policy, lambda name: f"policy {name}")
    return found


def refuse_the_first_step(*_: Any) -> NoReturn:
    raise loop.TrainingError("the first step")


def test_a_new_run_builds_and_checks_everything_once(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], counts: Counter[str]
) -> None:
    monkeypatch.setattr(loop, "train_step", refuse_the_first_step)
    words = ["experiment=demo", "launch.ranks=1", "train.micro_batch_size=4", "decode.policies=[sage,cost_aware]"]
    assert exit_code(main, *command(target, tmp_path / "run", *words)) != 0
    assert capsys.readouterr().err.endswith("error: the first step\n")
    assert {one.__name__ for one in ONCE} | {"policy sage", "policy cost_aware"} <= counts.keys()
    assert counts == dict.fromkeys(counts, 1)
    assert not {PolicyRunner.__name__, HFRunner.__name__} & counts.keys(), "runners belong to a validation"


def test_every_validation_decodes_with_a_copy_of_the_same_policies(target: Path, tmp_path: Path, counts: Counter[str]) -> None:
    learned: list[tuple[int, int]] = []

    def decode(*arguments: Any, policies: Any, **options: Any) -> Any:
        learner = policies["cost_aware"].learner
        before = learner.rounds
        report = validate(*arguments, policies=policies, **options)
        learned.append((before, learner.rounds))
        return report

    words = ["train.validate_every=1", "decode.policies=[cost_aware]", "decode.baselines=[]", "launch.device=cpu"]
    assert run_rank(compose("config", command(target, tmp_path / "run", *words), Config), decode) == 0
    assert [before for before, _ in learned] == [0, 0] and all(after > 0 for _, after in learned)
    assert counts["policy cost_aware"] == 1
