"""Callbacks of a run: Python code that runs on rank 0 when a run logs, saves or validates."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any


class Callback:
    """Base class of callbacks; override the methods of interest.

    Callbacks run on rank 0 between two steps, after the corresponding files are written; training waits for them. An
    exception stops the run like any other error. With several ranks, callbacks are pickled.
    """

    def on_log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Called after a line of metrics.jsonl; `metrics` are its values."""

    def on_save(self, step: int, folder: Path) -> None:
        """Called after a checkpoint was saved to `folder`."""

    def on_validate(self, step: int, report: Mapping[str, Any]) -> None:
        """Called after a validation; `report` is the content of report.json, its folder under `path`."""
