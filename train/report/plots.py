"""The plots of a validation report, drawn from `report.json` alone: the list of all plots, and those over all policies."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from train.report import style
from train.report.generation import draw_generation, draw_pricing

Report = Mapping[str, Any]
MAX_COLUMNS = 4
MIN_ROUNDS = 10  # shares of fewer rounds are mostly noise and drawn hollow
NUM_BINS = 10  # of predicted acceptance probabilities
NUM_SINGLE_DEPTHS = 2  # deeper levels share a panel
MIN_LABELS = 20  # bins with fewer are not drawn: their share is mostly noise


@dataclass(frozen=True)
class Plot:
    """A plot: file name beside the report, caption, the function that draws it (None without data), and its SVG once drawn."""

    file: str
    caption: str
    draw: Callable[[Report], Figure | None]
    svg: str = ""


def write_plots(report: Report, directory: Path) -> list[Plot]:
    """Writes every plot with data as a PNG into `directory`; returns them in reading order."""
    written = []
    for plot in PLOTS:
        with style.rc_context():
            if (made := plot.draw(report)) is not None:
                style.save(made, directory / plot.file)
                written.append(replace(plot, svg=style.svg(made, plot.file, plot.caption)))
    return written


def draw_speed(report: Report) -> Figure | None:
    """Draws the decoding speedup of policies and baselines with 95% intervals."""
    rows = [(name, section, style.policy_color(name, report["policies"])) for name, section in report["policies"].items()]
    rows += [(name, part, style.BAND) for name, part in report["baselines"].items() if name not in report["policies"]]
    made = style.figure(
        1.25 + 0.38 * len(rows),
        f"Decoding speed: {report['target']}",
        f"speedup over the fastest autoregressive baseline ({report['fastest_baseline']}), decoding only; 95% intervals",
    )
    axes = made.subplots()
    right = max(1.0, *(part.get("speedup_ci", [0, part["speedup"]])[1] for _, part, _ in rows))
    for place, (_, part, color) in enumerate(rows):
        axes.barh(place, part["speedup"], height=0.62, color=color)
        if "speedup_ci" in part and part["speedup_ci"][0] != part["speedup_ci"][1]:
            ends = part["speedup_ci"], [place, place]
            axes.plot(*ends, "|-", color=style.INK, markersize=6, linewidth=1.3, solid_capstyle="butt")
        _beside(axes, place, 46, f"{part['speedup']:.2f}x", fontweight="bold")
        _beside(axes, place, 118, f"{part['tokens_per_s']:.0f} tokens/s", color=style.FAINT)
    axes.axvline(1.0, **style.BASELINE)
    axes.set_xlim(0, right * 1.04)
    style.label_bars(axes, [name for name, _, _ in rows])
    style.despine(axes, "x")
    return made


def draw_acceptance(report: Report) -> Figure | None:
    """Draws the conditional acceptance rate at each draft position."""
    curves = {name: part["acceptance_by_depth"] for name, part in report["policies"].items() if part["acceptance_by_depth"]}
    if not curves:
        return None
    made = style.figure(
        3.9,
        "Acceptance rate by draft position",
        f"of the rounds that accepted all tokens before it; bars: 95% interval; hollow: under {MIN_ROUNDS} rounds",
    )
    axes = made.subplots()
    for place, (name, levels) in enumerate(curves.items()):
        offset = style.dodged(place, len(curves), 0.4)
        _acceptance(axes, levels, offset, style.policy_color(name, report["policies"]), name)
    axes.set_xlabel("draft position")
    axes.set_ylim(0, 1.04)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), handlelength=1.4)
    style.despine(axes)
    return made


def _acceptance(axes: Axes, levels: Sequence[Mapping[str, int]], offset: float, color: str, label: str) -> None:
    """Draws one curve; the points of few rounds are not connected to it."""
    places, shares = [level["depth"] + offset for level in levels], [level["kept"] / level["tried"] for level in levels]
    connected = [share if level["tried"] >= MIN_ROUNDS else float("nan") for level, share in zip(levels, shares, strict=True)]
    axes.plot(places, connected, color=color, linewidth=1.8, label=label, zorder=2)
    low, high = zip(*(share_interval(level["kept"], level["tried"]) for level in levels), strict=True)
    axes.vlines(places, low, high, color=color, linewidth=1.1, alpha=0.55, zorder=1)
    faces = [color if level["tried"] >= MIN_ROUNDS else "white" for level in levels]
    axes.scatter(places, shares, s=26, c=faces, edgecolors=color, linewidths=1.4, zorder=3)


def share_interval(kept: int, tried: int) -> tuple[float, float]:
    """Returns the 95% interval of a share, `kept` of `tried`.

    Ref: Wilson, Probable inference, the law of succession, and statistical inference, 1927.
    """
    share, z = kept / tried, 1.96
    center = (share + z**2 / (2 * tried)) / (1 + z**2 / tried)
    half = z / (1 + z**2 / tried) * math.sqrt(share * (1 - share) / tried + z**2 / (4 * tried**2))
    return max(0.0, center - half), min(1.0, center + half)


def draw_time(report: Report) -> Figure | None:
    """Draws the decoding time per token, stacked by phase."""
    policies = report["policies"]
    phases = [phase for phase in style.PHASES if any(part["time_s"].get(phase, 0) > 0 for part in policies.values())]
    if not phases:
        return None
    made = style.figure(
        1.75 + 0.38 * len(policies), "Decoding time by phase", "milliseconds per generated token, after the target's prefill"
    )
    axes = made.subplots()
    lengths = [style.phase_bar(axes, place, part, phases) for place, part in enumerate(policies.values())]
    for place, length in enumerate(lengths):
        axes.text(length, place, f"  {length:.2f} ms", va="center", fontsize=9.5)
    axes.set_xlim(0, max(lengths) * 1.16)
    style.label_bars(axes, list(policies))
    style.legend_below(made, 4, handlelength=1.0)
    style.despine(axes, "x")
    return made


def draw_accepted(report: Report) -> Figure | None:
    """Draws histograms of the drafted tokens accepted per round."""
    counts = {name: part["accepted_histogram"] for name, part in report["policies"].items()}
    counts = {name: bins for name, bins in counts.items() if len(bins) > 1}
    if not counts:
        return None
    rows = -(-len(counts) // MAX_COLUMNS)
    columns = -(-len(counts) // rows)
    made = style.figure(1.15 + 1.65 * rows, "Drafted tokens accepted per round", "share of rounds; line and number: mean")
    grid = made.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
    for axes in grid.flat[len(counts) :]:
        axes.set_visible(False)
    for place, ((name, bins), axes) in enumerate(zip(counts.items(), grid.flat, strict=False)):
        mean = report["policies"][name]["mean_accepted_draft"]
        shares = [value / sum(bins) for value in bins]
        axes.bar(range(len(bins)), shares, width=0.8, color=style.policy_color(name, report["policies"]))
        axes.axvline(mean, color=style.INK, linewidth=1.2)
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.tick_params(labelbottom=place + columns >= len(counts))
        axes.set_title(f"{name}  {mean:.2f}", fontsize=10, loc="left")
        style.despine(axes)
    made.supxlabel("drafted tokens accepted", fontsize=10)
    return made


def _beside(axes: Axes, place: int, points: float, text: str, **looks: Any) -> None:
    """Draws text in a column right of the axes that ends `points` from their edge."""
    looks |= {"va": "center", "ha": "right", "fontsize": 9.5, "annotation_clip": False}
    right = axes.get_yaxis_transform()
    axes.annotate(text, (1.0, place), xycoords=right, xytext=(points, 0), textcoords="offset points", **looks)


def draw_calibration(report: Mapping[str, Any]) -> Figure | None:
    """Draws depth 1, 2 and beyond of the first policy with calibration; None if there is none."""
    name = next((name for name, part in report.get("calibration", {}).items() if part["by_depth"]), None)
    if name is None:
        return None
    section = report["calibration"][name]
    depths = range(1, NUM_SINGLE_DEPTHS + 1)
    by_title = {f"depth {depth}": [row for row in section["by_depth"] if row["depth"] == depth] for depth in depths}
    by_title[f"depth {NUM_SINGLE_DEPTHS + 1}+"] = [row for row in section["by_depth"] if row["depth"] > NUM_SINGLE_DEPTHS]
    panels = {title: rows for title, rows in by_title.items() if rows}
    made = style.figure(
        3.75,
        f"Calibration of the draft's probabilities: {name}",
        f"{section['rounds']} rounds, in bins of the predicted acceptance probability; error: mean distance from the diagonal",
    )
    grid = made.subplots(1, len(panels), sharex=True, sharey=True, squeeze=False)[0]
    for axes, (title, rows) in zip(grid, panels.items(), strict=True):
        _reliability(axes, title, rows)
    grid[0].set_ylabel("observed acceptance")
    grid[len(grid) // 2].set_xlabel("predicted acceptance probability")
    style.legend_below(made, 2, handlelength=1.6)
    return made


def _reliability(axes: Axes, title: str, rows: Sequence[Mapping[str, Any]]) -> None:
    axes.plot([0, 1], [0, 1], color=style.BAND, linewidth=1.2, zorder=1)
    labels = sum(row["labels"] for row in rows)
    for key, height, color, marker in (("before", 0.15, style.FAINT, "o"), ("after", 0.05, "#b23a6b", "s")):
        error = sum(row[key] * row["labels"] for row in rows) / labels
        points = [point for point in pooled([row[f"curve_{key}"] for row in rows]) if point[2] >= MIN_LABELS]
        curve = [point[0] for point in points], [point[1] for point in points]
        axes.plot(*curve, color=color, linewidth=1.6, marker=marker, markersize=4.5, label=f"{key} calibration", zorder=2)
        text = f"error {error:.3f}" if key == "before" else f"{error:.3f}"
        axes.text(0.97, height, text, transform=axes.transAxes, fontsize=9.5, color=color, fontweight="bold", ha="right")
    axes.set_title(f"{title}, {labels} labels", fontsize=9.5, loc="left")
    style.percent_axes(axes)
    axes.set_yticks([0, 0.5, 1])
    style.despine(axes)
    axes.set_aspect("equal")


def pooled(curves: Sequence[Sequence[Sequence[float]]]) -> list[tuple[float, float, float]]:
    """Merges several curves of (mean prediction, mean outcome, number of labels) into one: the points in the same bin of
    predictions are averaged, weighted by labels.
    """
    sums = [[0.0, 0.0, 0.0] for _ in range(NUM_BINS)]
    for predicted, outcome, count in (point for curve in curves for point in curve):
        cell = sums[min(int(predicted * NUM_BINS), NUM_BINS - 1)]
        cell[0] += predicted * count
        cell[1] += outcome * count
        cell[2] += count
    return [(predicted / count, outcome / count, count) for predicted, outcome, count in sums if count]


PLOTS = (
    Plot("speed.png", "Decoding speed over the fastest autoregressive baseline of the same run.", draw_speed),
    Plot("acceptance.png", "Acceptance rate of drafted tokens, by draft position.", draw_acceptance),
    Plot("time.png", "Decoding time per token by phase.", draw_time),
    Plot("accepted.png", "Drafted tokens accepted per round.", draw_accepted),
    Plot("generation.png", "Confidence of the draft, depth and nodes of the tree, round by round.", draw_generation),
    Plot("pricing.png", "Price of time, depth, nodes, expected gain and cost, round by round.", draw_pricing),
    Plot("calibration.png", "Observed acceptance by predicted acceptance probability.", draw_calibration),
)
