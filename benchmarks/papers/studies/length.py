"""Acceptance by length of the answer. Ref: SAGE, arXiv 2602.00523, Figure 3."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from matplotlib.figure import Figure

import sage
from benchmarks.papers.figures import Json
from benchmarks.papers.lab import Lab, compare_row, select
from benchmarks.papers.plots import plot_curves, policy_curve, policy_curves
from benchmarks.papers.study import PUBLISHED, Expectation, Study
from sage.replay.replay import replay

STATIC, SAGE = PUBLISHED.format("static"), PUBLISHED.format("sage")
POLICIES = {STATIC: "static", SAGE: "sage", "cost_aware": "cost_aware"}  # with default options


def _measure(lab: Lab) -> None:
    """Measures `length` for the first target: answers of forced length, and segments of free-running answers."""
    target, sizes = lab.targets[0], lab.sizes["length"]

    def forced(length: int) -> Json:  # the EOS token is masked before `length` tokens, for every variant
        runners, prompts = [lab.runner(target, *labels) for labels in POLICIES.items()], lab.test_prompts(target, "length")
        limits = {"max_new_tokens": length, "min_new_tokens": length}
        compared = compare_row(lab, target, runners, prompts, sizes["repeats"], **limits)
        return {"length": length, **select(compared, ("prompts", "policies"))}

    def compute() -> Json:
        return {"target": target, "forced": [forced(length) for length in sizes["lengths"]], "segments": _segments(lab, target)}

    lab.figures("length", "length", compute, lab.main_runs(target), study=sizes)


def _segments(lab: Lab, target: str) -> list[Json]:
    """Returns tokens per target pass of the rounds that start in each segment of an answer, replayed on the same drafts."""
    sizes, limit = lab.sizes["length"], lab.settings.max_new_tokens
    recordings = lab.recordings(target, lab.prompts(target, "test", sizes["families"], 4 * sizes["prompts"]))
    starts = [one.position for recording in recordings for one in recording.rounds]
    replayed = {label: replay(recordings, sage.policy(name), lab.costs(target)).rounds for label, name in POLICIES.items()}
    rows = []
    for low, high in pairwise([*sizes["edges"], limit]):
        inside = [place for place, position in enumerate(starts) if low <= position < high]
        policies = {label: sum(rounds[i].emitted for i in inside) / max(len(inside), 1) for label, rounds in replayed.items()}
        rows.append({"from": low, "to": high, "rounds": len(inside), "policies": policies})
    return rows


def _gain(row: Json) -> float:
    """Returns the relative gain in accepted drafted tokens, the measure of the paper."""
    accepted, base = (row["policies"][name]["mean_accepted_draft"] for name in (SAGE, STATIC))
    return float(accepted / max(base, 1e-9) - 1)


def _expectations(found: Json) -> Iterator[Expectation]:
    gains = {row["length"]: _gain(row) for row in found["forced"]}
    grows = all(after > before for before, after in pairwise(gains.values()))
    evidence = "accepted tokens " + ", ".join(f"{gain:+.0%} at {tokens}" for tokens, gain in gains.items())
    yield Expectation("SAGE: the gain over the static tree grows with the length of the answer", grows, evidence)


def _draw(found: Json) -> Figure:
    rows, segments = found["forced"], found["segments"]
    starts = [f"{row['from']}+" for row in segments]
    panels = {
        "accepted tokens per round": policy_curves(rows, "length", "mean_accepted_draft"),
        "tokens per target pass": [
            policy_curve(name, starts, [row["policies"][name] for row in segments]) for name in segments[0]["policies"]
        ],
    }
    subtitle = "left: answers of forced length; right: by position in free-running answers"
    figure = plot_curves("Length of the answer", subtitle, panels, height=3.4, share_y=False, legend=3)
    forced, along = figure.axes
    lengths = [row["length"] for row in rows]
    forced.set_xscale("log", base=2)
    forced.set_xticks(lengths, [str(length) for length in lengths])
    forced.minorticks_off()
    forced.set_xlabel("length of the answer in tokens")
    along.set_xlabel("position of the round in tokens")
    return figure


STUDY = Study(
    name="length",
    measure=_measure,
    expectations=_expectations,
    values=lambda found: {"forced": [{**row, "gain": _gain(row)} for row in found["forced"]]},
    plots={"length.png": _draw},
)
