"""train.run from Python: the report, callbacks, and mistakes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from support.messages import refused
from support.train_helpers import command

import train

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
