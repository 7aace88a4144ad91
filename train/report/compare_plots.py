"""The picture of a comparison: a row per run, a dot per policy, tokens per target pass beside speedup."""

from __future__ import annotations

from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from train.report import style
from train.report.compare_table import drafting_policies

PANELS = (("tokens_per_target_pass", "tokens per target pass"), ("speedup", "speedup, decode only"))
MOST_ROWS = 40
LABEL_CHARACTERS = 34


def draw_comparison(content: dict[str, Any]) -> Figure | None:
    """The best run on top; None where nothing that drafts was measured."""
    runs = [run for run in content["runs"] if run["policies"]][:MOST_ROWS]
    policies = drafting_policies(content)
    if not runs or not policies:
        return None
    left_out = len(content["runs"]) - len(runs)
    below = f"{len(runs)} runs, the best on top" + (f"; {left_out} not shown" if left_out else "")
    made = style.figure(1.55 + 0.34 * len(runs), "Runs compared", below)
    panels = made.subplots(1, len(PANELS), sharey=True)
    for axes, (figure, title) in zip(panels, PANELS, strict=True):
        _dots(axes, runs, policies, figure)
        axes.set_xlabel(title)
    panels[1].axvline(1.0, color=style.INK, linewidth=1.0, linestyle=(0, (4, 3)))
    panels[0].set_yticks(range(len(runs)), [shorten(label_of(run, content["changed"])) for run in runs])
    panels[0].set_ylim(len(runs) - 0.5, -0.5)
    made.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=5, handletextpad=0.2)
    return made


def _dots(axes: Axes, runs: list[dict[str, Any]], policies: list[str], figure: str) -> None:
    for place, run in enumerate(runs):
        values = [run["policies"][name][figure] for name in policies if name in run["policies"]]
        axes.plot([min(values), max(values)], [place, place], color=style.GRID, linewidth=2.4, zorder=1)
    for name in policies:
        known = [place for place, run in enumerate(runs) if name in run["policies"]]
        values = [runs[place]["policies"][name][figure] for place in known]
        axes.scatter(values, known, s=36, color=style.colour(name, policies), label=name, zorder=2)
    style.quiet(axes, "x")


def label_of(run: dict[str, Any], changed: list[str]) -> str:
    """`lr 0.0003, feature_weight 2`, or the folder's name where nothing differs."""
    parts = [f"{key.rpartition('.')[2]} {_plain(run['changed'][key])}" for key in changed if key in run["changed"]]
    text = ", ".join(parts)
    return text if parts and len(text) <= LABEL_CHARACTERS else run["run"]


def _plain(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def shorten(text: str) -> str:
    """At most `LABEL_CHARACTERS`, the end kept: that is where folder names differ."""
    return text if len(text) <= LABEL_CHARACTERS else "..." + text[3 - LABEL_CHARACTERS :]
