"""Figures on disk: a JSON file per study, whose measurements are repeated only when their inputs change."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from sage.bench.report import PACKAGES, machine, versions
from sage.io.files import json_digest, write_json

logger = logging.getLogger(__name__)
SCHEMA = 2
SIGNIFICANT_DIGITS = 5
Json = dict[str, Any]


def digest(value: Any) -> str:
    """Returns a short hash of a JSON value."""
    return json_digest(value)[:16]


def round_floats(value: Any) -> Any:
    """Returns `value` with every float rounded to `SIGNIFICANT_DIGITS`."""
    if isinstance(value, float):
        return float(f"{value:.{SIGNIFICANT_DIGITS}g}")
    if isinstance(value, Mapping):
        return {str(key): round_floats(item) for key, item in value.items()}
    return [round_floats(item) for item in value] if isinstance(value, (list, tuple)) else value


class FigureStore:
    """A folder with one file `STUDY.json` per study: its measurements by name, each with inputs, machine and versions."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def read(self, study: str) -> dict[str, Json]:
        """Returns the measurements of a study, empty if it has none; raises ValueError for a file that holds no figures."""
        path = self.folder / f"{study}.json"
        try:
            text = path.read_text(encoding="utf-8") if path.is_file() else json.dumps({"schema": SCHEMA, "measurements": {}})
            content: Json = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}: not JSON ({error.msg}); delete the file to measure the study again") from error
        if content.get("schema") != SCHEMA:
            raise ValueError(f"{path}: not figures of schema {SCHEMA}; delete the file to measure the study again")
        return dict(content["measurements"])

    def get_or_measure(self, study: str, name: str, inputs: Any, measure: Callable[[], Json]) -> Json:
        """Returns the figures of a measurement; measures and writes them if they are missing or outdated.

        Args:
            inputs: everything that the figures depend on and a user can change: sizes, command lines, weights of targets.
        """
        measurements = self.read(study)
        found = measurements.get(name)
        if found is None or found["inputs"] != digest(inputs):
            logger.info("measuring %s: %s", study, name)
            start = time.perf_counter()
            figures = round_floats(measure())
            found = {
                "inputs": digest(inputs),
                "seconds": round(time.perf_counter() - start, 1),
                "machine": round_floats(machine("cpu")),
                "versions": versions(PACKAGES),
                "figures": figures,
            }
            write_json(self.folder / f"{study}.json", {"schema": SCHEMA, "measurements": {**measurements, name: found}})
        return dict(found["figures"])
