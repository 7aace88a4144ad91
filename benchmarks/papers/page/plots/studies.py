"""Plots of the sections on calibration, length, entropy, ablations and temperature."""

from __future__ import annotations

from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from benchmarks.papers.page.markdown import Figures, by_target, title_of
from benchmarks.papers.page.plots.panels import (
    COLORS,
    bar_labels,
    column_panels,
    integer_axis,
    legend_below,
    line,
    policy_line,
    target_panels,
)
from train.report import style

PREDICTORS = {"alpha": "#2f6fa7", "draft probability": style.FAINT, "calibrated": "#b23a6b"}
MIN_NODES = 10  # bins with fewer are not drawn
LINE_STYLES = {"token": "-", "round": (0, (4, 2))}


def draw_reliability(figures: Figures) -> Figure:
    """Draws predicted and observed acceptance of the draft's most likely token; a panel per target."""
    tables = by_target(figures, "calibration")
    subtitle = "of the draft's most likely token, on the path of the answer"
    figure = style.figure(4.1, "Predicted and observed acceptance", subtitle)
    panels = target_panels(figure, tables)
    for target, axes in panels.items():
        axes.plot([0, 1], [0, 1], color=style.BAND, linewidth=1.2)
        for name, color in PREDICTORS.items():
            curve = tables[target]["predictors"]["by_name"][name]["curve"]
            points = [(predicted, observed) for predicted, observed, count in curve if count >= MIN_NODES]
            line(axes, [x for x, _ in points], [y for _, y in points], color, name)
        axes.set(xlim=(0, 1), ylim=(0, 1.02), xlabel="predicted acceptance probability")
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter(PercentFormatter(1.0))
    first = next(iter(panels.values()))
    first.set_ylabel("observed acceptance")
    legend_below(figure, first, 3)
    return figure


def draw_errors(figures: Figures) -> Figure:
    """Draws the calibration error by depth, before and after calibration; a panel per target."""
    tables = by_target(figures, "calibration")
    figure = style.figure(3.3, "Calibration error by depth", "all drafted candidates of verified nodes, test split")
    panels = target_panels(figure, tables)
    for target, axes in panels.items():
        rows = tables[target]["by_depth"]
        for key, label in {"before": "draft probability", "after": "calibrated"}.items():
            line(axes, [row["depth"] for row in rows], [row[key] for row in rows], PREDICTORS[label], label)
        integer_axis(axes, "depth")
    first = next(iter(panels.values()))  # the y axis is shared: its limit is set after all lines are drawn
    first.set_ylim(bottom=0)
    first.legend(loc="best", handlelength=1.4)
    return figure


def draw_length(figures: Figures) -> Figure:
    """Draws accepted tokens by forced length, and tokens per pass along free-running answers."""
    rows, segments = figures["length"]["forced"], figures["length"]["segments"]
    subtitle = "left: answers of forced length; right: by position in free-running answers"
    figure = style.figure(3.4, "Length of the answer", subtitle)
    forced, along = column_panels(figure, ("accepted tokens per round", "tokens per target pass"))
    lengths, starts = [row["length"] for row in rows], [f"{row['from']}+" for row in segments]
    for name in rows[0]["policies"]:
        policy_line(forced, lengths, [row["policies"][name]["mean_accepted_draft"] for row in rows], name)
    for name in segments[0]["policies"]:
        policy_line(along, starts, [row["policies"][name] for row in segments], name)
    forced.set_xscale("log", base=2)
    forced.set_xticks(lengths, [str(length) for length in lengths])
    forced.minorticks_off()
    forced.set(xlabel="length of the answer in tokens", ylim=(0, None))
    along.set(xlabel="position of the round in tokens", ylim=(0, None))
    legend_below(figure, forced, 3)
    return figure


def draw_entropy(figures: Figures) -> Figure:
    """Draws the autocorrelation of the draft's confidence by lag. Ref: SAGE, arXiv 2602.00523, Figure 2."""
    subtitle = "correlation of alpha within an answer, by lag"
    figure = style.figure(3.3, "Autocorrelation of the draft's confidence", subtitle)
    axes = figure.subplots()
    for color, (target, study) in zip(COLORS, figures["entropy"]["targets"].items(), strict=False):
        for unit, linestyle in LINE_STYLES.items():
            points = [(lag, value) for lag, value in enumerate(study[f"by_{unit}"], start=1) if value is not None]
            label = f"{title_of(target)}, {unit}s"
            line(axes, [x for x, _ in points], [y for _, y in points], color, label, linestyle=linestyle)
    axes.axhline(0.0, color=style.INK, linewidth=1.0)
    integer_axis(axes, "lag")
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), handlelength=2.2)
    style.despine(axes)
    return figure


def draw_ablations(figures: Figures) -> Figure:
    """Draws the replayed tokens per second of every variant, the oracle last."""
    study = figures["ablations"]
    speeds = {row["label"]: row["replayed"]["tokens_per_s"] for row in study["rows"]}
    speeds["oracle"] = study["oracle"]["tokens_per_s"]
    figure = style.figure(1.2 + 0.31 * len(speeds), "Ablations", "tokens per second, replayed on the same drafts")
    axes = figure.subplots()
    for place, (label, speed) in enumerate(speeds.items()):
        color = style.BAND if label == "oracle" else style.policy_color(label.split(",")[0])
        axes.barh(place, speed, height=0.62, color=color)
        axes.text(speed, place, f" {speed:.0f}", va="center", fontsize=9)
    axes.margins(x=0.1)
    bar_labels(axes, list(speeds))
    style.despine(axes, "x")
    return figure


def draw_temperature(figures: Figures) -> Figure:
    """Draws tokens per target pass by temperature; a panel per target."""
    rows = figures["temperature"]["rows"]
    figure = style.figure(3.3, "Temperature", "tokens per target pass, one seed")
    panels = target_panels(figure, dict.fromkeys(row["target"] for row in rows))
    for target, axes in panels.items():
        selected = [row for row in rows if row["target"] == target]
        for name in selected[0]["policies"]:
            tokens = [row["policies"][name]["tokens_per_target_pass"] for row in selected]
            policy_line(axes, [row["temperature"] for row in selected], tokens, name)
        axes.set_xlabel("temperature")
    first = next(iter(panels.values()))
    first.set_ylim(bottom=0)
    first.legend(loc="lower left", handlelength=1.4)
    return figure
