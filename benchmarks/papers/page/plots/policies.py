"""Plots of the section on policies and task families."""

from __future__ import annotations

from typing import Any

from matplotlib.figure import Figure

from benchmarks.papers.measure.policies import DRAFTING
from benchmarks.papers.page.headline import CAPTIONS, OURS, part_of
from benchmarks.papers.page.markdown import Figures, by_target, title_of
from sage.bench.runners import AUTOREGRESSIVE
from train.report import style


def draw_headline(figures: Figures) -> Figure:
    """Draws the speedup on captions as bars and over all families as dots; a panel per target."""
    tables = by_target(figures, "policies")
    names = list(dict.fromkeys([*(name for one in tables.values() for name in one["baselines"]), *DRAFTING]))
    subtitle = "over the fastest autoregressive decoder, decoding only; bars: captions, 95% interval; dots: all families"
    made = style.figure(1.5 + 0.33 * len(names), "Speedup of lossless decoding on two CPU cores", subtitle)
    panels = made.subplots(1, len(tables), sharey=True, squeeze=False)[0]
    for axes, (target, own) in zip(panels, tables.items(), strict=True):
        for place, name in enumerate(names):
            _headline_bar(axes, place, name, own)
        axes.axvline(1.0, color=style.INK, linewidth=1.0, linestyle=(0, (4, 3)))
        axes.set_title(title_of(target), fontsize=10.5, loc="left")
        axes.set_xlim(left=0)
        axes.margins(x=0.16)
        style.quiet(axes, "x")
    panels[0].set_yticks(range(len(names)), names)
    panels[0].invert_yaxis()
    return made


def _headline_bar(axes: Any, place: int, name: str, figures: Any) -> None:
    captions, overall = part_of(figures["by_family"][CAPTIONS], name), part_of(figures, name)
    if captions is None or overall is None:
        axes.text(0.04, place, "not measured", va="center", fontsize=9, color=style.FAINT)
        return
    shade = style.colour(name) if name in DRAFTING else style.BAND
    axes.barh(place, captions["speedup"], height=0.62, color=shade)
    low, high = captions.get("speedup_ci") or [captions["speedup"]] * 2
    axes.plot([low, high], [place, place], color=style.INK, linewidth=1.2)
    dot = {"markersize": 4.5, "color": "white", "markeredgecolor": style.INK, "markeredgewidth": 1.1, "zorder": 4}
    axes.plot(overall["speedup"], place, "o", **dot)
    axes.annotate(
        f"{captions['speedup']:.2f}x",
        (max(high, captions["speedup"], overall["speedup"]), place),
        xytext=(7, 0),
        textcoords="offset points",
        va="center",
        fontsize=9,
        fontweight="bold" if name == OURS else "normal",
        bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.6},
        zorder=3,
    )


def draw_families(figures: Figures) -> Figure:
    """Draws the speedup by task family, a line per tuned policy."""
    tables = by_target(figures, "policies")
    made = style.figure(3.6, "Speedup by task family", "tuned policies, decoding only")
    panels = made.subplots(1, len(tables), sharey=True, squeeze=False)[0]
    for axes, (target, own) in zip(panels, tables.items(), strict=True):
        families = list(own["by_family"])
        for name in (one for one in DRAFTING if one in own["policies"]):
            values = [own["by_family"][family]["policies"][name]["speedup"] for family in families]
            width = 2.2 if name in (OURS, "sage") else 1.0
            axes.plot(families, values, marker="o", markersize=4, linewidth=width, color=style.colour(name), label=name)
        axes.axhline(1.0, color=style.INK, linewidth=1.0, linestyle=(0, (4, 3)))
        axes.set_title(title_of(target), fontsize=10.5, loc="left")
        style.quiet(axes)
    panels[0].set_ylabel("speedup")
    made.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=5, handlelength=1.4)
    return made


def draw_time(figures: Figures) -> Figure:
    """Draws the milliseconds per token by stage, a bar per tuned policy. Ref: SAGE, arXiv 2602.00523, Table 6."""
    tables = by_target(figures, "policies")
    names = [AUTOREGRESSIVE, *DRAFTING]
    made = style.figure(
        1.9 + 0.3 * len(names),
        "Decoding time by stage",
        "ms per generated token, without vision tower and target prefill",
    )
    panels = made.subplots(1, len(tables), sharey=True, squeeze=False)[0]
    for axes, (target, own) in zip(panels, tables.items(), strict=True):
        for place, name in enumerate(names):
            _stages(axes, place, own["policies"].get(name))
        axes.set_title(title_of(target), fontsize=10.5, loc="left")
        axes.margins(x=0.12)
        style.quiet(axes, "x")
    panels[0].set_yticks(range(len(names)), names)
    panels[0].invert_yaxis()
    made.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, handlelength=1.0)
    return made


def _stages(axes: Any, place: int, part: Any) -> None:
    if part is None:
        return
    left = 0.0
    for stage, shade in style.STAGE_COLOURS.items():
        width = 1e3 * part["time_s"].get(stage, 0.0) / max(part["tokens"], 1)
        label = style.STAGE_NAMES[stage] if place == 0 else None
        axes.barh(place, width, left=left, height=0.62, color=shade, label=label)
        left += width
    axes.text(left, place, f" {left:.2f}", va="center", fontsize=8.5)
