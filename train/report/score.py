"""The one figure a draft is judged by: which is kept as the best, when to stop early, what a sweep maximises."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from train.config.schema import PolicyName, ScoreConfig


def score_of(report: Mapping[str, Any], chosen: ScoreConfig) -> float | None:
    """The score of a validation report, higher is better; None where no policy drafts."""
    name = score_policy(report["policies"], chosen)
    return None if name is None else float(report["policies"][name][str(chosen.metric)])


def score_policy(measured: Iterable[str], chosen: ScoreConfig) -> str | None:
    """The policy that stands for the run: `score.policy`, else `sage`, else the first one that drafts."""
    drafting = [str(name) for name in measured if name != PolicyName.autoregressive]
    for name in (chosen.policy, PolicyName.sage):
        if name is not None and str(name) in drafting:
            return str(name)
    return drafting[0] if drafting else None
