"""Section: autocorrelation of the draft's confidence."""

from __future__ import annotations

from matplotlib.figure import Figure

from benchmarks.papers.figures import Json
from benchmarks.papers.page.markdown import Expectation, Figures, title_of
from benchmarks.papers.page.plots import COLORS, integer_axis, line
from sage.io.tables import markdown_table
from train.report import style

THRESHOLD = 0.1  # a correlation of some hundred pairs below this is not significant
LINE_STYLES = {"token": "-", "round": (0, (4, 2))}


def values(figures: Figures) -> dict[str, str]:
    """Returns the placeholders of entropy.md."""
    targets = figures["entropy"]["targets"]
    lags = range(1, len(next(iter(targets.values()))["by_token"]) + 1)
    rows = [
        [title_of(target), f"{unit}s ({part[f'{unit}s']})", *map(_cell, part[f"by_{unit}"])]
        for target, part in targets.items()
        for unit in ("token", "round")
    ]
    lengths = [
        [title_of(target), _cell(part["length_from_this_round"]), _cell(part["length_from_last_round"])]
        for target, part in targets.items()
    ]
    return {
        "autocorrelation": markdown_table(["target", "lag in", *map(str, lags)], rows, "<<>"),
        "lengths": markdown_table(["target", "alpha of this round", "alpha of the last round"], lengths),
    }


def _cell(value: float | None) -> str:
    return "-" if value is None else f"{value:+.2f}"


def expectations(figures: Figures) -> list[Expectation]:
    """SAGE, Figure 2: entropy is autocorrelated, and the last round predicts the next."""
    return [one for target, part in figures["entropy"]["targets"].items() for one in _of_target(title_of(target), part)]


def _of_target(title: str, figures: Json) -> list[Expectation]:
    tokens, rounds = figures["by_token"][0] or 0.0, figures["by_round"][0] or 0.0
    this, last = figures["length_from_this_round"] or 0.0, figures["length_from_last_round"] or 0.0
    return [
        Expectation(
            f"SAGE: the entropies of neighboring steps are correlated, {title}",
            min(tokens, rounds) > THRESHOLD,
            f"correlation {tokens:+.2f} between tokens, {rounds:+.2f} between rounds; threshold {THRESHOLD:g}",
        ),
        Expectation(
            f"SAGE: alpha of the last round predicts the accepted length of this round, {title}",
            last > THRESHOLD and last >= this / 2,
            f"correlation {last:+.2f} with alpha of the last round, {this:+.2f} with alpha of this round",
        ),
    ]


def draw_entropy(figures: Figures) -> Figure:
    """Draws the autocorrelation of the draft's confidence by lag. Ref: SAGE, arXiv 2602.00523, Figure 2."""
    subtitle = "correlation of alpha within an answer, by lag"
    figure = style.figure(3.3, "Autocorrelation of the draft's confidence", subtitle)
    axes = figure.subplots()
    for color, (target, study) in zip(COLORS, figures["entropy"]["targets"].items(), strict=False):
        for unit, linestyle in LINE_STYLES.items():
            points = [(lag, value) for lag, value in enumerate(study[f"by_{unit}"], start=1) if value is not None]
            label = f"{title_of(target)}, {unit}s"
            line(axes, [x for x, _ in points], [y for _, y in points], color, label, linestyle=linestyle)
    axes.axhline(0.0, color=style.INK, linewidth=1.0)
    integer_axis(axes, "lag")
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), handlelength=2.2)
    style.despine(axes)
    return figure


PLOTS = {"entropy.png": draw_entropy}
