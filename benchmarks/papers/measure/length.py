"""Acceptance by length of the answer. Ref: SAGE, arXiv 2602.00523, Figure 3."""

from __future__ import annotations

from itertools import pairwise

import sage
from benchmarks.papers.figures import Json
from benchmarks.papers.lab import Lab
from benchmarks.papers.measure.comparison import compare
from benchmarks.papers.measure.policies import PUBLISHED
from sage.replay.replay import replay

POLICIES = {**{PUBLISHED.format(name): name for name in ("static", "sage")}, "cost_aware": "cost_aware"}  # with default options


def measure(lab: Lab) -> None:
    """Measures `length` for the first target: answers of forced length, and segments of free-running answers."""
    study, target = lab.settings.length, next(iter(lab.settings.targets))

    def compute() -> Json:
        forced = [_forced(lab, target, length) for length in study.lengths]
        return {"target": target, "forced": forced, "segments": _segments(lab, target)}

    lab.figures("length", "length", compute, [lab.settings.main_runs[target]], study=study)


def _forced(lab: Lab, target: str, length: int) -> Json:
    """The EOS token is masked before `length` tokens, for every variant."""
    study = lab.settings.length
    variants = [lab.variant(target, label, name, {}) for label, name in POLICIES.items()]
    prompts = lab.test_prompts(target, study)
    compared = compare(lab, target, variants, prompts, study.repeats, max_new_tokens=length, min_new_tokens=length)
    return {"length": length, "prompts": len(prompts), "policies": compared["policies"]}


def _segments(lab: Lab, target: str) -> list[Json]:
    """Returns tokens per target pass of the rounds that start in each segment of an answer, replayed on the same drafts."""
    study, limit = lab.settings.length, lab.settings.max_new_tokens
    recordings = lab.recordings(target, lab.prompts(target, "test", study.families, 4 * study.prompts))
    starts = [one.position for recording in recordings for one in recording.rounds]
    replayed = {label: replay(recordings, sage.policy(name), lab.costs(target)).rounds for label, name in POLICIES.items()}
    rows = []
    for low, high in pairwise([*study.edges, limit]):
        inside = [place for place, position in enumerate(starts) if low <= position < high]
        policies = {label: sum(rounds[i].emitted for i in inside) / max(len(inside), 1) for label, rounds in replayed.items()}
        rows.append({"from": low, "to": high, "rounds": len(inside), "policies": policies})
    return rows
