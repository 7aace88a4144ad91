"""Pictures of the page about what happens within an answer, each from the figures alone."""

from __future__ import annotations

from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from benchmarks.papers.page.parts import Found, of_targets, title_of
from train.report import style

PREDICTORS = {"alpha": "#2f6fa7", "draft probability": style.FAINT, "calibrated": "#b23a6b"}
FEW_NODES = 10  # a tenth with fewer is not drawn
LINES = {"token": "-", "round": (0, (4, 2))}


def draw_reliability(found: Found) -> Figure | None:
    """Predicted against observed acceptance of the draft's best token; a panel per target."""
    tables = of_targets(found, "calibration")
    if not tables:
        return None
    made = style.figure(
        4.1, "Does the draft know its chances?", "share of best tokens that the target took, by what was predicted"
    )
    panels = made.subplots(1, len(tables), sharex=True, sharey=True, squeeze=False)[0]
    for axes, (target, figures) in zip(panels, tables.items(), strict=True):
        axes.plot([0, 1], [0, 1], color=style.BAND, linewidth=1.2)
        for name, shade in PREDICTORS.items():
            one = figures["predictors"]["by_name"][name]
            points = [point for point in one["curve"] if point[2] >= FEW_NODES]
            axes.plot(
                [p[0] for p in points], [p[1] for p in points], color=shade, marker="o", markersize=4, linewidth=1.6, label=name
            )
        axes.set_title(f"{title_of(target)}, {figures['predictors']['nodes']} nodes", fontsize=10, loc="left")
        axes.set_xlim(0, 1)
        axes.set_ylim(0, 1.02)
        axes.set_xlabel("predicted")
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter(PercentFormatter(1.0))
        style.quiet(axes)
    panels[0].set_ylabel("accepted")
    made.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, handlelength=1.4)
    return made


def draw_errors(found: Found) -> Figure | None:
    """Calibration error by depth, before and after learning; a panel per target."""
    tables = of_targets(found, "calibration")
    if not tables:
        return None
    made = style.figure(3.3, "Calibration error by depth", "all drafted candidates of verified nodes, test split")
    panels = made.subplots(1, len(tables), sharey=True, squeeze=False)[0]
    for axes, (target, figures) in zip(panels, tables.items(), strict=True):
        rows = figures["by_depth"]
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


def draw_length(found: Found) -> Figure | None:
    """Accepted tokens by forced length, and tokens per pass along answers that end by themselves."""
    if "length" not in found:
        return None
    figures = found["length"]
    made = style.figure(
        3.4, "Length of the answer", "left: answers forced to a length; right: along answers that end by themselves"
    )
    forced, along = made.subplots(1, 2)
    for name in figures["forced"][0]["policies"]:
        values = [row["policies"][name]["mean_accepted_draft"] for row in figures["forced"]]
        _line(forced, [row["length"] for row in figures["forced"]], values, name)
    for name in figures["stretches"][0]["policies"]:
        values = [row["policies"][name] for row in figures["stretches"]]
        _line(along, [f"{row['from']}+" for row in figures["stretches"]], values, name)
    forced.set_xscale("log", base=2)
    forced.set_xticks([row["length"] for row in figures["forced"]], [str(row["length"]) for row in figures["forced"]])
    forced.minorticks_off()
    forced.set_xlabel("tokens of the answer")
    along.set_xlabel("tokens so far")
    forced.set_title("drafted tokens accepted", fontsize=10, loc="left")
    along.set_title("tokens per target pass", fontsize=10, loc="left")
    for axes in (forced, along):
        axes.set_ylim(bottom=0)
        style.quiet(axes)
    made.legend(*forced.get_legend_handles_labels(), loc="outside lower center", ncols=3, handlelength=1.4)
    return made


def _line(axes: Any, places: list[Any], values: list[float], name: str) -> None:
    shade = style.colour(name.split(" ")[0])
    axes.plot(places, values, color=shade, marker="o", markersize=4.5, linewidth=1.6, label=name)


def draw_entropy(found: Found) -> Figure | None:
    """Autocorrelation of the draft's confidence by lag (SAGE's Figure 2)."""
    if "entropy" not in found:
        return None
    made = style.figure(3.3, "How long the draft's confidence remembers", "correlation of alpha with itself, by lag")
    axes = made.subplots()
    for shade, (target, figures) in zip(("#2f6fa7", "#b23a6b", "#6f9e74"), found["entropy"]["targets"].items(), strict=False):
        for unit, line in LINES.items():
            points = [(lag, value) for lag, value in enumerate(figures[f"by_{unit}"], start=1) if value is not None]
            label = f"{title_of(target)}, {unit}s"
            axes.plot(
                [p[0] for p in points],
                [p[1] for p in points],
                color=shade,
                linestyle=line,
                marker="o",
                markersize=4,
                label=label,
            )
    axes.axhline(0.0, color=style.INK, linewidth=1.0)
    axes.set_xlabel("lag")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), handlelength=2.2)
    style.quiet(axes)
    return made


def draw_ablations(found: Found) -> Figure | None:
    """Replayed tokens per second of every variant, the oracle last."""
    if "ablations" not in found:
        return None
    figures = found["ablations"]
    rows = [
        (row["label"], row["replayed"]["tokens_per_s"], style.colour(row["label"].split(",")[0])) for row in figures["rows"]
    ]
    rows.append(("oracle", figures["oracle"]["tokens_per_s"], style.BAND))
    made = style.figure(1.2 + 0.31 * len(rows), "What each part is worth", "tokens per second, replayed on the same drafts")
    axes = made.subplots()
    for place, (_, value, shade) in enumerate(rows):
        axes.barh(place, value, height=0.62, color=shade)
        axes.text(value, place, f" {value:.0f}", va="center", fontsize=9)
    axes.set_yticks(range(len(rows)), [label for label, _, _ in rows])
    axes.margins(x=0.1)
    axes.invert_yaxis()
    style.quiet(axes, "x")
    return made


def draw_temperature(found: Found) -> Figure | None:
    """Tokens per pass by temperature; a panel per target."""
    if "temperature" not in found:
        return None
    rows = found["temperature"]["rows"]
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
