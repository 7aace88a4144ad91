"""Section: autocorrelation of the draft's confidence."""

from __future__ import annotations

from benchmarks.papers.figures import Json
from benchmarks.papers.page.expectations import Expectation
from benchmarks.papers.page.markdown import Figures, title_of
from sage.bench.tables import markdown_table

THRESHOLD = 0.1  # a correlation of some hundred pairs below this is not significant


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
