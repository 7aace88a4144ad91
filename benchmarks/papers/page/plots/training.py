"""Plots of the sections on training epochs, compressors and pruning."""

from __future__ import annotations

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from benchmarks.papers.page.compressor import label_of
from benchmarks.papers.page.epochs import curve
from benchmarks.papers.page.markdown import Figures
from train.report import style

RUN_COLOURS = ("#2f6fa7", "#b23a6b", "#6f9e74", "#c97b4a")


def draw_epochs(figures: Figures) -> Figure:
    """Draws tokens per target pass by epoch, a line per run."""
    made = style.figure(3.3, "Acceptance by training epoch", "tokens per target pass of the static tree on held-out prompts")
    axes = made.subplots()
    for shade, (name, run) in zip(RUN_COLOURS, figures["epochs"]["runs"].items(), strict=False):
        _, values = curve(run)
        epochs = [point["epoch"] for point in run["points"]]
        axes.plot(epochs, values, color=shade, linewidth=1.8, marker="o", markersize=5, label=name)
        axes.text(epochs[-1], values[-1], f"  {values[-1]:.2f}", va="center", fontsize=9, color=shade)
    axes.set_xlabel("epoch")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend(loc="best", handlelength=1.4)
    style.quiet(axes)
    return made


def draw_compressors(figures: Figures) -> Figure:
    """Draws tokens per target pass and speedup by compressor, a dot per policy."""
    rows = figures["compressor"]["rows"]
    labels = list(dict.fromkeys(label_of(row) for row in rows))
    policies = list(dict.fromkeys(row["policy"] for row in rows))
    made = style.figure(
        1.7 + 0.3 * len(labels), "Compressors of the draft's visual input", "one head per compressor, equal training"
    )
    panels = made.subplots(1, 2, sharey=True)
    columns = {"tokens_per_target_pass": "tokens per target pass", "speedup": "speedup"}
    for axes, (key, label) in zip(panels, columns.items(), strict=True):
        for policy in policies:
            own = [row for row in rows if row["policy"] == policy]
            places = [labels.index(label_of(row)) for row in own]
            axes.scatter([row[key] for row in own], places, s=34, color=style.colour(policy), label=policy, zorder=2)
        axes.set_xlabel(label)
        style.quiet(axes, "x")
    context = {label_of(row): row["draft_context"] for row in rows}
    panels[0].set_yticks(range(len(labels)), [f"{label} ({context[label]:.0f} tokens)" for label in labels])
    panels[0].set_ylim(len(labels) - 0.5, -0.5)
    made.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, handletextpad=0.2)
    return made


def draw_pruning(figures: Figures) -> Figure:
    """Draws accepted tokens and speedup by pruning ratio, a line per kind of draft."""
    rows = figures["pruning"]["rows"]
    made = style.figure(3.3, "Pruning while decoding", "visual tokens are pruned for the draft only")
    panels = made.subplots(1, 2)
    columns = {"mean_accepted_draft": "accepted tokens per round", "speedup": "speedup"}
    for axes, (key, title) in zip(panels, columns.items(), strict=True):
        for shade, draft in zip(RUN_COLOURS, dict.fromkeys(row["draft"] for row in rows), strict=False):
            own = [row for row in rows if row["draft"] == draft]
            ratios, values = [row["ratio"] for row in own], [row[key] for row in own]
            axes.plot(ratios, values, color=shade, marker="o", markersize=4.5, label=draft)
        axes.set_title(title, fontsize=10, loc="left")
        axes.set_xlabel("share of visual tokens pruned")
        axes.set_ylim(bottom=0)
        style.quiet(axes)
    panels[0].legend(loc="lower left", handlelength=1.4)
    return made
