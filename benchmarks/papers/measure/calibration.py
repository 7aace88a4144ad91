"""Does the draft's entropy predict acceptance? Reliability of alpha, of the draft's probability and of the calibrated estimate;
calibration error by depth after learning; the counterexample to SAGE's Lemma 4.3 on real rounds (arXiv 2602.00523).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import sage
from benchmarks.papers.figures import Json
from benchmarks.papers.lab import Lab
from sage.bench import BenchPrompt
from sage.costs.calibration import Reliability
from sage.replay.recording import Path, Recording
from sage.trees.cost_aware.policy import CostAware
from sage.trees.sage import confidence_of

SURE = 0.56  # SAGE's Theorem 4.4: above this alpha a token is accepted for sure
DECIMALS = 3
SHOWN = 4  # probabilities of an example


@dataclass
class Said:
    """One node on the way of the answer: what the draft said, and whether its best token was the target's."""

    prompt: str
    depth: int
    probs: list[float]
    is_accepted: bool


def nodes_on_path(recording: Recording, prompt: str, candidates: int) -> Iterator[Said]:
    """The recorded nodes that the answer passes through, round by round; every token of the answer is asked for once."""
    for recorded in recording.rounds:
        answer: Path = tuple(recording.tokens[recorded.position :])
        for depth, token in enumerate(answer):
            known = recorded.said.get(answer[:depth])
            if known is None:
                break
            best = known[1].tolist()
            yield Said(prompt, depth + 1, known[0][:candidates].tolist(), token == best[0])
            if token not in best:
                break


def measure_confidence(lab: Lab) -> None:
    """`calibration_TARGET` for every target."""
    for target in lab.settings.targets:
        study = lab.settings.calibration
        inputs = lab.origin(lab.settings.main[target]) | lab.study(study) | {"candidates": lab.settings.entropy.candidates}
        lab.make("calibration", f"calibration_{target}", inputs, partial(_measure, lab, target))


def _measure(lab: Lab, target: str) -> Json:
    study, candidates = lab.settings.calibration, lab.settings.entropy.candidates
    tested = lab.tested(target, study)
    policy = sage.policy("cost_aware")
    assert isinstance(policy, CostAware)
    learned_on = _learn(lab, target, policy, study.rounds)
    frozen = policy.calibrator.state()
    by_depth = _errors(lab, target, policy, tested)
    policy.calibrator.load_state(frozen)
    recordings = lab.recordings(target, tested)
    nodes = [one for prompt, own in zip(tested, recordings, strict=True) for one in nodes_on_path(own, prompt.name, candidates)]
    return {
        "target": target,
        "rounds_learned_on": learned_on,
        "by_depth": by_depth,
        "predictors": predictors(nodes, policy),
        "lemma": lemma(nodes),
    }


def _decode(lab: Lab, target: str, policy: CostAware, prompt: BenchPrompt) -> None:
    limit = lab.settings.max_new_tokens
    sage.generate(lab.target(target), lab.main(target), dict(prompt.inputs), policy=policy, max_new_tokens=limit)


def _learn(lab: Lab, target: str, policy: CostAware, rounds: int) -> int:
    """Decodes prompts of the validation split until so many rounds are learned from."""
    families, start = lab.settings.calibration.families, 0
    while policy.rounds < rounds:
        for prompt in lab.prompts(target, "validation", families, 1, start=start):
            _decode(lab, target, policy, prompt)
        start += 1
    return policy.rounds


def _errors(lab: Lab, target: str, policy: CostAware, prompts: Sequence[BenchPrompt]) -> list[Json]:
    """Errors by depth on the test split, of the draft's probabilities and of the calibrated ones, which go on learning."""
    policy.before, policy.after = Reliability(), Reliability()
    for prompt in prompts:
        _decode(lab, target, policy, prompt)
    before, after = policy.before.error(), policy.after.error()
    labels = {depth: sum(count for _, _, count in policy.before.curve(depth)) for depth in before}
    return [{"depth": depth, "labels": labels[depth], "before": before[depth], "after": after[depth]} for depth in before]


