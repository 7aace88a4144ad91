"""The common style of all plots: one color per policy, light grid lines, font sizes that stay legible at README width."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from sage.io.files import atomic_path

WIDTH_IN, HEADING_IN = 7.6, 0.66
DPI = 170
INK, FAINT, GRID, BAND = "#1f2933", "#6b7682", "#e3e7eb", "#c9d1d9"

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


@contextmanager
def rc_context() -> Iterator[None]:
    """Applies the settings to plots drawn inside; the caller's matplotlib settings are restored afterwards."""
    with matplotlib.rc_context(RC):  # type: ignore[arg-type]
        yield


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
    made.set_layout_engine("constrained", rect=(0.0, 0.0, 1.0, 1.0 - HEADING_IN / height_in))
    left = 0.09 / WIDTH_IN
    made.text(left, 1 - 0.10 / height_in, heading, ha="left", va="top", fontsize=12.5, fontweight="bold")
    made.text(left, 1 - 0.37 / height_in, subtitle, ha="left", va="top", fontsize=9.5, color=FAINT)
    return made


def despine(axes: Axes, grid: str = "y") -> None:
    """Removes all spines except that of the categories, and draws light grid lines behind the data."""
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.spines["left" if grid == "x" else "bottom"].set_color(BAND)
    axes.tick_params(length=0)
    axes.grid(axis=grid, color=GRID, linewidth=0.9)  # type: ignore[arg-type]
    axes.set_axisbelow(True)


def twin_axis(axes: Axes) -> Axes:
    """Returns a second y axis on the right, without spines."""
    twin = axes.twinx()
    twin.tick_params(length=0)
    for side in ("top", "right", "left"):
        twin.spines[side].set_visible(False)
    return twin


def legend_above(axes: Axes, highest: float, columns: int, headroom: float = 1.4) -> None:
    """Draws the legend above bars that end at `highest`, and no tick labels beside it."""
    axes.set_ylim(0, headroom * max(highest, 1))
    axes.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=5))
    axes.set_yticks([tick for tick in axes.get_yticks() if 0 <= tick <= highest])
    axes.legend(loc="upper right", ncols=columns, handlelength=1.0, borderaxespad=0.1, columnspacing=1.2)


def save(made: Figure, path: Path) -> None:
    """Writes a PNG atomically."""
    with atomic_path(path) as temporary:
        made.savefig(temporary, format="png")
