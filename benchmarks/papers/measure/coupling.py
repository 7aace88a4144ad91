"""Drafts that propose with the noise of the target's draws, against drafts that do not: tokens per pass, speed, equal texts."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import sage
from benchmarks.papers.figures import Json
from benchmarks.papers.lab import Lab
from benchmarks.papers.measure.comparison import summary
from sage.bench.runners import AUTOREGRESSIVE, PolicyRunner

POLICIES = ("chain", "static", "sage", "cost_aware")
UNCOUPLED = "{} uncoupled"


def measure(lab: Lab) -> None:
    """Measures `coupling_TARGET` for every target."""
    study = lab.settings.coupling
    for target in lab.settings.targets:
        run, compute = lab.settings.main_runs[target], partial(_measure, lab, target)
        lab.figures("coupling", f"coupling_{target}", compute, [run], study=study)


def _measure(lab: Lab, target: str) -> Json:
    return {"target": target, "rows": [_row(lab, target, *point) for point in lab.settings.coupling.points]}


def _row(lab: Lab, target: str, temperature: float, top_p: float) -> Json:
    """Compares all policies, with their default options, coupled and not; no two prompts share a seed."""
    study, model, draft = lab.settings.coupling, lab.target(target), lab.main_draft(target)
    labels = {name.format(policy): (policy, name == "{}") for policy in POLICIES for name in ("{}", UNCOUPLED)}
    runners = [
        PolicyRunner(model, draft, label, sage.policy(policy), couple=couple) for label, (policy, couple) in labels.items()
    ]
    prompts = lab.test_prompts(target, study)
    seeded = [replace(prompt, seed=seed) for seed, prompt in enumerate(prompts * study.seeds)]
    sampling = {"temperature": temperature, "top_p": top_p}
    measurement = lab.run_comparison(target, [*runners, *lab.baselines(target)], seeded, study.repeats, **sampling)
    found = summary(measurement, model, list(labels))
    return {
        "temperature": temperature,
        "top_p": top_p,
        "prompts": len(prompts),
        "seeds": study.seeds,
        "policies": found["policies"],
        "baselines": {AUTOREGRESSIVE: found["baselines"][AUTOREGRESSIVE]["tokens_per_s"]},
    }
