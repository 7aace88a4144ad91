"""Section: pruning while decoding."""

from __future__ import annotations

from typing import Any

from matplotlib.figure import Figure

from benchmarks.papers.figures import Json
from benchmarks.papers.page.compressor import RETAINED, VISUAL_COLUMNS
from benchmarks.papers.page.markdown import Expectation, Figures, cells, grouped, listing, times, title_of
from benchmarks.papers.page.plots import COLORS, column_panels, line
from sage.io.tables import markdown_table
from train.report import style

PAPER_RATIO = 0.9


def values(figures: Figures) -> dict[str, Any]:
    """Returns the placeholders of pruning.md."""
    study = figures["pruning"]
    rows = [[row["draft"], f"{row['ratio']:g}", *cells(row, *VISUAL_COLUMNS)] for row in study["rows"]]
    return {
        "target": title_of(study["target"]),
        "policy": study["policy"],
        "prompts": study["prompts"],
        "table": markdown_table(["draft", "ratio", *VISUAL_COLUMNS], rows),
    }


def expectations(figures: Figures) -> list[Expectation]:
    """SAGE, Table 5: pruning 90% of the visual tokens does not lower acceptance, per kind of draft."""
    return [_retained(draft, rows) for draft, rows in grouped(figures["pruning"]["rows"], "draft").items()]


def _retained(draft: str, rows: list[Json]) -> Expectation:
    reference = rows[0]
    pruned = max((row for row in rows if row["ratio"] <= PAPER_RATIO), key=lambda row: float(row["ratio"]))
    share = pruned["mean_accepted_draft"] / max(reference["mean_accepted_draft"], 1e-9)
    least = RETAINED * reference["mean_accepted_draft"]
    ratios = [f"{row['ratio']:g}" for row in rows[1:] if row["mean_accepted_draft"] >= least]
    retained = f"{RETAINED:.0%} retained at ratio {listing(ratios)}" if ratios else f"no ratio retains {RETAINED:.0%}"
    evidence = (
        f"at ratio {pruned['ratio']:g}, {share:.0%} of the accepted tokens and {times(pruned['speedup'])} instead of "
        f"{times(reference['speedup'])}; {retained}"
    )
    if share < RETAINED and draft == "head":
        evidence += "; the head was trained on all visual tokens"
    claim = f"SAGE: pruning {PAPER_RATIO:.0%} of the visual tokens does not lower acceptance, {draft}"
    return Expectation(claim, share >= RETAINED, evidence)


def draw_pruning(figures: Figures) -> Figure:
    """Draws accepted tokens and speedup by pruning ratio, a line per kind of draft."""
    figure = style.figure(3.3, "Pruning while decoding", "visual tokens are pruned for the draft only")
    columns = {"mean_accepted_draft": "accepted tokens per round", "speedup": "speedup"}
    panels = column_panels(figure, list(columns.values()))
    for axes, key in zip(panels, columns, strict=True):
        for color, (draft, selected) in zip(COLORS, grouped(figures["pruning"]["rows"], "draft").items(), strict=False):
            line(axes, [row["ratio"] for row in selected], [row[key] for row in selected], color, draft)
        axes.set_xlabel("share of visual tokens pruned")
        axes.set_ylim(bottom=0)
    panels[0].legend(loc="lower left", handlelength=1.4)
    return figure


PLOTS = {"pruning.png": draw_pruning}
