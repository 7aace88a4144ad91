"""Acceptance, speed and equality of texts by sampling temperature."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.papers.figures import Json
from benchmarks.papers.lab import Lab
from benchmarks.papers.measure.comparison import compare
from benchmarks.papers.measure.tuning import tuned_options
from sage.bench.runners import AUTOREGRESSIVE

POLICIES = ("chain", "static", "sage", "cost_aware")


def measure(lab: Lab) -> None:
    """Measures `temperature` for every target."""
    study, targets = lab.settings.temperature, list(lab.settings.targets)
    options = {target: {name: tuned_options(lab, target, name) for name in POLICIES} for target in targets}

    def compute() -> Json:
        return {"rows": [_row(lab, target, value, options[target]) for target in targets for value in study.values]}

    lab.figures("temperature", "temperature", compute, lab.main_runs(), study=study, options=options)


def _row(lab: Lab, target: str, temperature: float, options: Mapping[str, Mapping[str, Any]]) -> Json:
    study = lab.settings.temperature
    variants = [lab.variant(target, name, name, options[name]) for name in POLICIES]
    prompts = lab.test_prompts(target, study)
    # coupled drafts: see coupling
    sampling: dict[str, Any] = {"temperature": temperature, "seed": 1, "couple": temperature == 0}
    compared = compare(lab, target, variants, prompts, study.repeats, **sampling)
    return {
        "target": target,
        "temperature": temperature,
        "prompts": len(prompts),
        "policies": compared["policies"],
        "baselines": {AUTOREGRESSIVE: compared["baselines"][AUTOREGRESSIVE]["tokens_per_s"]},
    }
