"""Figures on disk: one small JSON per measurement, made again only when what it depends on has changed.

A file is written when its measurement is complete, so a process that is killed at any point loses that one measurement.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from sage.bench import write_json
from sage.bench.report import PACKAGES, machine, versions

logger = logging.getLogger(__name__)
SCHEMA = 1
DIGITS = 5  # significant ones: more than any measurement here holds
Json = dict[str, Any]


def digest(value: Any) -> str:
    """A short name for anything that is JSON: equal values, equal names."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:16]


def rounded(value: Any) -> Any:
    """The same with floats of `DIGITS` significant digits."""
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}")
    if isinstance(value, Mapping):
        return {str(key): rounded(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [rounded(part) for part in value]
    return value


class Figures:
    """A folder of figures; one that is deleted is measured again.

    Args:
        folder: one file `NAME.json` per measurement.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def read(self, name: str) -> Json | None:
        """A whole file with its provenance; None where there is none.

        Raises:
            ValueError: the file is no figures of ours.
        """
        path = self.folder / f"{name}.json"
        if not path.is_file():
            return None
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}: not JSON ({error.msg}); delete it, and it is measured again") from error
        if not isinstance(found, dict) or found.get("schema") != SCHEMA:
            raise ValueError(f"{path}: not figures of schema {SCHEMA}; delete it, and it is measured again")
        return found

    def read_all(self) -> dict[str, Json]:
        """Every file of the folder, by name."""
        found = {path.stem: self.read(path.stem) for path in sorted(self.folder.glob("*.json"))}
        return {name: content for name, content in found.items() if content is not None}

    def is_current(self, name: str, inputs: Any) -> bool:
        """Whether the figures are there and were made from the same inputs."""
        found = self.read(name)
        return found is not None and found["inputs"] == digest(inputs)

    def make(self, name: str, inputs: Any, measure: Callable[[], Json], command: str) -> Json:
        """The figures of that name: read where they are current, else measured and written.

        Args:
            inputs: everything they depend on that a person can change: settings, command lines, drafts.
            command: what repeats the measurement.
        """
        if self.is_current(name, inputs):
            found = self.read(name)
            assert found is not None
            return found["figures"]
        logger.info("measuring %s", name)
        start = time.perf_counter()
        figures = rounded(measure())
        content = {
            "schema": SCHEMA,
            "inputs": digest(inputs),
            "command": command,
            "seconds": round(time.perf_counter() - start, 1),
            "machine": rounded(machine("cpu")),
            "versions": versions(PACKAGES),
            "figures": figures,
        }
        write_json(content, self.folder / f"{name}.json")
        return figures
