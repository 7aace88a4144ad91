"""Section: pruning while decoding."""

from __future__ import annotations

from benchmarks.papers.figures import Json
from benchmarks.papers.page.compressor import RETAINED, VISUAL_COLUMNS, visual_cells
from benchmarks.papers.page.expectations import Expectation
from benchmarks.papers.page.markdown import Figures, listing, times, title_of
from sage.bench.tables import markdown_table

PAPER_RATIO = 0.9


def values(figures: Figures) -> dict[str, str]:
    """Returns the placeholders of pruning.md."""
    study = figures["pruning"]
    rows = [[row["draft"], f"{row['ratio']:g}", *visual_cells(row)] for row in study["rows"]]
    return {
        "target": title_of(study["target"]),
        "policy": study["policy"],
        "prompts": str(study["prompts"]),
        "table": markdown_table(["draft", "ratio", *VISUAL_COLUMNS], rows),
    }


def expectations(figures: Figures) -> list[Expectation]:
    """SAGE, Table 5: pruning 90% of the visual tokens does not lower acceptance, per kind of draft."""
    rows = figures["pruning"]["rows"]
    drafts = dict.fromkeys(row["draft"] for row in rows)
    return [_retained(draft, [row for row in rows if row["draft"] == draft]) for draft in drafts]


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
