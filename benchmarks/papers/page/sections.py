"""The sections of the page, in order: their figures, templates, tables, expectations and plots."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from matplotlib.figure import Figure

from benchmarks.papers.page import (
    ablations,
    calibration,
    compressor,
    entropy,
    epochs,
    length,
    policies,
    projection,
    pruning,
    temperature,
)
from benchmarks.papers.page.expectations import Expectation
from benchmarks.papers.page.markdown import Figures
from benchmarks.papers.page.plots import policies as policy_plots
from benchmarks.papers.page.plots import studies as study_plots
from benchmarks.papers.page.plots import training as training_plots


class SectionModule(Protocol):
    """What a section's module defines."""

    def values(self, figures: Figures) -> dict[str, str]:
        """Returns the placeholders of the template, except `number` and `source`."""
        ...

    def expectations(self, figures: Figures) -> list[Expectation]:
        """Returns the section's part of the list of expectations."""
        ...


@dataclass(frozen=True)
class Section:
    """One section of the page.

    Attributes:
        study: name on the command line, and of the template.
        module: computes tables and expectations.
        plots: by file name.
        requires: prefixes of figure names; the section is shown if each has at least one file.
    """

    study: str
    module: SectionModule
    plots: Mapping[str, Callable[[Figures], Figure]] = field(default_factory=dict)
    requires: tuple[str, ...] = ()

    def is_shown(self, figures: Figures) -> bool:
        """Whether all required figures exist."""
        return all(any(name.startswith(prefix) for name in figures) for prefix in self._prefixes)

    def figure_names(self, figures: Figures) -> list[str]:
        """Returns the names of the section's figures."""
        return [name for name in figures if name.startswith(self._prefixes)]

    @property
    def _prefixes(self) -> tuple[str, ...]:
        return self.requires or (self.study,)


POLICY_PLOTS = {
    "headline.png": policy_plots.draw_headline,
    "families.png": policy_plots.draw_families,
    "time.png": policy_plots.draw_time,
}
CALIBRATION_PLOTS = {"reliability.png": study_plots.draw_reliability, "calibration.png": study_plots.draw_errors}
SECTIONS = (
    Section("policies", policies, POLICY_PLOTS, ("policies_",)),
    Section("epochs", epochs, {"epochs.png": training_plots.draw_epochs}),
    Section("compressor", compressor, {"compressor.png": training_plots.draw_compressors}),
    Section("pruning", pruning, {"pruning.png": training_plots.draw_pruning}),
    Section("length", length, {"length.png": study_plots.draw_length}),
    Section("entropy", entropy, {"entropy.png": study_plots.draw_entropy}),
    Section("calibration", calibration, CALIBRATION_PLOTS, ("calibration_",)),
    Section("ablations", ablations, {"ablations.png": study_plots.draw_ablations}),
    Section("temperature", temperature, {"temperature.png": study_plots.draw_temperature}),
    Section("projection", projection, requires=("overhead", "projection", "costs")),
)
