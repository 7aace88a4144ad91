"""The policies on every task family, against what a user would pick instead. The shape of SAGE's Table 1, arXiv 2602.00523."""

from __future__ import annotations

from typing import Any

import sage
from benchmarks.papers.figures import Json
from benchmarks.papers.lab import Lab
from benchmarks.papers.measure.tuning import most_tokens, options_of
from benchmarks.papers.page.tables import kept
from sage.bench.runners import AUTOREGRESSIVE, HF_ASSISTED, HF_GENERATE, HF_STATIC, PROMPT_LOOKUP

DRAFTING = tuple(name for name in sage.POLICIES if name != AUTOREGRESSIVE)
BASELINES = (HF_GENERATE, HF_STATIC, PROMPT_LOOKUP, HF_ASSISTED)
PUBLISHED = "{} (published)"  # at the settings of the policy's own paper
MOST_TOKENS = "sage (most tokens)"


def measure_policies(lab: Lab) -> None:
    """`tuning_TARGET` and `policies_TARGET` for every target."""
    for target in lab.settings.targets:
        policies(lab, target)


def policies(lab: Lab, target: str) -> Json:
    """Everybody at once on the test split: as tuned on the validation split, and as published."""
    study, assistant = lab.settings.table, lab.settings.assistants.get(target)
    found = contestants(lab, target)
    drafts = [lab.settings.main[target], *([assistant] if assistant else [])]
    inputs = lab.origin(*drafts) | lab.study(study) | {"contestants": found}

    def measure() -> Json:
        own = [lab.contestant(target, label, policy, options) for label, (policy, options) in found.items()]
        measured = lab.contest(target, [*own, *lab.baselines(target, BASELINES)], lab.tested(target, study), study.repeats)
        figures = kept(measured, lab.target(target), [*found, AUTOREGRESSIVE])
        return {
            "target": target,
            "contestants": {label: {"policy": policy, "options": options} for label, (policy, options) in found.items()},
            **figures,
        }

    return lab.make("policies", f"policies_{target}", inputs, measure)


def contestants(lab: Lab, target: str) -> dict[str, tuple[str, dict[str, Any]]]:
    """Policies and options by label: each as tuned under its own name; as published, where that is something else; and sage
    with the most tokens per pass."""
    own = {name: (name, options_of(lab, target, name)) for name in DRAFTING}
    published: dict[str, tuple[str, dict[str, Any]]] = {
        PUBLISHED.format(name): (name, {}) for name, (_, options) in own.items() if options
    }
    return own | {MOST_TOKENS: ("sage", most_tokens(lab, target, "sage"))} | published
