"""The studies by name, in the order in which they run: the most important first."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from benchmarks.papers.lab import Lab
from benchmarks.papers.measure.ablations import measure_ablations
from benchmarks.papers.measure.calibration import measure_calibration
from benchmarks.papers.measure.compressor import measure_compressors
from benchmarks.papers.measure.entropy import measure_entropy
from benchmarks.papers.measure.epochs import measure_epochs
from benchmarks.papers.measure.length import measure_length
from benchmarks.papers.measure.policies import measure_policies
from benchmarks.papers.measure.projection import measure_projection
from benchmarks.papers.measure.pruning import measure_pruning
from benchmarks.papers.measure.temperature import measure_temperature

STUDIES: dict[str, Callable[[Lab], None]] = {
    "policies": measure_policies,
    "calibration": measure_calibration,
    "projection": measure_projection,
    "epochs": measure_epochs,
    "ablations": measure_ablations,
    "temperature": measure_temperature,
    "compressor": measure_compressors,
    "pruning": measure_pruning,
    "length": measure_length,
    "entropy": measure_entropy,
}


def select_studies(names: Sequence[str]) -> list[str]:
    """Returns the named studies in the order of `STUDIES`; all of them if `names` is empty.

    Raises:
        ValueError: an unknown study.
    """
    if unknown := [name for name in names if name not in STUDIES]:
        raise ValueError(f"{unknown[0]}: unknown study; choose from {', '.join(STUDIES)}")
    return [name for name in STUDIES if not names or name in names]
