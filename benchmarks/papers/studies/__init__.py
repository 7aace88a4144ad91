"""The studies by name, in the order in which they run: the most important first. The page has an order of its own."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.papers.studies import (
    ablations,
    anchors,
    confidence,
    drafts,
    engines,
    epochs,
    length,
    policies,
    projection,
    regimes,
    sampling,
    visual,
)
from benchmarks.papers.study import Study

STUDIES: dict[str, Study] = {
    study.name: study
    for study in (
        *(policies.STUDY, confidence.CALIBRATION, projection.STUDY, epochs.STUDY, ablations.STUDY, sampling.TEMPERATURE),
        *(sampling.COUPLING, visual.COMPRESSOR, visual.PRUNING, length.STUDY, confidence.ENTROPY, engines.STUDY, regimes.STUDY),
        *(drafts.STUDY, anchors.STUDY),
    )
}
SECTIONS = (
    *("policies", "epochs", "compressor", "pruning", "length", "entropy", "calibration", "ablations", "temperature"),
    *("coupling", "projection", "engines", "regimes", "drafts", "anchors"),
)


def select_studies(names: Sequence[str]) -> list[Study]:
    """Returns the named studies, all if there are no names, in the order of `STUDIES`; raises ValueError for an unknown one."""
    if unknown := [name for name in names if name not in STUDIES]:
        raise ValueError(f"{unknown[0]}: unknown study; choose from {', '.join(STUDIES)}")
    return [study for name, study in STUDIES.items() if not names or name in names]
