"""The curves of a run: six panels over optimizer steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from train.report import style

Lines = Sequence[dict[str, Any]]
LOSSES = (("loss", style.INK), ("loss_ce", "#2f6fa7"), ("loss_feature", "#d98e4a"))
HEIGHT_IN = 7.4
LOG_SCALE_RATIO = 50.0  # curves that span a larger factor have a logarithmic axis
ESTIMATE_COLOR = "#6b7682"


def draw_curves(name: str, lines: Lines, measured: Lines) -> Figure:
    """Draws the curves of metrics.jsonl and the results of the validations."""
    steps = [line["step"] for line in lines]
    made = style.figure(HEIGHT_IN, f"Run {name}", f"{steps[-1]:,} optimizer steps, {lines[-1]['tokens']:,} tokens")
    panels = made.subplots(3, 2, sharex=True)
    _curves(panels[0][0], lines, LOSSES, "loss")
    _curves(panels[0][1], lines, (("agreement", "#2f6fa7"), ("acceptance", "#b23a6b")), "agreement and acceptance probability")
    panels[0][1].set_yscale("linear")
    panels[0][1].set_ylim(0, 1.02)
    _tokens_per_pass(panels[1][0], lines, measured)
    _speedups(panels[1][1], measured)
    _curves(panels[2][0], lines, (("grad_norm", "#6f9e74"),), "gradient norm")
    _rate_and_speed(panels[2][1], lines)
    for axes in panels.flat:
        axes.xaxis.set_major_locator(MaxNLocator(nbins=5, integer=True))
        style.despine(axes)
    for axes in panels[2]:
        axes.set_xlabel("step")
    return made


def _curves(axes: Axes, lines: Lines, names: Sequence[tuple[str, str]], title: str) -> None:
    known = [(name, color) for name, color in names if name in lines[-1] and any(line.get(name) for line in lines)]
    for name, color in known:
        found = [(line["step"], line[name]) for line in lines if name in line]
        axes.plot(*zip(*found, strict=True), color=color, linewidth=1.5, label=name)
    values = [line[name] for name, _ in known for line in lines if line.get(name)]
    if values and min(values) > 0 and max(values) > LOG_SCALE_RATIO * min(values):
        axes.set_yscale("log")
    _title(axes, title)
    if len(known) > 1:
        axes.legend(loc="best", handlelength=1.2, fontsize=8.5)


def _tokens_per_pass(axes: Axes, lines: Lines, measured: Lines) -> None:
    """Draws the estimate as a line and the measurements as dots, one color per policy."""
    estimated = [(line["step"], line["estimated_tokens_per_pass"]) for line in lines if "estimated_tokens_per_pass" in line]
    if estimated:
        axes.plot(*zip(*estimated, strict=True), color=ESTIMATE_COLOR, linewidth=1.3, label="estimated (chain)")
    _dots(axes, measured, "tokens_per_target_pass")
    _title(axes, "tokens per target pass")
    if axes.get_legend_handles_labels()[1]:
        axes.legend(loc="best", handlelength=1.2, fontsize=8.5)


def _speedups(axes: Axes, measured: Lines) -> None:
    _dots(axes, measured, "speedup")
    axes.axhline(1.0, color=style.INK, linewidth=1.0, linestyle=(0, (4, 3)))
    _title(axes, "speedup, decoding only" if measured else "speedup: no validation yet")


def _dots(axes: Axes, measured: Lines, figure: str) -> None:
    names = list(dict.fromkeys(name for row in measured for name in row["policies"]))
    for name in names:
        found = [(row["step"], row["policies"][name][figure]) for row in measured if name in row["policies"]]
        color = style.policy_color(name, names)
        axes.plot(*zip(*found, strict=True), color=color, linewidth=1.0, marker="o", markersize=4.5, label=name)


def _rate_and_speed(axes: Axes, lines: Lines) -> None:
    steps = [line["step"] for line in lines]
    axes.plot(steps, [line["tokens_per_s"] for line in lines], color="#4f9aa8", linewidth=1.5)
    axes.set_ylim(bottom=0)
    _title(axes, "training tokens/s; dashed: learning rate")
    twin = style.twin_axis(axes)
    twin.plot(steps, [line["lr"] for line in lines], color=style.FAINT, linewidth=1.2, linestyle=(0, (3, 2)))
    twin.set_ylim(bottom=0)
    twin.yaxis.set_major_formatter("{x:g}")
    twin.tick_params(labelsize=8.5)


def _title(axes: Axes, text: str) -> None:
    axes.set_title(text, fontsize=10, loc="left")
