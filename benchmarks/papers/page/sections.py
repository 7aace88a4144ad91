"""The sections of the page, in order: their figures, templates, tables, expectations and plots."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

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

Draw = Callable[[Figures], Figure]


@dataclass(frozen=True)
class Section:
    """One section of the page.

    Attributes:
        study: name on the command line, and of the template.
        requires: prefixes of figure names; the section is shown if each has at least one file.
        values: returns the placeholders of the template, except `number` and `source`.
        expectations: returns the section's part of the list of expectations.
        plots: by file name.
    """

    study: str
    requires: tuple[str, ...]
    values: Callable[[Figures], dict[str, str]]
    expectations: Callable[[Figures], list[Expectation]]
    plots: Mapping[str, Draw] = field(default_factory=dict)

    def is_shown(self, figures: Figures) -> bool:
        """Whether all required figures exist."""
        return all(any(name.startswith(prefix) for name in figures) for prefix in self.requires)

    def figure_names(self, figures: Figures) -> list[str]:
        """Returns the names of the section's figures."""
        return [name for name in figures if name.startswith(self.requires)]


SECTIONS = (
    Section(
        "policies",
        ("policies_",),
        policies.values,
        policies.expectations,
        {
            "headline.png": policy_plots.draw_headline,
            "families.png": policy_plots.draw_families,
            "time.png": policy_plots.draw_time,
        },
    ),
    Section("epochs", ("epochs",), epochs.values, epochs.expectations, {"epochs.png": training_plots.draw_epochs}),
    Section(
        "compressor",
        ("compressor",),
        compressor.values,
        compressor.expectations,
        {"compressor.png": training_plots.draw_compressors},
    ),
    Section("pruning", ("pruning",), pruning.values, pruning.expectations, {"pruning.png": training_plots.draw_pruning}),
    Section("length", ("length",), length.values, length.expectations, {"length.png": study_plots.draw_length}),
    Section("entropy", ("entropy",), entropy.values, entropy.expectations, {"entropy.png": study_plots.draw_entropy}),
    Section(
        "calibration",
        ("calibration_",),
        calibration.values,
        calibration.expectations,
        {"reliability.png": study_plots.draw_reliability, "calibration.png": study_plots.draw_errors},
    ),
    Section(
        "ablations", ("ablations",), ablations.values, ablations.expectations, {"ablations.png": study_plots.draw_ablations}
    ),
    Section(
        "temperature",
        ("temperature",),
        temperature.values,
        temperature.expectations,
        {"temperature.png": study_plots.draw_temperature},
    ),
    Section("projection", ("overhead", "projection", "costs"), projection.values, projection.expectations),
)
