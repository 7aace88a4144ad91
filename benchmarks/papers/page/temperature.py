"""Section: temperature."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from matplotlib.figure import Figure

from benchmarks.papers.figures import Json
from benchmarks.papers.page.markdown import Expectation, Figures, by_policy, grouped, title_of
from benchmarks.papers.page.plots import policy_line, target_panels
from sage.io.tables import markdown_table
from train.report import style


def values(figures: Figures) -> dict[str, Any]:
    """Returns the placeholders of temperature.md."""
    rows = figures["temperature"]["rows"]
    head, cells = by_policy([row["policies"] for row in rows])
    lines = [
        [title_of(row["target"]), f"{row['temperature']:g}", *part, "{}/{}".format(*_identical([row]))]
        for row, part in zip(rows, cells, strict=True)
    ]
    table = markdown_table(["target", "T", *head, "identical by seed"], lines)
    return {"prompts": rows[0]["prompts"], "table": table}


def _identical(rows: Sequence[Json]) -> tuple[int, int]:
    parts = [part for row in rows for part in row["policies"].values()]
    return sum(part["match"] for part in parts), sum(part["total"] for part in parts)


def expectations(figures: Figures) -> list[Expectation]:
    """Texts depend on the seed only; acceptance decreases with the temperature."""
    rows = figures["temperature"]["rows"]
    same, total = _identical(rows)
    claim = "Ours: one seed gives one text, under every policy and at every temperature"
    return [
        Expectation(claim, same == total, f"{same} of {total} texts"),
        *(_decreases(title_of(target), group) for target, group in grouped(rows, "target").items()),
    ]


def _decreases(title: str, rows: Sequence[Json]) -> Expectation:
    curve = {row["temperature"]: row["policies"]["chain"]["tokens_per_target_pass"] for row in rows}
    evidence = "tokens per pass of `chain`: " + ", ".join(f"{value:.2f} at T {degree:g}" for degree, value in curve.items())
    decreases = all(after <= before for before, after in pairwise(curve.values()))
    return Expectation(f"SpecVLM: acceptance decreases with the temperature, {title}", decreases, evidence)


def draw_temperature(figures: Figures) -> Figure:
    """Draws tokens per target pass by temperature; a panel per target."""
    by_target = grouped(figures["temperature"]["rows"], "target")
    figure = style.figure(3.3, "Temperature", "tokens per target pass, one seed")
    panels, first = target_panels(figure, by_target)
    for target, axes in panels.items():
        selected = by_target[target]
        for name in selected[0]["policies"]:
            tokens = [row["policies"][name]["tokens_per_target_pass"] for row in selected]
            policy_line(axes, [row["temperature"] for row in selected], tokens, name)
        axes.set_xlabel("temperature")
    first.set_ylim(bottom=0)
    first.legend(loc="lower left", handlelength=1.4)
    return figure


PLOTS = {"temperature.png": draw_temperature}
