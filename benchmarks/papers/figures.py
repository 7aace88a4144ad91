"""Figures on disk: one JSON file per measurement, measured again only when its inputs change."""

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
SCHEMA = 1
SIGNIFICANT_DIGITS = 5
FIGURES_DIR = "results"  # figures and plots, beside docs/results.md
Json = dict[str, Any]


def digest(value: Any) -> str:
    """Returns a short hash of a JSON value; equal values give equal hashes."""
    return json_digest(value)[:16]


def round_floats(value: Any) -> Any:
    """Returns `value` with every float rounded to `SIGNIFICANT_DIGITS`."""
    if isinstance(value, float):
        return float(f"{value:.{SIGNIFICANT_DIGITS}g}")
    if isinstance(value, Mapping):
        return {str(key): round_floats(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [round_floats(part) for part in value]
    return value


class FigureStore:
    """A folder with one file `NAME.json` per measurement. A deleted file is measured again."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def read(self, name: str) -> Json | None:
        """Returns the content of a file, figures and provenance; None if it does not exist.

        Raises:
            ValueError: the file is not JSON, or of another schema.
        """
        path = self.folder / f"{name}.json"
        if not path.is_file():
            return None
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}: not JSON ({error.msg}); delete the file to measure it again") from error
        if not isinstance(content, dict) or content.get("schema") != SCHEMA:
            raise ValueError(f"{path}: not figures of schema {SCHEMA}; delete the file to measure it again")
        return content

    def read_all(self) -> dict[str, Json]:
        """Returns the content of every file by name."""
        names = [path.stem for path in sorted(self.folder.glob("*.json"))]
        return {name: content for name in names if (content := self.read(name)) is not None}

    def get_or_measure(self, name: str, inputs: Any, measure: Callable[[], Json], command: str) -> Json:
        """Returns the figures of that name; measures and writes them if they are missing or outdated.

        Args:
            inputs: everything that the figures depend on and a user can change: settings, command lines, drafts.
            command: the command that repeats the measurement.
        """
        content = self.read(name)
        if content is None or content["inputs"] != digest(inputs):
            logger.info("measuring %s", name)
            start = time.perf_counter()
            figures = round_floats(measure())
            content = {
                "schema": SCHEMA,
                "inputs": digest(inputs),
                "command": command,
                "seconds": round(time.perf_counter() - start, 1),
                "machine": round_floats(machine("cpu")),
                "versions": versions(PACKAGES),
                "figures": figures,
            }
            write_json(self.folder / f"{name}.json", content)
        return content["figures"]
