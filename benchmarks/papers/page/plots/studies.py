"""Plots of the sections on calibration, length, entropy, ablations and temperature."""

from __future__ import annotations

from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from benchmarks.papers.page.markdown import Figures, by_target, title_of
from train.report import style

PREDICTORS = {"alpha": "#2f6fa7", "draft probability": style.FAINT, "calibrated": "#b23a6b"}
MIN_NODES = 10  # bins with fewer are not drawn
TARGET_COLOURS = ("#2f6fa7", "#b23a6b", "#6f9e74")
LINES = {"token": "-", "round": (0, (4, 2))}


def draw_reliability(figures: Figures) -> Figure:
    """Draws predicted and observed acceptance of the draft's most likely token; a panel per target."""
    tables = by_target(figures, "calibration")
    made = style.figure(4.1, "Predicted and observed acceptance", "of the draft's most likely token, on the path of the answer")
    panels = made.subplots(1, len(tables), sharex=True, sharey=True, squeeze=False)[0]
    for axes, (target, own) in zip(panels, tables.items(), strict=True):
        axes.plot([0, 1], [0, 1], color=style.BAND, linewidth=1.2)
        for name, shade in PREDICTORS.items():
            one = own["predictors"]["by_name"][name]
            points = [point for point in one["curve"] if point[2] >= MIN_NODES]
            axes.plot(
                [p[0] for p in points], [p[1] for p in points], color=shade, marker="o", markersize=4, linewidth=1.6, label=name
            )
        axes.set_title(f"{title_of(target)}, {own['predictors']['nodes']} nodes", fontsize=10, loc="left")
        axes.set_xlim(0, 1)
        axes.set_ylim(0, 1.02)
        axes.set_xlabel("predicted acceptance probability")
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter(PercentFormatter(1.0))
        style.quiet(axes)
    panels[0].set_ylabel("observed acceptance")
    made.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, handlelength=1.4)
    return made


def draw_errors(figures: Figures) -> Figure:
    """Draws the calibration error by depth, before and after calibration; a panel per target."""
    tables = by_target(figures, "calibration")
    made = style.figure(3.3, "Calibration error by depth", "all drafted candidates of verified nodes, test split")
    panels = made.subplots(1, len(tables), sharey=True, squeeze=False)[0]
    for axes, (target, own) in zip(panels, tables.items(), strict=True):
        rows = own["by_depth"]
        for key, label in (("before", "draft probability"), ("after", "calibrated")):
            values = [row[key] for row in rows]
            axes.plot([row["depth"] for row in rows], values, color=PREDICTORS[label], marker="o", markersize=4.5, label=label)
        axes.set_title(title_of(target), fontsize=10, loc="left")
        axes.set_xlabel("depth")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        style.quiet(axes)
    panels[0].set_ylim(bottom=0)
    panels[0].legend(loc="best", handlelength=1.4)
    return made


def draw_length(figures: Figures) -> Figure:
    """Draws accepted tokens by forced length, and tokens per pass along free-running answers."""
    own = figures["length"]
    made = style.figure(
        3.4, "Length of the answer", "left: answers of forced length; right: by position in free-running answers"
    )
    forced, along = made.subplots(1, 2)
    for name in own["forced"][0]["policies"]:
        values = [row["policies"][name]["mean_accepted_draft"] for row in own["forced"]]
        _line(forced, [row["length"] for row in own["forced"]], values, name)
    for name in own["segments"][0]["policies"]:
        values = [row["policies"][name] for row in own["segments"]]
        _line(along, [f"{row['from']}+" for row in own["segments"]], values, name)
    forced.set_xscale("log", base=2)
    forced.set_xticks([row["length"] for row in own["forced"]], [str(row["length"]) for row in own["forced"]])
    forced.minorticks_off()
    forced.set_xlabel("length of the answer in tokens")
    along.set_xlabel("position of the round in tokens")
    forced.set_title("accepted tokens per round", fontsize=10, loc="left")
    along.set_title("tokens per target pass", fontsize=10, loc="left")
    for axes in (forced, along):
        axes.set_ylim(bottom=0)
        style.quiet(axes)
    made.legend(*forced.get_legend_handles_labels(), loc="outside lower center", ncols=3, handlelength=1.4)
    return made


def _line(axes: Any, places: list[Any], values: list[float], name: str) -> None:
    shade = style.colour(name.split(" ")[0])
    axes.plot(places, values, color=shade, marker="o", markersize=4.5, linewidth=1.6, label=name)


def draw_entropy(figures: Figures) -> Figure:
    """Draws the autocorrelation of the draft's confidence by lag. Ref: SAGE, arXiv 2602.00523, Figure 2."""
    made = style.figure(3.3, "Autocorrelation of the draft's confidence", "correlation of alpha within an answer, by lag")
    axes = made.subplots()
    for shade, (target, own) in zip(TARGET_COLOURS, figures["entropy"]["targets"].items(), strict=False):
        for unit, line in LINES.items():
            points = [(lag, value) for lag, value in enumerate(own[f"by_{unit}"], start=1) if value is not None]
            lags, correlations = [lag for lag, _ in points], [value for _, value in points]
            label = f"{title_of(target)}, {unit}s"
            axes.plot(lags, correlations, color=shade, linestyle=line, marker="o", markersize=4, label=label)
    axes.axhline(0.0, color=style.INK, linewidth=1.0)
    axes.set_xlabel("lag")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), handlelength=2.2)
    style.quiet(axes)
    return made


def draw_ablations(figures: Figures) -> Figure:
    """Draws the replayed tokens per second of every variant, the oracle last."""
    own = figures["ablations"]
    speeds = {row["label"]: row["replayed"]["tokens_per_s"] for row in own["rows"]}
    rows = [(label, speed, style.colour(label.split(",")[0])) for label, speed in speeds.items()]
    rows.append(("oracle", own["oracle"]["tokens_per_s"], style.BAND))
    made = style.figure(1.2 + 0.31 * len(rows), "Ablations", "tokens per second, replayed on the same drafts")
    axes = made.subplots()
    for place, (_, value, shade) in enumerate(rows):
        axes.barh(place, value, height=0.62, color=shade)
        axes.text(value, place, f" {value:.0f}", va="center", fontsize=9)
    axes.set_yticks(range(len(rows)), [label for label, _, _ in rows])
    axes.margins(x=0.1)
    axes.invert_yaxis()
    style.quiet(axes, "x")
    return made


def draw_temperature(figures: Figures) -> Figure:
    """Draws tokens per target pass by temperature; a panel per target."""
    rows = figures["temperature"]["rows"]
    targets = list(dict.fromkeys(row["target"] for row in rows))
    made = style.figure(3.3, "Temperature", "tokens per target pass, one seed")
    panels = made.subplots(1, len(targets), sharey=True, squeeze=False)[0]
    for axes, target in zip(panels, targets, strict=True):
        own = [row for row in rows if row["target"] == target]
        for name in own[0]["policies"]:
            values = [row["policies"][name]["tokens_per_target_pass"] for row in own]
            _line(axes, [row["temperature"] for row in own], values, name)
        axes.set_title(title_of(target), fontsize=10, loc="left")
        axes.set_xlabel("temperature")
        style.quiet(axes)
    panels[0].set_ylim(bottom=0)
    panels[0].legend(loc="lower left", handlelength=1.4)
    return made
