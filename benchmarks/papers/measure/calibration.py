"""Predictors of acceptance: reliability of alpha, of the draft probability and of the calibrated estimate; calibration error by
depth; Lemma 4.3 and Theorem 4.4 on recorded nodes. Ref: SAGE, arXiv 2602.00523, section 4.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean

import torch

import sage
from benchmarks.papers.figures import Json
from benchmarks.papers.lab import Lab
from benchmarks.papers.measure.answers import ranks_on_path
from sage.bench.measurement import BenchPrompt
from sage.costs.calibration import Reliability
from sage.replay.recording import Recording
from sage.trees.cost_aware.policy import CostAware
from sage.trees.sage import confidence_of

ALPHA_THRESHOLD = 0.56  # SAGE, Theorem 4.4: above this alpha, a token is always accepted
NUM_BINS = 10
DECIMALS = 3
NUM_EXAMPLES, NUM_EXAMPLE_PROBS = 3, 4


@dataclass
class PathNode:
    """One node on the path of the answer: its draft distribution, and whether the target chose the most likely token."""

    prompt: str
    depth: int
    probs: list[float]
    is_accepted: bool


def nodes_on_path(recording: Recording, prompt: str, candidates: int) -> Iterator[PathNode]:
    """Yields the recorded nodes on the path of the answer, round by round."""
    for recorded in recording.rounds:
        for depth, (probs, rank) in enumerate(ranks_on_path(recording, recorded), start=1):
            yield PathNode(prompt, depth, probs[:candidates].tolist(), rank == 0)


def measure(lab: Lab) -> None:
    """Measures `calibration_TARGET` for every target."""
    study, candidates = lab.settings.calibration, lab.settings.entropy.candidates
    for target in lab.settings.targets:
        name, run, compute = f"calibration_{target}", lab.settings.main_runs[target], partial(_measure, lab, target)
        lab.figures("calibration", name, compute, [run], study=study, candidates=candidates)


def _measure(lab: Lab, target: str) -> Json:
    study, candidates = lab.settings.calibration, lab.settings.entropy.candidates
    prompts = lab.test_prompts(target, study)
    policy = sage.policy("cost_aware")
    assert isinstance(policy, CostAware)
    calibration_rounds = _calibrate(lab, target, policy, study.rounds)
    frozen = policy.learner.calibrator.state()
    by_depth = _errors(lab, target, policy, prompts)
    policy.learner.calibrator.load_state(frozen)
    recorded = zip(prompts, lab.recordings(target, prompts), strict=True)
    nodes = [node for prompt, recording in recorded for node in nodes_on_path(recording, prompt.name, candidates)]
    return {
        "target": target,
        "calibration_rounds": calibration_rounds,
        "by_depth": by_depth,
        "predictors": predictors(nodes, policy),
        "lemma": lemma(nodes),
    }


def _decode(lab: Lab, target: str, policy: CostAware, prompt: BenchPrompt) -> None:
    limit = lab.settings.max_new_tokens
    sage.generate(lab.target(target), lab.main_draft(target), dict(prompt.inputs), policy=policy, max_new_tokens=limit)


def _calibrate(lab: Lab, target: str, policy: CostAware, rounds: int) -> int:
    """Decodes prompts of the validation split for at least `rounds` rounds; returns their number."""
    families, start = lab.settings.calibration.families, 0
    while policy.learner.rounds < rounds:
        for prompt in lab.prompts(target, "validation", families, 1, start=start):
            _decode(lab, target, policy, prompt)
        start += 1
    return policy.learner.rounds


def _errors(lab: Lab, target: str, policy: CostAware, prompts: Sequence[BenchPrompt]) -> list[Json]:
    """Returns errors by depth on the test split, before and after calibration, which continues online."""
    policy.learner.before, policy.learner.after = Reliability(), Reliability()
    for prompt in prompts:
        _decode(lab, target, policy, prompt)
    before, after = policy.learner.before.error(), policy.learner.after.error()
    labels = {depth: sum(count for _, _, count in policy.learner.before.curve(depth)) for depth in before}
    return [{"depth": depth, "labels": labels[depth], "before": before[depth], "after": after[depth]} for depth in before]


def predictors(nodes: Sequence[PathNode], policy: CostAware) -> Json:
    """Returns, per predictor of the acceptance of the most likely token, its error, AUC and reliability curve."""
    outcomes = [one.is_accepted for one in nodes]
    predicted = {
        "alpha": [confidence_of(one.probs) for one in nodes],
        "draft probability": [one.probs[0] for one in nodes],
        "calibrated": [policy.learner.calibrator.leading(one.probs, one.depth, 0.0)[0] for one in nodes],
    }
    by_name = {name: _reliability(values, outcomes) for name, values in predicted.items()}
    return {"nodes": len(nodes), "accepted": sum(outcomes) / max(len(outcomes), 1), "by_name": by_name}


def _reliability(predicted: Sequence[float], outcomes: Sequence[bool]) -> Json:
    bins: list[list[tuple[float, bool]]] = [[] for _ in range(NUM_BINS)]
    for value, outcome in zip(predicted, outcomes, strict=True):
        bins[min(int(value * NUM_BINS), NUM_BINS - 1)].append((value, outcome))
    curve = [[fmean(v for v, _ in cell), fmean(o for _, o in cell), len(cell)] for cell in bins if cell]
    error = sum(count * abs(expected - observed) for expected, observed, count in curve) / max(len(predicted), 1)
    return {"error": error, "auc": auc(predicted, outcomes), "curve": curve}


def auc(predicted: Sequence[float], outcomes: Sequence[bool]) -> float:
    """Returns the area under the ROC curve, ties counting half; 0.5 if all outcomes are equal."""
    scores, is_accepted = torch.tensor(predicted, dtype=torch.float64), torch.tensor(outcomes)
    accepted, rejected = scores[is_accepted][:, None], scores[~is_accepted]
    if not accepted.numel() or not rejected.numel():
        return 0.5
    return float(((accepted > rejected).double() + 0.5 * (accepted == rejected)).mean())


def bound(alpha: float, k: int) -> float:
    """Returns the lower bound on p_1 that Lemma 4.3 claims: 1/k + alpha (k - 1)/k."""
    return 1 / k + alpha * (k - 1) / k


def lemma(nodes: Sequence[PathNode]) -> Json:
    """Counts violations of Lemma 4.3 (p_1 of the renormalized top k below its bound) and of Theorem 4.4; adds examples."""
    rows = []
    for node in nodes:
        alpha, total = confidence_of(node.probs), math.fsum(node.probs)
        rows.append((node, alpha, bound(alpha, len(node.probs)), [prob / total for prob in node.probs]))
    confident = [node.is_accepted for node, alpha, _, _ in rows if alpha > ALPHA_THRESHOLD]
    largest_violations = sorted(rows, key=lambda row: row[3][0] - row[2])[:NUM_EXAMPLES]
    return {
        "nodes": len(rows),
        "k": len(nodes[0].probs) if nodes else 0,
        "below_bound": sum(probs[0] < least for _, _, least, probs in rows),
        "alpha_threshold": ALPHA_THRESHOLD,
        "above_threshold": len(confident),
        "above_threshold_accepted": sum(confident),
        "examples": [
            {
                "prompt": node.prompt,
                "depth": node.depth,
                "alpha": round(alpha, DECIMALS),
                "bound": round(least, DECIMALS),
                "probs": [round(prob, DECIMALS) for prob in probs[:NUM_EXAMPLE_PROBS]],
                "accepted": node.is_accepted,
            }
            for node, alpha, least, probs in largest_violations
        ],
    }
