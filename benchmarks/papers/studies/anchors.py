"""Acceptance of EAGLE-3 after equal training time on long sequences, with every position and with anchors
(`objective.anchors`)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from benchmarks.papers import runs
from benchmarks.papers.figures import Json
from benchmarks.papers.lab import Lab, time_runs
from benchmarks.papers.markdown import times_with_interval
from benchmarks.papers.study import Expectation, Study
from sage.bench.runners import AUTOREGRESSIVE
from sage.bench.summary import pooled_counts, tokens_ratio


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

    def chain(name: str, depth: int) -> Json:
        own, base = measured.runs[f"{name} {depth}"], measured.runs[f"{names[0]} {depth}"]
        return {"tokens": pooled_counts(own)["tokens_per_target_pass"], "over": tokens_ratio(own, base)}

    texts, count = measured.runs[AUTOREGRESSIVE], len(measured.prompts)
    same = sum(measured.runs[one.name][i][0].tokens == texts[i][0].tokens for one in runners for i in range(count))
    found = {
        name: {**runs.training_of(lab.settings, name), "chain": {str(depth): chain(name, depth) for depth in depths}}
        for name in names
    }
    return {"target": target, "prompts": count, "match": same, "total": len(runners) * count, "runs": found}


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
