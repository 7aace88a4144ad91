"""Which studies there are: their names on the command line, in the order of what matters most if time runs out."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from benchmarks.papers.lab import Lab
from benchmarks.papers.measure.ablations import measure_ablations
from benchmarks.papers.measure.calibration import measure_confidence
from benchmarks.papers.measure.dynamics import measure_length, measure_temperature
from benchmarks.papers.measure.entropy import measure_entropy
from benchmarks.papers.measure.epochs import measure_epochs
from benchmarks.papers.measure.policies import measure_policies
from benchmarks.papers.measure.projection import measure_projection
from benchmarks.papers.measure.visual import measure_compressors, measure_pruning

ITEMS: dict[str, Callable[[Lab], None]] = {
    "policies": measure_policies,
    "calibration": measure_confidence,
    "projection": measure_projection,
    "epochs": measure_epochs,
    "ablations": measure_ablations,
    "temperature": measure_temperature,
    "compressor": measure_compressors,
    "pruning": measure_pruning,
    "length": measure_length,
    "entropy": measure_entropy,
}


def chosen(names: Sequence[str]) -> list[str]:
    """Items in their own order; all where none is named.

    Raises:
        ValueError: a name that is no item.
    """
    if unknown := [name for name in names if name not in ITEMS]:
        raise ValueError(f"{unknown[0]}: no item of the results; choose from {', '.join(ITEMS)}")
    return [name for name in ITEMS if not names or name in names]
