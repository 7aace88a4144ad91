"""Section: temperature."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from benchmarks.papers.figures import Json
from benchmarks.papers.page.expectations import Expectation
from benchmarks.papers.page.markdown import Figures, times, title_of
from sage.bench.tables import markdown_table


def values(figures: Figures) -> dict[str, str]:
    """Returns the placeholders of temperature.md."""
    rows = figures["temperature"]["rows"]
    names = list(rows[0]["policies"])
    columns = [f"`{name}` {what}" for what in ("tokens/pass", "speedup") for name in names]
    table = markdown_table(["target", "T", *columns, "identical by seed"], [_row(row, names) for row in rows])
    return {"prompts": str(rows[0]["prompts"]), "table": table}


def _row(row: Json, names: Sequence[str]) -> list[str]:
    parts = [row["policies"][name] for name in names]
    tokens = [f"{part['tokens_per_target_pass']:.2f}" for part in parts]
    same, total = _identical([row])
    speedups = [times(part["speedup"]) for part in parts]
    return [title_of(row["target"]), f"{row['temperature']:g}", *tokens, *speedups, f"{same}/{total}"]


def _identical(rows: Sequence[Json]) -> tuple[int, int]:
    parts = [part for row in rows for part in row["policies"].values()]
    return sum(part["match"] for part in parts), sum(part["total"] for part in parts)


def expectations(figures: Figures) -> list[Expectation]:
    """Texts depend on the seed only; acceptance decreases with the temperature."""
    rows = figures["temperature"]["rows"]
    same, total = _identical(rows)
    claim = "Ours: one seed gives one text, under every policy and at every temperature"
    targets = dict.fromkeys(row["target"] for row in rows)
    by_target = {target: [row for row in rows if row["target"] == target] for target in targets}
    return [
        Expectation(claim, same == total, f"{same} of {total} texts"),
        *(_decreases(title_of(target), group) for target, group in by_target.items()),
    ]


def _decreases(title: str, rows: Sequence[Json]) -> Expectation:
    curve = {row["temperature"]: row["policies"]["chain"]["tokens_per_target_pass"] for row in rows}
    evidence = "tokens per pass of `chain`: " + ", ".join(f"{value:.2f} at T {degree:g}" for degree, value in curve.items())
    decreases = all(after <= before for before, after in pairwise(curve.values()))
    return Expectation(f"SpecVLM: acceptance decreases with the temperature, {title}", decreases, evidence)
