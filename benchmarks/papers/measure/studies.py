"""The studies by name, in the order in which they run: the most important first."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module

from benchmarks.papers.lab import Lab

NAMES = (
    *("policies", "calibration", "projection", "epochs", "ablations", "temperature", "coupling", "compressor"),
    *("pruning", "length", "entropy", "engines"),
)
STUDIES: dict[str, Callable[[Lab], None]] = {name: import_module(f"{__package__}.{name}").measure for name in NAMES}


def select_studies(names: Sequence[str]) -> list[str]:
    """Returns the named studies in the order of `STUDIES`; all of them if `names` is empty.

    Raises:
        ValueError: an unknown study.
    """
    if unknown := [name for name in names if name not in STUDIES]:
        raise ValueError(f"{unknown[0]}: unknown study; choose from {', '.join(STUDIES)}")
    return [name for name in STUDIES if not names or name in names]
