"""Pictures of the page about policies and training, each from the figures alone."""

from __future__ import annotations

from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from benchmarks.papers.measure.policies import DRAFTING
from benchmarks.papers.page.parts import Found, of_targets, title_of
from benchmarks.papers.page.policies import CAPTIONS, OURS, part_of
from benchmarks.papers.page.training import CURVE, label_of
from sage.bench.runners import AUTOREGRESSIVE
from train.report import style

RUN_COLOURS = ("#2f6fa7", "#b23a6b", "#6f9e74", "#c97b4a")


def draw_headline(found: Found) -> Figure | None:
    """Speedup on captions as bars, over all families as dots; a panel per target."""
    tables = {target: figures for target, figures in of_targets(found, "policies").items() if CAPTIONS in figures["by_family"]}
    if not tables:
        return None
    names = list(dict.fromkeys([*(name for one in tables.values() for name in one["baselines"]), *DRAFTING]))
    below = "times the fastest autoregressive decoder, decode only; bars: captions with 95% interval, dots: all task families"
    made = style.figure(1.5 + 0.33 * len(names), "Speed of lossless decoding on two CPU cores", below)
    panels = made.subplots(1, len(tables), sharey=True, squeeze=False)[0]
    for axes, (target, figures) in zip(panels, tables.items(), strict=True):
        for place, name in enumerate(names):
            _headline_bar(axes, place, name, figures)
        axes.axvline(1.0, color=style.INK, linewidth=1.0, linestyle=(0, (4, 3)))
        axes.set_title(title_of(target), fontsize=10.5, loc="left")
        axes.set_xlim(left=0)
        axes.margins(x=0.16)
        style.quiet(axes, "x")
    panels[0].set_yticks(range(len(names)), names)
    panels[0].invert_yaxis()
    return made


def _headline_bar(axes: Any, place: int, name: str, figures: Any) -> None:
    captions, whole = part_of(figures["by_family"][CAPTIONS], name), part_of(figures, name)
    if captions is None or whole is None:
        axes.text(0.04, place, "not measured", va="center", fontsize=9, color=style.FAINT)
        return
    shade = style.colour(name) if name in DRAFTING else style.BAND
    axes.barh(place, captions["speedup"], height=0.62, color=shade)
    low, high = captions.get("speedup_ci") or [captions["speedup"]] * 2
    axes.plot([low, high], [place, place], color=style.INK, linewidth=1.2)
    axes.plot(
        whole["speedup"], place, "o", markersize=4.5, color="white", markeredgecolor=style.INK, markeredgewidth=1.1, zorder=4
    )
    axes.annotate(
        f"{captions['speedup']:.2f}x",
        (max(high, captions["speedup"], whole["speedup"]), place),
        xytext=(7, 0),
        textcoords="offset points",
        va="center",
        fontsize=9,
        fontweight="bold" if name == OURS else "normal",
        bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.6},
        zorder=3,
    )


def draw_families(found: Found) -> Figure | None:
    """Speedup by task family, a line of dots per policy as tuned."""
    tables = of_targets(found, "policies")
    if not tables:
        return None
    made = style.figure(3.6, "Speedup by task family", "policies as tuned, decode only")
    panels = made.subplots(1, len(tables), sharey=True, squeeze=False)[0]
    for axes, (target, figures) in zip(panels, tables.items(), strict=True):
        families = list(figures["by_family"])
        for name in (one for one in DRAFTING if one in figures["policies"]):
            values = [figures["by_family"][family]["policies"][name]["speedup"] for family in families]
            width = 2.2 if name in (OURS, "sage") else 1.0
            axes.plot(families, values, marker="o", markersize=4, linewidth=width, color=style.colour(name), label=name)
        axes.axhline(1.0, color=style.INK, linewidth=1.0, linestyle=(0, (4, 3)))
        axes.set_title(title_of(target), fontsize=10.5, loc="left")
        style.quiet(axes)
    panels[0].set_ylabel("speedup")
    made.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=5, handlelength=1.4)
    return made


