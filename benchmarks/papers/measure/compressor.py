"""Trained compressors of the draft's visual input. Ref: SpecVLM, arXiv 2509.11815, Tables 3 and 4."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.papers import runs
from benchmarks.papers.figures import Json
from benchmarks.papers.lab import Lab
from benchmarks.papers.measure.comparison import compare, visual_figures
from benchmarks.papers.measure.tuning import tuned_options


def measure(lab: Lab) -> None:
    """Measures `compressor`: one identically trained head per mode, interleaved on the same prompts."""
    study = lab.settings.compressor
    target = lab.settings.training.runs[study.runs[0]].target
    options = {name: tuned_options(lab, target, name) for name in study.policies}
    lab.figures("compressor", "compressor", lambda: _measure(lab, target, options), study.runs, study=study, options=options)


def _measure(lab: Lab, target: str, options: Mapping[str, Mapping[str, Any]]) -> Json:
    study, prompts = lab.settings.compressor, lab.test_prompts(target, lab.settings.compressor)
    variants = {
        (run, policy): lab.variant(target, f"{run} {policy}", policy, options[policy], run)
        for run in study.runs
        for policy in study.policies
    }
    policies = compare(lab, target, list(variants.values()), prompts, study.repeats)["policies"]
    rows = [
        {
            "run": run,
            "policy": policy,
            "command": runs.command_line(lab.settings, run),
            "choice": list(lab.settings.training.runs[run].extra),
            **visual_figures(policies[variant.name], len(prompts)),
        }
        for (run, policy), variant in variants.items()
    ]
    return {"target": target, "prompts": len(prompts), "rows": rows}
