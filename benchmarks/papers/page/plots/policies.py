"""Plots of the section on policies and task families."""

from __future__ import annotations

from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.papers.page.headline import CAPTIONS, OURS, decoders, part_of, tuned_policies
from benchmarks.papers.page.markdown import Figures, by_target
from benchmarks.papers.page.plots.panels import bar_labels, legend_below, policy_line, target_panels
from sage.bench.runners import AUTOREGRESSIVE
from train.report import style

BASELINE_LINE: dict[str, Any] = {"color": style.INK, "linewidth": 1.0, "linestyle": (0, (4, 3))}


def draw_headline(figures: Figures) -> Figure:
    """Draws the speedup on captions as bars and over all families as dots; a panel per target."""
    tables = by_target(figures, "policies")
    names = decoders(tables)
    subtitle = "over the fastest autoregressive decoder, decoding only; bars: captions, 95% interval; dots: all families"
    figure = style.figure(1.5 + 0.33 * len(names), "Speedup of lossless decoding on two CPU cores", subtitle)
    panels = target_panels(figure, tables, "x")
    for target, axes in panels.items():
        for place, name in enumerate(names):
            _headline_bar(axes, place, name, tables[target])
        axes.axvline(1.0, **BASELINE_LINE)
        axes.set_xlim(left=0)
        axes.margins(x=0.16)
    bar_labels(next(iter(panels.values())), names)
    return figure


def _headline_bar(axes: Axes, place: int, name: str, figures: Any) -> None:
    captions, overall = part_of(figures["by_family"].get(CAPTIONS, {}), name), part_of(figures, name)
    if captions is None or overall is None:
        axes.text(0.04, place, "not measured", va="center", fontsize=9, color=style.FAINT)
        return
    axes.barh(
        place, captions["speedup"], height=0.62, color=style.policy_color(name) if name in figures["variants"] else style.BAND
    )
    low, high = captions.get("speedup_ci") or [captions["speedup"]] * 2
    axes.plot([low, high], [place, place], color=style.INK, linewidth=1.2)
    dot: dict[str, Any] = {
        "markersize": 4.5,
        "color": "white",
        "markeredgecolor": style.INK,
        "markeredgewidth": 1.1,
        "zorder": 4,
    }
    axes.plot(overall["speedup"], place, "o", **dot)
    text: dict[str, Any] = {"fontsize": 9, "fontweight": "bold" if name == OURS else "normal", "va": "center", "zorder": 3}
    box = {"facecolor": "white", "edgecolor": "none", "pad": 0.6}
    right = (max(high, captions["speedup"], overall["speedup"]), place)
    axes.annotate(f"{captions['speedup']:.2f}x", right, xytext=(7, 0), textcoords="offset points", bbox=box, **text)


def draw_families(figures: Figures) -> Figure:
    """Draws the speedup by task family, a line per tuned policy."""
    tables = by_target(figures, "policies")
    figure = style.figure(3.6, "Speedup by task family", "tuned policies, decoding only")
    panels = target_panels(figure, tables)
    for target, axes in panels.items():
        families = tables[target]["by_family"]
        for name in tuned_policies(tables[target]):
            speedups = [family["policies"][name]["speedup"] for family in families.values()]
            policy_line(axes, list(families), speedups, name, linewidth=2.2 if name in (OURS, "sage") else 1.0)
        axes.axhline(1.0, **BASELINE_LINE)
    first = next(iter(panels.values()))
    first.set_ylabel("speedup")
    legend_below(figure, first, 5)
    return figure


def draw_time(figures: Figures) -> Figure:
    """Draws the milliseconds per token by phase, a bar per tuned policy. Ref: SAGE, arXiv 2602.00523, Table 6."""
    tables = by_target(figures, "policies")
    names = [AUTOREGRESSIVE, *tuned_policies(next(iter(tables.values())))]
    subtitle = "ms per generated token, without vision tower and target prefill"
    figure = style.figure(1.9 + 0.3 * len(names), "Decoding time by phase", subtitle)
    panels = target_panels(figure, tables, "x")
    for target, axes in panels.items():
        for place, name in enumerate(names):
            if name in tables[target]["policies"]:
                _phases(axes, place, tables[target]["policies"][name])
        axes.margins(x=0.12)
    first = next(iter(panels.values()))
    bar_labels(first, names)
    legend_below(figure, first, 4)
    return figure


def _phases(axes: Axes, place: int, part: Any) -> None:
    left = 0.0
    for phase, shade in style.PHASE_COLORS.items():
        width = 1e3 * part["time_s"].get(phase, 0.0) / max(part["tokens"], 1)
        label = style.PHASE_NAMES[phase] if place == 0 else None
        axes.barh(place, width, left=left, height=0.62, color=shade, label=label)
        left += width
    axes.text(left, place, f" {left:.2f}", va="center", fontsize=8.5)
