"""Section: coupled drafts."""

from __future__ import annotations

from typing import Any

from matplotlib.figure import Figure

from benchmarks.papers.figures import Json
from benchmarks.papers.measure.coupling import POLICIES, UNCOUPLED
from benchmarks.papers.page.markdown import Expectation, Figures, by_target, times, title_of
from benchmarks.papers.page.plots import COLORS, line, target_panels
from sage.io.tables import markdown_table
from train.report import style

LEAST_GAIN = 1.2
HEAD = ("target", "T", "top-p", "policy", "tokens/pass", "coupled", "ratio", "tokens/s", "coupled", "ratio", "identical")


def values(figures: Figures) -> dict[str, Any]:
    """Returns the placeholders of coupling.md."""
    studies = by_target(figures, "coupling")
    first = next(iter(studies.values()))["rows"][0]
    lines = [
        [title_of(target), f"{row['temperature']:g}", f"{row['top_p']:g}", f"`{policy}`", *_cells(row, policy)]
        for target, study in studies.items()
        for row in study["rows"]
        for policy in POLICIES
    ]
    return {
        "prompts": first["prompts"],
        "seeds": f"{first['seeds']} seed{'s' if first['seeds'] > 1 else ''}",
        "table": markdown_table(HEAD, lines),
    }


def _cells(row: Json, policy: str) -> list[str]:
    coupled, alone = row["policies"][policy], row["policies"][UNCOUPLED.format(policy)]
    cells = []
    for key, form in (("tokens_per_target_pass", "{:.2f}"), ("tokens_per_s", "{:.0f}")):
        cells += [form.format(alone[key]), form.format(coupled[key]), times(coupled[key] / alone[key])]
    return [*cells, f"{coupled['match'] + alone['match']}/{coupled['total'] + alone['total']}"]


def expectations(figures: Figures) -> list[Expectation]:
    """Ours: the gain of coupling at temperature 1, the fastest policy there, and equal texts."""
    studies = by_target(figures, "coupling")
    found = [_gain(policy, studies) for policy in ("chain", "sage")]
    found += [_fastest(title_of(target), study["rows"]) for target, study in studies.items()]
    parts = [part for study in studies.values() for row in study["rows"] for part in row["policies"].values()]
    same, total = sum(part["match"] for part in parts), sum(part["total"] for part in parts)
    claim = "Ours: coupled or not, every text equals the autoregressive one of its seed"
    return [*found, Expectation(claim, same == total, f"{same} of {total} texts")]


def _gain(policy: str, studies: dict[str, Json]) -> Expectation:
    gains = {
        title_of(target): _at_one(study["rows"], policy) / _at_one(study["rows"], UNCOUPLED.format(policy))
        for target, study in studies.items()
    }
    evidence = ", ".join(f"{times(gain)} on {title}" for title, gain in gains.items())
    claim = f"Ours: at T 1, `{policy}` has at least {times(LEAST_GAIN)} the tokens per pass when coupled"
    return Expectation(claim, min(gains.values()) >= LEAST_GAIN, evidence)


def _plain(rows: list[Json]) -> Json:
    """Returns the row at temperature 1 without truncation, or the last one."""
    return next((row for row in rows if (row["temperature"], row["top_p"]) == (1, 1)), rows[-1])


def _at_one(rows: list[Json], policy: str) -> float:
    return float(_plain(rows)["policies"][policy]["tokens_per_target_pass"])


def _fastest(title: str, rows: list[Json]) -> Expectation:
    speeds = {policy: _plain(rows)["policies"][policy]["tokens_per_s"] for policy in POLICIES}
    evidence = ", ".join(f"`{policy}` {speed:.0f} tokens/s" for policy, speed in speeds.items())
    claim = f"Ours: coupled at T 1, `cost_aware` is faster than the other policies, {title}"
    return Expectation(claim, max(speeds, key=speeds.__getitem__) == "cost_aware", evidence)


def draw_coupling(figures: Figures) -> Figure:
    """Draws tokens per target pass by temperature, coupled and not (dotted); a panel per target."""
    studies = by_target(figures, "coupling")
    figure = style.figure(3.3, "Coupled drafts", "tokens per target pass; dotted: without the noise of the draws")
    panels, first = target_panels(figure, studies)
    for target, axes in panels.items():
        rows = [row for row in studies[target]["rows"] if row["top_p"] == 1] or studies[target]["rows"]
        temperatures = [row["temperature"] for row in rows]
        for color, policy in zip(COLORS, POLICIES, strict=False):
            coupled, alone = (
                [row["policies"][label]["tokens_per_target_pass"] for row in rows]
                for label in (policy, UNCOUPLED.format(policy))
            )
            line(axes, temperatures, coupled, color, policy)
            axes.plot(temperatures, alone, ":", color=color, linewidth=1)
        axes.set_xlabel("temperature")
    first.set_ylim(bottom=0)
    first.legend(loc="lower left", handlelength=1.4)
    return figure


PLOTS = {"coupling.png": draw_coupling}
