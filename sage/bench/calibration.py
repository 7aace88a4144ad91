"""Expected calibration error of acceptance probabilities by depth, before and after the calibrator.

Predictions are recorded before the calibrator learns from their outcome. The error after calibration is therefore that of
actual use, including the first rounds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

from sage.bench.measurement import Measurement
from sage.bench.runners import PolicyRunner, Runner
from sage.costs.calibration import Reliability
from sage.trees.cost_aware.policy import CostAware


def calibration(runners: Sequence[Runner], measurement: Measurement) -> dict[str, Any]:
    """Returns the section `calibration` of the report by runner; empty without runners that calibrate.

    Returns:
        {name: {"rounds": int, "labels": int, "before": float, "after": float, "expected": float, "accepted": float,
        "by_depth": [{"depth", "labels", "before", "after", "curve_before", "curve_after"}]}}.

        `before` is the error of the draft's own probabilities, `after` that of the calibrated ones; over all depths, the mean
        weighted by labels. A curve lists [mean prediction, mean outcome, labels] of each non-empty bin of width 0.1.
        `expected` and `accepted` are drafted tokens per measured round: expected by the policy for the verified trees, and
        accepted.
    """
    policies = {one.name: one.policy for one in runners if isinstance(one, PolicyRunner)}
    return {
        name: _section(policy, [entry for run in chain(*measurement.runs[name]) for entry in run.stats.rounds_log])
        for name, policy in policies.items()
        if isinstance(policy, CostAware) and policy.calibrate
    }


def _section(policy: CostAware, log: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    depths = [_depth(policy.learner.before, policy.learner.after, depth) for depth in policy.learner.before.error()]
    labels = sum(row["labels"] for row in depths)
    means = {key: sum(row[key] * row["labels"] for row in depths) / max(labels, 1) for key in ("before", "after")}
    tokens = {key: sum(entry[key] for entry in log) / max(len(log), 1) for key in ("expected", "accepted")}
    return {"rounds": policy.learner.rounds, "labels": labels, **means, "by_depth": depths, **tokens}


def _depth(before: Reliability, after: Reliability, depth: int) -> dict[str, Any]:
    curves = {"curve_before": before.curve(depth), "curve_after": after.curve(depth)}
    return {
        "depth": depth,
        "labels": sum(count for _, _, count in curves["curve_before"]),
        "before": before.error()[depth],
        "after": after.error()[depth],
        **{name: [list(point) for point in curve] for name, curve in curves.items()},
    }
