"""Plots of the page: panels of curves, and elements that the other plots share."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from benchmarks.papers.figures import Json
from train.report import style

COLORS = ("#2f6fa7", "#b23a6b", "#6f9e74", "#c97b4a")
DOTTED = {"marker": "", "linestyle": ":", "linewidth": 1}


@dataclass
class Curve:
    """One curve with markers; without a label it is not in the legend. `options`: as for `Axes.plot`."""

    label: str | None
    x: Sequence[Any]
    y: Sequence[float]
    color: str
    options: Mapping[str, Any] = field(default_factory=dict)


def policy_curve(label: str, x: Sequence[Any], y: Sequence[float], **options: Any) -> Curve:
    """Returns a curve in the color of the policy that the label starts with, such as `sage (published)` or `sage, DRAFT`."""
    return Curve(label, x, y, style.policy_color(re.split("[, ]", label)[0]), options)


def policy_curves(rows: Sequence[Json], x: str, y: str) -> list[Curve]:
    """Returns the figure `y` of every policy by the figure `x` of the rows."""
    places = [row[x] for row in rows]
    return [policy_curve(name, places, [row["policies"][name][y] for row in rows]) for name in rows[0]["policies"]]


def plot_curves(
    title: str,
    subtitle: str,
    panels: Mapping[str, Sequence[Curve]],
    xlabel: str = "",
    ylabel: str = "",
    *,
    height: float = 3.3,
    share_y: bool = True,
    from_zero: bool = True,
    legend: str | int = "best",
) -> Figure:
    """Plots curves in titled panels.

    Args:
        from_zero: whether the y axes start at 0.
        legend: its place in the first panel, or its number of columns below all panels.
    """
    figure = style.figure(height, title, subtitle)
    for name, axes in titled_panels(figure, panels, share_y).items():
        curves = panels[name]
        for one in curves:
            look = {"marker": "o", "markersize": 4.5, "linewidth": 1.6, **one.options}
            axes.plot(one.x, one.y, color=one.color, label=one.label, **look)
        axes.set_xlabel(xlabel)
        places = {place for one in curves for place in one.x}
        if all(isinstance(place, int) for place in places):
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        if len(places) == 1:  # the locator would divide an axis without a range
            axes.set_xticks(list(places))
    first = figure.axes[0]
    first.set_ylabel(ylabel)
    for axes in figure.axes if from_zero else ():  # a limit ends the scaling of a shared axis: set it after all curves
        axes.set_ylim(bottom=0)
    if isinstance(legend, int):
        style.legend_below(figure, legend, handlelength=1.4)
    else:
        first.legend(**{"loc": legend, "handlelength": 1.4})
    return figure


def titled_panels(figure: Figure, names: Collection[str], share_y: bool = True, grid: str = "y") -> dict[str, Axes]:
    """Adds a panel per name, side by side; returns them by name."""
    found = dict(zip(names, figure.subplots(1, len(names), sharey=share_y, squeeze=False)[0], strict=True))
    for name, axes in found.items():
        axes.set_title(name, fontsize=10.5, loc="left")
        style.despine(axes, grid)
    return found
