"""Section: compressors of the draft's visual input."""

from __future__ import annotations

from typing import Any

from matplotlib.figure import Figure

from benchmarks.papers.figures import Json
from benchmarks.papers.page.markdown import Expectation, Figures, cells, grouped, times, title_of
from benchmarks.papers.page.plots import bar_labels, legend_below
from sage.io.tables import markdown_table
from train.report import style

RETAINED = 0.98  # share of the reference that counts as retained
VISUAL_COLUMNS = ("draft context", "tokens/pass", "accepted", "speedup", "95%", "draft prefill", "identical")


def values(figures: Figures) -> dict[str, Any]:
    """Returns the placeholders of compressor.md."""
    study = figures["compressor"]
    rows = [[f"`{label_of(row)}`", f"`{row['policy']}`", *cells(row, *VISUAL_COLUMNS)] for row in study["rows"]]
    return {
        "target": title_of(study["target"]),
        "prompts": study["prompts"],
        "prompt_tokens": f"{study['rows'][0]['prompt_tokens']:.0f}",
        "table": markdown_table(["compressor", "policy", *VISUAL_COLUMNS], rows, "<<>"),
        "command": study["rows"][0]["command"],
    }


def label_of(row: Json) -> str:
    """Returns the compressor options of a row, like `conv ratio=20`."""
    return " ".join(word.rpartition("compressor=")[2].rpartition("compressor.")[2] for word in row["choice"])


def expectations(figures: Figures) -> list[Expectation]:
    """SpecVLM: a compressed head is faster than an uncompressed one, per policy."""
    by_policy = grouped(figures["compressor"]["rows"], "policy")
    return [_faster(policy, *group) for policy, group in by_policy.items() if len(group) > 1]


def _faster(policy: str, reference: Json, *others: Json) -> Expectation:
    best = max(others, key=lambda row: float(row["speedup"]))
    least = RETAINED * reference["tokens_per_target_pass"]
    num_retained = sum(row["tokens_per_target_pass"] >= least for row in others)
    evidence = (
        f"fastest is `{label_of(best)}`, {times(best['speedup'])} at {best['tokens_per_target_pass']:.2f} tokens per pass; "
        f"uncompressed {times(reference['speedup'])} at {reference['tokens_per_target_pass']:.2f}; {num_retained} of "
        f"{len(others)} retain {RETAINED:.0%} of the tokens per pass"
    )
    if best["speedup"] <= reference["speedup"]:
        evidence += f"; draft prefill only {reference['draft_prefill_ms'] - best['draft_prefill_ms']:.1f} ms shorter"
    claim = f"SpecVLM: a compressed head is faster than an uncompressed one, `{policy}`"
    return Expectation(claim, best["speedup"] > reference["speedup"], evidence)


def draw_compressors(figures: Figures) -> Figure:
    """Draws tokens per target pass and speedup by compressor, a dot per policy."""
    rows = figures["compressor"]["rows"]
    context = {label_of(row): row["draft_context"] for row in rows}
    labels = list(context)
    subtitle = "one head per compressor, equal training"
    figure = style.figure(1.7 + 0.3 * len(labels), "Compressors of the draft's visual input", subtitle)
    panels = figure.subplots(1, 2, sharey=True)
    columns = {"tokens_per_target_pass": "tokens per target pass", "speedup": "speedup"}
    for axes, (key, label) in zip(panels, columns.items(), strict=True):
        for policy, selected in grouped(rows, "policy").items():
            places = [labels.index(label_of(row)) for row in selected]
            axes.scatter([row[key] for row in selected], places, s=34, color=style.policy_color(policy), label=policy, zorder=2)
        axes.set_xlabel(label)
        style.despine(axes, "x")
    bar_labels(panels[0], [f"{label} ({context[label]:.0f} tokens)" for label in labels])
    legend_below(figure, panels[0], 4)
    return figure


PLOTS = {"compressor.png": draw_compressors}
