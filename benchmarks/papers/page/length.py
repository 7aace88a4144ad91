"""Section: length of the answer."""

from __future__ import annotations

from itertools import pairwise

from benchmarks.papers.figures import Json
from benchmarks.papers.measure.policies import PUBLISHED
from benchmarks.papers.page.expectations import Expectation
from benchmarks.papers.page.markdown import Figures, times, title_of
from sage.bench.tables import markdown_table

STATIC, SAGE = PUBLISHED.format("static"), PUBLISHED.format("sage")


def values(figures: Figures) -> dict[str, str]:
    """Returns the placeholders of length.md."""
    study = figures["length"]
    forced, segments = study["forced"], study["segments"]
    names, labels = list(forced[0]["policies"]), list(segments[0]["policies"])
    columns = [f"`{name}` {what}" for what in ("tokens/pass", "speedup") for name in names]
    forced_rows = [_forced_row(row, names) for row in forced]
    segment_rows = [
        [f"{row['from']} to {row['to']}", str(row["rounds"]), *(f"{row['policies'][name]:.2f}" for name in labels)]
        for row in segments
    ]
    return {
        "target": title_of(study["target"]),
        "prompts": str(forced[0]["prompts"]),
        "forced": markdown_table(["length", *columns, "accepted, `sage` over `static`"], forced_rows),
        "segments": markdown_table(["position", "rounds", *(f"`{name}`" for name in labels)], segment_rows),
    }


def _forced_row(row: Json, names: list[str]) -> list[str]:
    parts = [row["policies"][name] for name in names]
    tokens = [f"{part['tokens_per_target_pass']:.2f}" for part in parts]
    return [str(row["length"]), *tokens, *(times(part["speedup"]) for part in parts), f"{_gain(row):+.1%}"]


def _gain(row: Json) -> float:
    """Returns the relative gain in accepted drafted tokens, the measure of the paper."""
    accepted, base = (row["policies"][name]["mean_accepted_draft"] for name in (SAGE, STATIC))
    return float(accepted / max(base, 1e-9) - 1)


def expectations(figures: Figures) -> list[Expectation]:
    """SAGE, Figure 3: the gain over a static tree grows with the length."""
    gains = {row["length"]: _gain(row) for row in figures["length"]["forced"]}
    grows = all(after > before for before, after in pairwise(gains.values()))
    evidence = "accepted tokens " + ", ".join(f"{gain:+.0%} at {tokens}" for tokens, gain in gains.items())
    return [Expectation("SAGE: the gain over the static tree grows with the length of the answer", grows, evidence)]
