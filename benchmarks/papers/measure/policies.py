"""Policies and baselines on every task family. Ref: SAGE, arXiv 2602.00523, Table 1."""

from __future__ import annotations

from typing import Any

import sage
from benchmarks.papers.figures import Json
from benchmarks.papers.lab import Lab
from benchmarks.papers.measure.comparison import compare
from benchmarks.papers.measure.tuning import most_tokens, tuned_options
from sage.bench.runners import AUTOREGRESSIVE, HF_ASSISTED, HF_GENERATE, HF_STATIC, PROMPT_LOOKUP

DRAFTING = tuple(name for name in sage.POLICIES if name != AUTOREGRESSIVE)
BASELINES = (HF_GENERATE, HF_STATIC, PROMPT_LOOKUP, HF_ASSISTED)
PUBLISHED = "{} (published)"  # label of a policy with the settings of its paper
MOST_TOKENS = "sage (most tokens)"


def measure(lab: Lab) -> None:
    """Measures `tuning_TARGET` and `policies_TARGET` for every target."""
    for target in lab.settings.targets:
        policy_figures(lab, target)


def policy_figures(lab: Lab, target: str) -> Json:
    """Returns the figures of all variants and baselines on the test split."""
    study, assistant = lab.settings.policies, lab.settings.assistant_runs.get(target)
    variants = policy_variants(lab, target)
    drafts = [lab.settings.main_runs[target], *([assistant] if assistant else [])]

    def compute() -> Json:
        runners = [lab.variant(target, label, policy, options) for label, (policy, options) in variants.items()]
        prompts, as_policies = lab.test_prompts(target, study), [AUTOREGRESSIVE]
        compared = compare(lab, target, runners, prompts, study.repeats, baselines=BASELINES, also_as_policies=as_policies)
        described = {label: {"policy": policy, "options": options} for label, (policy, options) in variants.items()}
        return {"target": target, "variants": described, **compared}

    return lab.figures("policies", f"policies_{target}", compute, drafts, study=study, variants=variants)


def policy_variants(lab: Lab, target: str) -> dict[str, tuple[str, dict[str, Any]]]:
    """Returns policy and options by label: as tuned, `sage` with the most tokens per pass, and as published if different."""
    tuned = {name: (name, tuned_options(lab, target, name)) for name in DRAFTING}
    published: dict[str, Any] = {PUBLISHED.format(name): (name, {}) for name, (_, options) in tuned.items() if options}
    return tuned | {MOST_TOKENS: ("sage", most_tokens(lab, target, "sage"))} | published
