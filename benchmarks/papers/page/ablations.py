"""Section: ablations."""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks.papers.figures import Json
from benchmarks.papers.measure.ablations import ASSUMED_COSTS, ASSUMED_LEVEL
from benchmarks.papers.page.expectations import Expectation
from benchmarks.papers.page.headline import OURS
from benchmarks.papers.page.markdown import Figures, interval, options_text, times, title_of
from sage.bench.tables import markdown_table

COLUMNS = ["variant", "tokens/pass", "nodes", "speedup", "95%", "replayed tokens/pass", "replayed tokens/s", "identical"]
NOISE = 1.001  # of replayed speeds
ORACLE_SHARE = 0.75


def values(figures: Figures) -> dict[str, str]:
    """Returns the placeholders of ablations.md."""
    study = figures["ablations"]
    best = study["oracle"]
    replayed = [f"{best['tokens_per_target_pass']:.2f}", f"{best['tokens_per_s']:.0f}"]
    oracle = ["oracle, replayed", "", f"{best['nodes_per_round']:.1f}", "", "", *replayed, ""]
    return {
        "target": title_of(study["target"]),
        "prompts": str(study["prompts"]),
        "options": options_text(study["options"]) or "defaults",
        "table": markdown_table(COLUMNS, [*map(_row, study["rows"]), oracle]),
        "assumed_costs": ASSUMED_COSTS,
        "assumed_level": f"{ASSUMED_LEVEL:.0%}",
    }


def _row(row: Json) -> list[str]:
    replayed = row["replayed"]
    return [
        row["label"],
        f"{row['tokens_per_target_pass']:.2f}",
        f"{row['nodes_per_round']:.1f}",
        times(row["speedup"]),
        interval(row.get("speedup_ci")),
        f"{replayed['tokens_per_target_pass']:.2f}",
        f"{replayed['tokens_per_s']:.0f}",
        f"{row['match']}/{row['total']}",
    ]


def expectations(figures: Figures) -> list[Expectation]:
    """Every part of `cost_aware` and of `sage` contributes; `cost_aware` is close to the oracle."""
    rows = {row["label"]: row for row in figures["ablations"]["rows"]}
    parts = [_contributes(rows, name, label) for name in (OURS, "sage") for label in rows if label.startswith(f"{name}, ")]
    share = rows[OURS]["replayed"]["tokens_per_s"] / figures["ablations"]["oracle"]["tokens_per_s"]
    claim = f"Ours: `{OURS}` within {1 - ORACLE_SHARE:.0%} of the oracle's speed, replayed"
    return [*parts, Expectation(claim, share >= ORACLE_SHARE, f"{share:.0%} of it")]


def _contributes(rows: Mapping[str, Json], name: str, label: str) -> Expectation:
    """The replay decides, because replays share every draft; the timed difference is reported with it."""
    full, variant = (rows[one]["replayed"]["tokens_per_s"] for one in (name, label))
    timed = rows[label]["speedup"] / rows[name]["speedup"] - 1
    claim = f"{'Ours' if name == OURS else 'SAGE'}: `{name}` at least as fast as with *{label.removeprefix(f'{name}, ')}*"
    return Expectation(claim, variant <= full * NOISE, f"variant {variant / full - 1:+.1%} replayed, {timed:+.1%} timed")
