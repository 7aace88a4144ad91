"""Runs from Python and from the command: events, mistakes, policies of validations."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.messages import refused
from support.train_helpers import command

import train
from train.config.hydra_app import compose
from train.config.schema import Config
from train.job.run import check_main_guard, run_rank
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


def test_a_run_returns_its_report_and_calls_back(target: Path, tmp_path: Path) -> None:
    recorder = Recorder()
    report = train.run(train.compose(*command(target, tmp_path / "run"), "train.save_every=1"), [recorder])
    assert report["policies"]["sage"]["total"] == 1
    assert recorder.events[:4] == [("log", 1), ("save", 1), ("log", 2), ("save", 2)]
    assert ("validate", 2) in recorder.events

    class Stopper(train.Callback):
        def on_log(self, step: int, metrics: Mapping[str, float]) -> None:
            raise ValueError("enough")

    with pytest.raises(ValueError, match="enough"):
        train.run(train.compose(*command(target, tmp_path / "stopped")), [Stopper()])


def test_mistakes_are_errors_of_one_line(target: Path, tmp_path: Path) -> None:
    with refused("optim.lr", error=train.ConfigError):
        train.compose("optim.lr=fast")
    with refused("optim.lr=-1", error=train.ConfigError):
        train.run(train.compose(*command(target, tmp_path / "run"), "optim.lr=-1"))
    with refused("launch.plan", error=train.ConfigError):
        train.run(train.compose(*command(target, tmp_path / "run"), "launch.plan=true"))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("script", "words", "is_refused"),
    [
        ("if x:\n    train.run(config)\n", ["launch.ranks=2"], True),
        ("train.run(config)\n", ["data.num_workers=2"], True),
        ("if __name__ == '__main__':\n    train.run(config)\n", ["data.num_workers=2", "launch.ranks=2"], False),
        ("train.run(config)\n", ["data.num_workers=0"], False),
        ("%matplotlib inline\n", ["data.num_workers=2"], False),
    ],
)
def test_a_script_without_a_main_guard_starts_no_processes(
    target: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    script: str,
    words: list[str],
    is_refused: bool,
) -> None:
    """Each process would import the script and train again."""
    (tmp_path / "mine.py").write_text(script)
    monkeypatch.setitem(sys.modules, "__main__", SimpleNamespace(__file__=str(tmp_path / "mine.py")))
    config = train.compose(*command(target, tmp_path / "run"), "launch.ranks=null", "data.num_workers=0", *words)
    if is_refused:
        with refused(words[0], 'if __name__ == "__main__":', error=train.ConfigError):
            train.run(config)
    else:
        check_main_guard(config)
    assert not (tmp_path / "run").exists()


def test_every_validation_decodes_with_a_copy_of_the_same_policies(target: Path, tmp_path: Path) -> None:
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
