"""The common style of all plots: one color per policy, light grid lines, font sizes that stay legible at README width."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from sage.io.files import atomic_path
from sage.io.page import visible

WIDTH_IN, HEADING_IN, LEFT_IN = 7.6, 0.66, 0.09
DPI = 170
INK, FAINT, GRID, BAND = "#1f2933", "#6b7682", "#e3e7eb", "#c9d1d9"
BASELINE: dict[str, Any] = {"color": INK, "linewidth": 1.0, "linestyle": (0, (4, 3))}  # of a line at speedup 1

POLICY_COLORS = {
    "autoregressive": "#8b95a1",
    "chain": "#b9a05a",
    "static": "#c97b4a",
    "eagle2": "#6f9e74",
    "spec_llava": "#4f9aa8",
    "talon": "#9a86b8",
    "ddd": "#a3766a",
    "sage": "#2f6fa7",
    "cost_aware": "#b23a6b",
}
SPARE_COLORS = ("#5c6ac4", "#7d8c2f", "#a35f9c", "#3d7d6f", "#946c2b")

PHASES = {  # phase of decoding: name, color
    "draft_prefill": ("draft prefill", "#f0c9a0"),
    "draft_steps": ("draft steps", "#d98e4a"),
    "verify": ("target passes", "#2f6fa7"),
    "accept": ("acceptance", "#7fb0d3"),
    "commit": ("cache commit", "#a9c9a4"),
    "policy": ("policy", "#b23a6b"),
    "other": ("other", "#c9d1d9"),
}

RC = {
    "font.size": 10.5,
    "font.family": "DejaVu Sans",
    "text.parse_math": False,  # a name with two dollar signs is no formula
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": BAND,
    "axes.linewidth": 0.9,
    "axes.labelsize": 10,
    "xtick.color": FAINT,
    "ytick.color": FAINT,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "xtick.labelsize": 9.5,
    "ytick.labelsize": 9.5,
    "legend.frameon": False,
    "legend.fontsize": 9.5,
}
rc_context = partial(matplotlib.rc_context, RC)  # type: ignore[arg-type]  # for the time of drawing and saving


def policy_color(name: str, names: Iterable[str] = ()) -> str:
    """Returns the color of a policy; any other label gets a spare color by its position among the labels in `names`."""
    if name in POLICY_COLORS:
        return POLICY_COLORS[name]
    labels = [other for other in names if other not in POLICY_COLORS]
    return SPARE_COLORS[labels.index(name) % len(SPARE_COLORS)] if name in labels else SPARE_COLORS[0]


def figure(height_in: float, heading: str, subtitle: str) -> Figure:
    """Returns an empty figure of README width with a bold heading and a gray subtitle.

    Drawn off screen without pyplot's global state; the space under the heading is laid out automatically.
    """
    made = Figure(figsize=(WIDTH_IN, height_in), dpi=DPI, facecolor="white")
    FigureCanvasAgg(made)
    left = LEFT_IN / WIDTH_IN
    made.set_layout_engine("constrained", rect=(left, 0.0, 1.0 - left, 1.0 - HEADING_IN / height_in))
    made.text(left, 1 - 0.10 / height_in, visible(heading), ha="left", va="top", fontsize=12.5, fontweight="bold")
    made.text(left, 1 - 0.37 / height_in, visible(subtitle), ha="left", va="top", fontsize=9.5, color=FAINT)
    return made


def despine(axes: Axes, grid: str = "y") -> None:
    """Removes all spines except that of the categories, and draws light grid lines behind the data."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines["left" if grid == "x" else "bottom"].set_color(BAND)
    axes.tick_params(length=0)
    axes.grid(axis=grid, color=GRID, linewidth=0.9)  # type: ignore[arg-type]
    axes.set_axisbelow(True)


def label_bars(axes: Axes, labels: Sequence[str]) -> None:
    axes.set_yticks(range(len(labels)), [visible(label) for label in labels])
    axes.invert_yaxis()


def legend_below(made: Figure, num_columns: int, **looks: Any) -> None:
    handles, labels = made.axes[0].get_legend_handles_labels()
    made.legend(handles, labels, loc="outside lower center", ncols=num_columns, **looks)


def dodged(place: int, count: int, width: float) -> float:
    """Returns the offset of one of `count` series, so that equal values lie side by side within `width`."""
    return (place - (count - 1) / 2) * width / max(count - 1, 1)


def save(made: Figure, path: Path) -> None:
    """Writes a PNG atomically; characters that the font lacks are drawn as boxes, without a warning for each of them."""
    with atomic_path(path) as temporary, warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"Glyph \d+ .* missing from font", UserWarning)
        made.savefig(temporary, format="png")
