"""The plot of a comparison: a row per run, a dot per policy; tokens per target pass and speedup."""

from __future__ import annotations

from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from train.report import style
from train.report.compare_table import drafting_policies

PANELS = (("tokens_per_target_pass", "tokens per target pass"), ("speedup", "speedup, decoding only"))
MAX_ROWS = 40
LABEL_CHARACTERS = 34


def draw_comparison(content: dict[str, Any]) -> Figure | None:
    """Draws the runs, the best on top; None if no drafting policy was measured."""
    runs = [run for run in content["runs"] if run["policies"]][:MAX_ROWS]
    policies = drafting_policies(content)
    if not runs or not policies:
        return None
    left_out = len(content["runs"]) - len(runs)
    subtitle = "the best run on top" + (f"; {left_out} not shown" if left_out else "")
    made = style.figure(1.55 + 0.34 * len(runs), "Comparison of runs", subtitle)
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
        axes.scatter(values, known, s=36, color=style.policy_color(name, policies), label=name, zorder=2)
    style.despine(axes, "x")


def label_of(run: dict[str, Any], changed: list[str]) -> str:
    """Returns `lr 0.0003, feature_weight 2`, or the name of the folder if nothing differs."""
    parts = [f"{key.rpartition('.')[2]} {_plain(run['changed'][key])}" for key in changed if key in run["changed"]]
    text = ", ".join(parts)
    return text if parts and len(text) <= LABEL_CHARACTERS else run["run"]


def _plain(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def shorten(text: str) -> str:
    """Truncates to `LABEL_CHARACTERS` at the front, since folder names differ at the end."""
    return text if len(text) <= LABEL_CHARACTERS else "..." + text[3 - LABEL_CHARACTERS :]
