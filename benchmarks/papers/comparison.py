"""Timed comparisons of runners, reduced to the figures that studies store."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import sage
from benchmarks.papers.figures import Json
from benchmarks.papers.lab import Lab
from sage.bench.measurement import BenchPrompt, Measurement, measure
from sage.bench.runners import AUTOREGRESSIVE, PolicyRunner
from sage.bench.summary import summarize

logger = logging.getLogger(__name__)
STORED = (
    *("tokens_per_target_pass", "mean_accepted_draft", "nodes_per_round", "draft_steps_per_round", "rounds", "tokens"),
    *("tokens_per_s", "tokens_per_s_ci", "speedup", "speedup_ci", "speedup_end_to_end", "speedup_end_to_end_ci"),
    *("match", "total", "match_hf", "first_gaps", "time_s", "is_autoregressive", "prompt_tokens", "draft_context"),
)


def compare(
    lab: Lab,
    target: str,
    runners: Sequence[PolicyRunner],
    prompts: Sequence[BenchPrompt],
    repeats: int,
    *,
    baselines: Sequence[str] = (),
    also_as_policies: Sequence[str] = (),
    **sampling: Any,
) -> Json:
    """Times runners and baselines on the same prompts, interleaved; returns figures over all prompts, and by task family.

    Policies that learn online decode the tuning prompts first.

    Args:
        baselines: in addition to our autoregressive loop.
        also_as_policies: baselines that are reported among the policies, too.
        sampling: greedy unless given.
    """
    chosen = sage.Sampling(**{"max_new_tokens": lab.settings.max_new_tokens, **sampling})
    for runner in runners:
        if runner.policy.needs_costs:
            for prompt in lab.tuning_prompts(target):
                runner.run(prompt.inputs, chosen)
    found = measure([*runners, *lab.baselines(target, baselines)], prompts, chosen, repeats, 1, _log_progress)
    model, labels = lab.target(target), [*(runner.name for runner in runners), *also_as_policies]
    families = dict.fromkeys(prompt.family for prompt in prompts)
    by_family = {family: _summary(_of_family(found, family), model, labels) for family in families}
    return {**_summary(found, model, labels), "passes": lab.settings.passes, "repeats": repeats, "by_family": by_family}


def compare_row(
    lab: Lab, target: str, runners: Sequence[PolicyRunner], prompts: Sequence[BenchPrompt], repeats: int, **sampling: Any
) -> Json:
    """Returns the figures of one row of a sweep: those of `runners`, and the speed of our autoregressive loop."""
    compared = compare(lab, target, runners, prompts, repeats, **sampling)
    speed = compared["baselines"][AUTOREGRESSIVE]["tokens_per_s"]
    return {"prompts": len(prompts), "policies": compared["policies"], "baselines": {AUTOREGRESSIVE: speed}}


def _summary(measurement: Measurement, target: Any, labels: Sequence[str]) -> Json:
    found = summarize(measurement, target, labels)
    parts = {kind: {name: select(part, STORED) for name, part in found[kind].items()} for kind in ("policies", "baselines")}
    return {"prompts": len(measurement.prompts), **select(found, ("fastest_baseline", "failed_baselines", "margins")), **parts}


def _of_family(measurement: Measurement, family: str) -> Measurement:
    indices = [index for index, prompt in enumerate(measurement.prompts) if prompt.family == family]
    return replace(
        measurement,
        prompts=[measurement.prompts[index] for index in indices],
        runs={name: [runs[index] for index in indices] for name, runs in measurement.runs.items()},
    )


def select(part: Mapping[str, Any], names: Sequence[str]) -> Json:
    """Returns the named figures of `part`, those that it has."""
    return {name: part[name] for name in names if name in part}


def _log_progress(done: int, total: int) -> None:
    if done == total or done % max(total // 4, 1) == 0:
        logger.info("  %d of %d", done, total)