def draw_time(found: Found) -> Figure | None:
    """Milliseconds per token by stage, a bar per policy as tuned (SAGE's Table 6)."""
    tables = of_targets(found, "policies")
    if not tables:
        return None
    names = [AUTOREGRESSIVE, *DRAFTING]
    made = style.figure(
        1.9 + 0.3 * len(names), "Where the time goes", "milliseconds per generated token, after the target's prefill"
    )
    panels = made.subplots(1, len(tables), sharey=True, squeeze=False)[0]
    for axes, (target, figures) in zip(panels, tables.items(), strict=True):
        for place, name in enumerate(names):
            _stages(axes, place, figures["policies"].get(name))
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


def draw_epochs(found: Found) -> Figure | None:
    """Tokens per target pass by epoch, a line per run."""
    if "epochs" not in found:
        return None
    made = style.figure(
        3.3, "More epochs of online distillation", "tokens per target pass of the static tree on held-out prompts"
    )
    axes = made.subplots()
    for shade, (name, run) in zip(RUN_COLOURS, found["epochs"]["runs"].items(), strict=False):
        policy = CURVE if CURVE in run["points"][0]["policies"] else next(iter(run["points"][0]["policies"]))
        values = [point["policies"][policy]["tokens_per_target_pass"] for point in run["points"]]
        epochs = [point["epoch"] for point in run["points"]]
        axes.plot(epochs, values, color=shade, linewidth=1.8, marker="o", markersize=5, label=name)
        axes.text(epochs[-1], values[-1], f"  {values[-1]:.2f}", va="center", fontsize=9, color=shade)
    axes.set_xlabel("epoch")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend(loc="best", handlelength=1.4)
    style.quiet(axes)
    return made


def draw_compressors(found: Found) -> Figure | None:
    """Tokens per pass and speedup by compressor, a dot per policy."""
    if "compressor" not in found:
        return None
    rows = found["compressor"]["rows"]
    labels = list(dict.fromkeys(label_of(row) for row in rows))
    policies = list(dict.fromkeys(row["policy"] for row in rows))
    made = style.figure(1.7 + 0.3 * len(labels), "What the draft reads of a picture", "one head per compressor, trained alike")
    panels = made.subplots(1, 2, sharey=True)
    for axes, (key, title) in zip(
        panels, (("tokens_per_target_pass", "tokens per target pass"), ("speedup", "speedup")), strict=True
    ):
        for policy in policies:
            own = [row for row in rows if row["policy"] == policy]
            places = [labels.index(label_of(row)) for row in own]
            axes.scatter([row[key] for row in own], places, s=34, color=style.colour(policy), label=policy, zorder=2)
        axes.set_xlabel(title)
        style.quiet(axes, "x")
    context = {label_of(row): row["draft_context"] for row in rows}
    panels[0].set_yticks(range(len(labels)), [f"{label} ({context[label]:.0f} rows)" for label in labels])
    panels[0].set_ylim(len(labels) - 0.5, -0.5)
    made.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, handletextpad=0.2)
    return made


def draw_pruning(found: Found) -> Figure | None:
    """Accepted tokens and speedup by pruning ratio, a line per kind of draft."""
    if "pruning" not in found:
        return None
    rows = found["pruning"]["rows"]
    made = style.figure(3.3, "Visual tokens pruned while decoding", "for the draft only; the target reads them all")
    panels = made.subplots(1, 2)
    for axes, (key, title) in zip(
        panels, (("mean_accepted_draft", "drafted tokens accepted"), ("speedup", "speedup")), strict=True
    ):
        for shade, draft in zip(RUN_COLOURS, dict.fromkeys(row["draft"] for row in rows), strict=False):
            own = [row for row in rows if row["draft"] == draft]
            axes.plot(
                [row["ratio"] for row in own], [row[key] for row in own], color=shade, marker="o", markersize=4.5, label=draft
            )
        axes.set_title(title, fontsize=10, loc="left")
        axes.set_xlabel("share of visual tokens left out")
        axes.set_ylim(bottom=0)
        style.quiet(axes)
    panels[0].legend(loc="lower left", handlelength=1.4)
    return made
