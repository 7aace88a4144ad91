"""Acceptance of EAGLE-3 after equal training time on long sequences, with every position and with anchors
(`objective.anchors`)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from benchmarks.papers import runs
from benchmarks.papers.figures import Json
from benchmarks.papers.lab import Lab, matching_texts, time_runs, tokens_over
from benchmarks.papers.markdown import times_with_interval
from benchmarks.papers.study import Expectation, Study


def _measure(lab: Lab) -> None:
    """Measures `anchors`: chains of the drafts of its runs, the first of which is trained at every position."""
    sizes = lab.sizes["anchors"]
    lab.figures("anchors", "anchors", lambda: _compare(lab), sizes["runs"], anchors=sizes)


def _compare(lab: Lab) -> Json:
    sizes = lab.sizes["anchors"]
    names, depths = sizes["runs"], sizes["depths"]
    target = lab.settings.training.runs[names[0]].target
    runners = [lab.runner(target, f"{name} {depth}", "chain", {"depth": depth}, name) for name in names for depth in depths]
    measured = time_runs(lab, target, runners, lab.test_prompts(target, "anchors"), 1)
    found = {
        name: {
            **runs.training_of(lab.settings, name),
            "chain": {str(depth): tokens_over(measured, f"{name} {depth}", f"{names[0]} {depth}") for depth in depths},
        }
        for name in names
    }
    return {"target": target, **matching_texts(measured, [one.name for one in runners]), "runs": found}


def _values(found: Json) -> Mapping[str, Any]:
    names = list(found["runs"])
    return {"reference": names[0], "commands": [run["command"] for run in found["runs"].values()]}


def _expectations(found: Json) -> Iterator[Expectation]:
    reference, *others = found["runs"]
    for name in others:
        for depth, one in found["runs"][name]["chain"].items():
            ratio = times_with_interval(one["over"]["ratio"], one["over"].get("ci"))
            claim = f"`{name}` accepts no fewer tokens than `{reference}` after equal time, chain of {depth}"
            tokens = f"{one['tokens']:.2f} and {found['runs'][reference]['chain'][depth]['tokens']:.2f} tokens per pass"
            yield Expectation(claim, one["over"]["ratio"] >= 1, f"{tokens}, {ratio}")


STUDY = Study(name="anchors", measure=_measure, expectations=_expectations, values=_values)
