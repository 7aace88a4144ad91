"""Plots of the sections on training epochs, compressors and pruning."""

from __future__ import annotations

from matplotlib.figure import Figure

from benchmarks.papers.page.compressor import label_of
from benchmarks.papers.page.epochs import curve
from benchmarks.papers.page.markdown import Figures
from benchmarks.papers.page.plots.panels import COLORS, bar_labels, column_panels, integer_axis, legend_below, line
from train.report import style


def draw_epochs(figures: Figures) -> Figure:
    """Draws tokens per target pass by epoch, a line per run."""
    subtitle = "tokens per target pass of the static tree on held-out prompts"
    figure = style.figure(3.3, "Acceptance by training epoch", subtitle)
    axes = figure.subplots()
    for color, (name, run) in zip(COLORS, figures["epochs"]["runs"].items(), strict=False):
        epochs, (_, tokens) = [point["epoch"] for point in run["points"]], curve(run)
        line(axes, epochs, tokens, color, name)
        axes.text(epochs[-1], tokens[-1], f"  {tokens[-1]:.2f}", va="center", fontsize=9, color=color)
    integer_axis(axes, "epoch")
    axes.legend(loc="best", handlelength=1.4)
    style.despine(axes)
    return figure


def draw_compressors(figures: Figures) -> Figure:
    """Draws tokens per target pass and speedup by compressor, a dot per policy."""
    rows = figures["compressor"]["rows"]
    context = {label_of(row): row["draft_context"] for row in rows}
    labels, policies = list(context), dict.fromkeys(row["policy"] for row in rows)
    subtitle = "one head per compressor, equal training"
    figure = style.figure(1.7 + 0.3 * len(labels), "Compressors of the draft's visual input", subtitle)
    panels = figure.subplots(1, 2, sharey=True)
    columns = {"tokens_per_target_pass": "tokens per target pass", "speedup": "speedup"}
    for axes, (key, label) in zip(panels, columns.items(), strict=True):
        for policy in policies:
            selected = [row for row in rows if row["policy"] == policy]
            places = [labels.index(label_of(row)) for row in selected]
            axes.scatter([row[key] for row in selected], places, s=34, color=style.policy_color(policy), label=policy, zorder=2)
        axes.set_xlabel(label)
        style.despine(axes, "x")
    bar_labels(panels[0], [f"{label} ({context[label]:.0f} tokens)" for label in labels])
    legend_below(figure, panels[0], 4)
    return figure


def draw_pruning(figures: Figures) -> Figure:
    """Draws accepted tokens and speedup by pruning ratio, a line per kind of draft."""
    rows = figures["pruning"]["rows"]
    figure = style.figure(3.3, "Pruning while decoding", "visual tokens are pruned for the draft only")
    columns = {"mean_accepted_draft": "accepted tokens per round", "speedup": "speedup"}
    panels = column_panels(figure, list(columns.values()))
    for axes, key in zip(panels, columns, strict=True):
        for color, draft in zip(COLORS, dict.fromkeys(row["draft"] for row in rows), strict=False):
            selected = [row for row in rows if row["draft"] == draft]
            line(axes, [row["ratio"] for row in selected], [row[key] for row in selected], color, draft)
        axes.set_xlabel("share of visual tokens pruned")
        axes.set_ylim(bottom=0)
    panels[0].legend(loc="lower left", handlelength=1.4)
    return figure
