"""The curves of a run, six panels over optimizer steps, and the plot of a comparison, a row per run and a dot per policy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from train.report import style
from train.report.compare_table import drafting_policies

Lines = Sequence[dict[str, Any]]
LOSSES = (("loss", style.INK), ("loss_ce", "#2f6fa7"), ("loss_feature", "#d98e4a"))
NAMES = {  # of metrics in legends
    "loss": "total",
    "loss_ce": "cross-entropy",
    "loss_feature": "features",
    "agreement": "agreement of the top tokens",
    "acceptance": "acceptance probability",
}
HEIGHT_IN = 7.4
DODGED = 0.07  # share of the steps over which the dots of one validation are spread
LOG_SCALE_RATIO = 50.0  # curves that span a larger factor have a logarithmic axis
PANELS = (("tokens_per_target_pass", "tokens per target pass"), ("speedup", "speedup, decoding only"))  # of a comparison
MAX_ROWS = 40
LABEL_CHARACTERS = 34


def draw_curves(name: str, lines: Lines, measured: Lines) -> Figure:
    """Draws the curves of metrics.jsonl and the results of the validations."""
    steps = [line["step"] for line in lines]
    made = style.figure(HEIGHT_IN, f"Run {name}", f"{steps[-1]:,} optimizer steps, {lines[-1]['tokens']:,} tokens")
    panels = made.subplots(3, 2, sharex=True)
    _curves(panels[0][0], lines, LOSSES, "loss")
    _curves(panels[0][1], lines, (("agreement", "#2f6fa7"), ("acceptance", "#b23a6b")), "agreement of draft and target")
    panels[0][1].set(yscale="linear", ylim=(0, 1.02))
    _tokens_per_pass(panels[1][0], lines, measured)
    _dots(panels[1][1], measured, "speedup")
    panels[1][1].axhline(1.0, **style.BASELINE)
    title = "speedup, decoding only" if measured else "speedup: no validation yet"
    _title(panels[1][1], title, has_legend=any(row["policies"] for row in measured))
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
        axes.plot(*zip(*found, strict=True), color=color, linewidth=1.5, label=NAMES.get(name, name))
    values = [line[name] for name, _ in known for line in lines if line.get(name)]
    if values and min(values) > 0 and max(values) > LOG_SCALE_RATIO * min(values):
        axes.set_yscale("log")
    _title(axes, title, has_legend=len(known) > 1)


def _tokens_per_pass(axes: Axes, lines: Lines, measured: Lines) -> None:
    """Draws the estimate as a line and the measurements as dots, one color per policy."""
    estimated = [(line["step"], line["estimated_tokens_per_pass"]) for line in lines if "estimated_tokens_per_pass" in line]
    if estimated:
        axes.plot(*zip(*estimated, strict=True), color=style.FAINT, linewidth=1.3, label="estimated (chain)")
    _dots(axes, measured, "tokens_per_target_pass")
    _title(axes, "tokens per target pass", has_legend=bool(axes.lines))


def _dots(axes: Axes, measured: Lines, figure: str) -> None:
    """Draws the figure of every policy over steps; the policies are shifted, so that equal dots lie side by side."""
    names = list(dict.fromkeys(name for row in measured for name in row["policies"]))
    width = DODGED * max((row["step"] for row in measured), default=0)
    for place, name in enumerate(names):
        offset = style.dodged(place, len(names), width)
        found = [(row["step"] + offset, row["policies"][name][figure]) for row in measured if name in row["policies"]]
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
    twin.set_ylabel("learning rate", fontsize=9)


def _title(axes: Axes, text: str, has_legend: bool = False) -> None:
    axes.set_title(text, fontsize=10, loc="left")
    if has_legend:
        looks: dict[str, Any] = {"frameon": True, "facecolor": "white", "edgecolor": "none", "framealpha": 0.8}
        axes.legend(loc="best", handlelength=1.2, fontsize=8.5, **looks)


# -- comparison ------------------------------------------------------------------------------------------------------------


def draw_comparison(content: dict[str, Any]) -> Figure | None:
    """Draws the runs, the best on top; None if no drafting policy was measured."""
    runs = [run for run in content["runs"] if run["policies"]][:MAX_ROWS]
    policies = drafting_policies(content)
    if not runs or not policies:
        return None
    left_out = len(content["runs"]) - len(runs)
    subtitle = "the best run on top; bars: 95% interval" + (f"; {left_out} not shown" if left_out else "")
    made = style.figure(1.55 + (0.24 + 0.1 * len(policies)) * len(runs), "Comparison of runs", subtitle)
    panels = made.subplots(1, len(PANELS), sharey=True)
    for axes, (figure, title) in zip(panels, PANELS, strict=True):
        _compared(axes, runs, policies, figure)
        axes.set_xlabel(title)
    panels[1].axvline(1.0, **style.BASELINE)
    panels[0].set_yticks(range(len(runs)), [label_of(run, content["changed"]) for run in runs])
    panels[0].set_ylim(len(runs) - 0.5, -0.5)
    style.legend_below(made, 5, handletextpad=0.2)
    return made


def _compared(axes: Axes, runs: list[dict[str, Any]], policies: list[str], figure: str) -> None:
    """Draws a row per run; within it, the policies lie below each other, with the interval of the figure if there is one."""
    for order, name in enumerate(policies):
        color, offset = style.policy_color(name, policies), style.dodged(order, len(policies), 0.56)
        known = {place + offset: run["policies"][name] for place, run in enumerate(runs) if name in run["policies"]}
        for place, part in known.items():
            if bounds := part.get(f"{figure}_ci"):
                axes.plot(bounds, [place, place], color=color, linewidth=1.3, zorder=1)
        values = [part[figure] for part in known.values()]
        axes.scatter(values, list(known), s=30, color=color, label=name, zorder=2)
    for place in range(1, len(runs)):
        axes.axhline(place - 0.5, color=style.GRID, linewidth=0.9, zorder=0)
    style.despine(axes, "x")


def label_of(run: dict[str, Any], changed: list[str]) -> str:
    """Returns `lr 0.0003, feature_weight 2`, or the end of the folder's name if nothing differs or the text is too long."""
    values = {key.rpartition(".")[2]: run["changed"][key] for key in changed if key in run["changed"]}
    parts = [f"{key} {value:g}" if isinstance(value, float) else f"{key} {value}" for key, value in values.items()]
    name, text = run["run"], ", ".join(parts)
    if parts and len(text) <= LABEL_CHARACTERS:
        return text
    return name if len(name) <= LABEL_CHARACTERS else "..." + name[3 - LABEL_CHARACTERS :]
