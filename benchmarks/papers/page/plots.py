"""Elements that the plots share: a panel per target, lines with markers, a legend below the panels."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from benchmarks.papers.page.markdown import title_of
from train.report import style

COLORS = ("#2f6fa7", "#b23a6b", "#6f9e74", "#c97b4a")


def target_panels(figure: Figure, targets: Iterable[str], grid: str = "y") -> tuple[dict[str, Axes], Axes]:
    """Adds a titled panel per target with a common y axis; returns the panels by target, and the first one."""
    names = list(targets)
    panels = dict(zip(names, figure.subplots(1, len(names), sharey=True, squeeze=False)[0], strict=True))
    for name, axes in panels.items():
        axes.set_title(title_of(name), fontsize=10.5, loc="left")
        style.despine(axes, grid)
    return panels, panels[names[0]]


def column_panels(figure: Figure, titles: Sequence[str]) -> list[Axes]:
    """Adds a titled panel per figure, each with its own y axis from 0; call it before plotting."""
    panels = list(figure.subplots(1, len(titles)))
    for axes, title in zip(panels, titles, strict=True):
        axes.set_title(title, fontsize=10.5, loc="left")
        style.despine(axes)
    return panels


def line(axes: Axes, x: Sequence[Any], y: Sequence[float], color: str, label: str, **options: Any) -> None:
    """Plots a line with markers."""
    axes.plot(x, y, **{"color": color, "label": label, "marker": "o", "markersize": 4.5, "linewidth": 1.6, **options})


def policy_line(axes: Axes, x: Sequence[Any], y: Sequence[float], label: str, **options: Any) -> None:
    """Plots a line in the color of the policy that the label starts with."""
    line(axes, x, y, style.policy_color(label.split(" ")[0]), label, **options)


def bar_labels(axes: Axes, labels: Sequence[str]) -> None:
    """Labels horizontal bars, the first one at the top."""
    axes.set_yticks(range(len(labels)), labels)
    axes.invert_yaxis()


def integer_axis(axes: Axes, label: str) -> None:
    """Labels the x axis, with integer ticks."""
    axes.set_xlabel(label)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def legend_below(figure: Figure, axes: Axes, ncols: int) -> None:
    """Adds the legend of `axes` below all panels."""
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=ncols, handlelength=1.4)