# -- what predicts acceptance ----------------------------------------------------------------------------------------------


def predictors(nodes: Sequence[Said], policy: CostAware) -> Json:
    """Per predictor of "the draft's best token is accepted": error, power to tell (AUC), and its reliability curve."""
    outcomes = [one.is_accepted for one in nodes]
    said = {
        "alpha": [confidence_of(one.probs) for one in nodes],
        "draft probability": [one.probs[0] for one in nodes],
        "calibrated": [policy.calibrator.likeliest(one.probs, one.depth, 0.0)[0] for one in nodes],
    }
    found = {name: _reliability(own, outcomes) for name, own in said.items()}
    return {"nodes": len(nodes), "accepted": _mean(outcomes), "by_name": found}


def _reliability(predicted: Sequence[float], outcomes: Sequence[bool]) -> Json:
    cells: list[list[tuple[float, bool]]] = [[] for _ in range(10)]
    for value, outcome in zip(predicted, outcomes, strict=True):
        cells[min(int(value * 10), 9)].append((value, outcome))
    curve = [[_mean([v for v, _ in cell]), _mean([o for _, o in cell]), len(cell)] for cell in cells if cell]
    error = sum(count * abs(said - seen) for said, seen, count in curve) / max(len(predicted), 1)
    return {"error": error, "auc": auc(predicted, outcomes), "curve": curve}


def auc(predicted: Sequence[float], outcomes: Sequence[bool]) -> float:
    """The chance that an accepted one was given more than a refused one, ties counting half; 0.5 where there are not both."""
    order = sorted(range(len(predicted)), key=lambda i: predicted[i])
    ranks = [0.0] * len(order)
    start = 0
    while start < len(order):
        end = start
        while end < len(order) and predicted[order[end]] == predicted[order[start]]:
            end += 1
        for i in order[start:end]:
            ranks[i] = (start + 1 + end) / 2
        start = end
    positive = sum(outcomes)
    negative = len(outcomes) - positive
    if not positive or not negative:
        return 0.5
    above = sum(rank for rank, outcome in zip(ranks, outcomes, strict=True) if outcome) - positive * (positive + 1) / 2
    return above / (positive * negative)


def _mean(values: Sequence[Any]) -> float:
    return sum(values) / len(values) if values else 0.0


# -- Lemma 4.3 ---------------------------------------------------------------------------------------------------------------


def bound(alpha: float, k: int) -> float:
    """What Lemma 4.3 claims p_1 to be at least: 1/k + alpha (k - 1)/k."""
    return 1 / k + alpha * (k - 1) / k


def lemma(nodes: Sequence[Said]) -> Json:
    """How often p_1 of the renormalised top k is below the lemma's bound, the furthest cases, and what Theorem 4.4 promises."""
    rows = []
    for one in nodes:
        total = math.fsum(one.probs)
        alpha = confidence_of(one.probs)
        rows.append((one, alpha, bound(alpha, len(one.probs)), [prob / total for prob in one.probs]))
    sure = [one.is_accepted for one, alpha, _, _ in rows if alpha > SURE]
    furthest = sorted(rows, key=lambda row: row[3][0] - row[2])[:3]
    return {
        "nodes": len(rows),
        "k": len(nodes[0].probs) if nodes else 0,
        "below_bound": sum(probs[0] < least for _, _, least, probs in rows),
        "sure_alpha": SURE,
        "sure": len(sure),
        "sure_accepted": sum(sure),
        "examples": [
            {
                "prompt": one.prompt,
                "depth": one.depth,
                "alpha": round(alpha, DECIMALS),
                "bound": round(least, DECIMALS),
                "probs": [round(prob, DECIMALS) for prob in probs[:SHOWN]],
                "accepted": one.is_accepted,
            }
            for one, alpha, least, probs in furthest
        ],
    }
