"""Reliability diagrams: predicted against observed acceptance by depth, before and after online calibration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from train.report import style

Point = tuple[float, float, float]  # mean prediction, mean outcome, number of labels
NUM_BINS = 10
NUM_SINGLE_DEPTHS = 2  # deeper levels share a panel
MIN_LABELS = 20  # bins with fewer are not drawn: their share is mostly noise
BEFORE, AFTER = ("before", style.FAINT, "o"), ("after", "#b23a6b", "s")


def draw_calibration(report: Mapping[str, Any]) -> Figure | None:
    """Draws depth 1, 2 and beyond of the first policy with calibration; None if there is none."""
    name = next((name for name, part in report.get("calibration", {}).items() if part["by_depth"]), None)
    if name is None:
        return None
    section = report["calibration"][name]
    panels = [panel for panel in _panels(section["by_depth"]) if panel[1]]
    made = style.figure(
        3.75,
        f"Calibration of the draft's probabilities: {name}",
        f"{section['rounds']} rounds, in bins of the predicted acceptance probability; error: mean distance from the diagonal",
    )
    grid = made.subplots(1, len(panels), sharex=True, sharey=True, squeeze=False)[0]
    for axes, (title, rows) in zip(grid, panels, strict=True):
        _panel(axes, title, rows)
    grid[0].set_ylabel("observed acceptance")
    grid[len(grid) // 2].set_xlabel("predicted acceptance probability")
    handles, labels = grid[0].get_legend_handles_labels()
    made.legend(handles, labels, loc="outside lower center", ncols=2, handlelength=1.6)
    return made


def _panels(by_depth: Sequence[Mapping[str, Any]]) -> list[tuple[str, list[Mapping[str, Any]]]]:
    single = [
        (f"depth {depth}", [row for row in by_depth if row["depth"] == depth]) for depth in range(1, NUM_SINGLE_DEPTHS + 1)
    ]
    beyond = [row for row in by_depth if row["depth"] > NUM_SINGLE_DEPTHS]
    return [*single, (f"depth {NUM_SINGLE_DEPTHS + 1}+", beyond)]


def _panel(axes: Axes, title: str, rows: Sequence[Mapping[str, Any]]) -> None:
    axes.plot([0, 1], [0, 1], color=style.BAND, linewidth=1.2, zorder=1)
    labels = sum(row["labels"] for row in rows)
    for height, (key, color, marker) in ((0.15, BEFORE), (0.05, AFTER)):
        error = sum(row[key] * row["labels"] for row in rows) / labels
        points = [point for point in pooled([row[f"curve_{key}"] for row in rows]) if point[2] >= MIN_LABELS]
        x, y = [point[0] for point in points], [point[1] for point in points]
        axes.plot(x, y, color=color, linewidth=1.6, marker=marker, markersize=4.5, label=f"{key} calibration", zorder=2)
        text = f"error {error:.3f}" if key == "before" else f"{error:.3f}"
        axes.text(0.97, height, text, transform=axes.transAxes, fontsize=9.5, color=color, fontweight="bold", ha="right")
    axes.set_title(f"{title}, {labels} labels", fontsize=9.5, loc="left")
    axes.set_xlim(0, 1)
    axes.set_ylim(0, 1.02)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(PercentFormatter(1.0))
        axis.set_ticks([0, 0.5, 1.0])
    style.despine(axes)
    axes.set_aspect("equal")


def pooled(curves: Sequence[Sequence[Sequence[float]]]) -> list[Point]:
    """Merges several curves into one: points in the same bin of predictions are averaged, weighted by labels."""
    sums = [[0.0, 0.0, 0.0] for _ in range(NUM_BINS)]
    for predicted, outcome, count in (point for curve in curves for point in curve):
        cell = sums[min(int(predicted * NUM_BINS), NUM_BINS - 1)]
        cell[0] += predicted * count
        cell[1] += outcome * count
        cell[2] += count
    return [(predicted / count, outcome / count, count) for predicted, outcome, count in sums if count]
