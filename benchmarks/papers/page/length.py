"""Section: length of the answer."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from matplotlib.figure import Figure

from benchmarks.papers.figures import Json
from benchmarks.papers.measure.policies import PUBLISHED
from benchmarks.papers.page.markdown import Expectation, Figures, by_policy, title_of
from benchmarks.papers.page.plots import column_panels, legend_below, policy_line
from sage.io.tables import markdown_table
from train.report import style

STATIC, SAGE = PUBLISHED.format("static"), PUBLISHED.format("sage")


def values(figures: Figures) -> dict[str, Any]:
    """Returns the placeholders of length.md."""
    study = figures["length"]
    forced, segments = study["forced"], study["segments"]
    head, cells = by_policy([row["policies"] for row in forced])
    forced_rows = [[str(row["length"]), *part, f"{_gain(row):+.1%}"] for row, part in zip(forced, cells, strict=True)]
    segment_rows = [
        [f"{row['from']} to {row['to']}", str(row["rounds"]), *(f"{tokens:.2f}" for tokens in row["policies"].values())]
        for row in segments
    ]
    return {
        "target": title_of(study["target"]),
        "prompts": forced[0]["prompts"],
        "forced": markdown_table(["length", *head, "accepted, `sage` over `static`"], forced_rows),
        "segments": markdown_table(["position", "rounds", *(f"`{name}`" for name in segments[0]["policies"])], segment_rows),
    }


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


def draw_length(figures: Figures) -> Figure:
    """Draws accepted tokens by forced length, and tokens per pass along free-running answers."""
    rows, segments = figures["length"]["forced"], figures["length"]["segments"]
    subtitle = "left: answers of forced length; right: by position in free-running answers"
    figure = style.figure(3.4, "Length of the answer", subtitle)
    forced, along = column_panels(figure, ("accepted tokens per round", "tokens per target pass"))
    lengths, starts = [row["length"] for row in rows], [f"{row['from']}+" for row in segments]
    for name in rows[0]["policies"]:
        policy_line(forced, lengths, [row["policies"][name]["mean_accepted_draft"] for row in rows], name)
    for name in segments[0]["policies"]:
        policy_line(along, starts, [row["policies"][name] for row in segments], name)
    forced.set_xscale("log", base=2)
    forced.set_xticks(lengths, [str(length) for length in lengths])
    forced.minorticks_off()
    forced.set(xlabel="length of the answer in tokens", ylim=(0, None))
    along.set(xlabel="position of the round in tokens", ylim=(0, None))
    legend_below(figure, forced, 3)
    return figure


PLOTS = {"length.png": draw_length}
