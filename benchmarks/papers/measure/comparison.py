"""Timed comparisons of variants, reduced to the figures that studies store."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from benchmarks.papers.figures import Json
from benchmarks.papers.lab import Lab
from sage.bench.measurement import BenchPrompt, Measurement
from sage.bench.runners import PolicyRunner
from sage.bench.summary import summarize

STORED = (
    *("tokens_per_target_pass", "mean_accepted_draft", "nodes_per_round", "draft_steps_per_round", "rounds", "tokens"),
    *("tokens_per_s", "tokens_per_s_ci", "speedup", "speedup_ci", "speedup_end_to_end", "speedup_end_to_end_ci"),
    *("match", "total", "match_hf", "first_gaps", "time_s", "is_autoregressive", "prompt_tokens", "draft_context"),
)


def compare(
    lab: Lab,
    target: str,
    variants: Sequence[PolicyRunner],
    prompts: Sequence[BenchPrompt],
    repeats: int,
    *,
    baselines: Sequence[str] = (),
    also_as_policies: Sequence[str] = (),
    **sampling: Any,
) -> Json:
    """Times variants and baselines on the same prompts; returns figures over all prompts, and the same by task family.

    Args:
        baselines: in addition to our autoregressive loop.
        also_as_policies: baselines that are reported among the policies, too.
        sampling: as for `Lab.run_comparison`.
    """
    runners = [*variants, *lab.baselines(target, baselines)]
    measurement = lab.run_comparison(target, runners, prompts, repeats, **sampling)
    labels = [*(variant.name for variant in variants), *also_as_policies]
    model, families = lab.target(target), dict.fromkeys(prompt.family for prompt in prompts)
    by_family = {family: summary(_of_family(measurement, family), model, labels) for family in families}
    passes = lab.settings.passes
    return {**summary(measurement, model, labels), "passes": passes, "repeats": repeats, "by_family": by_family}


def summary(measurement: Measurement, target: Any, labels: Sequence[str]) -> Json:
    """Returns the stored figures of the labelled runners and of the baselines."""
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


def visual_figures(part: Mapping[str, Any], prompts: int) -> Json:
    """Returns the figures of a study of visual tokens: acceptance, speed, draft context, draft prefill per prompt."""
    names = (
        *("tokens_per_target_pass", "mean_accepted_draft", "prompt_tokens", "draft_context", "nodes_per_round"),
        *("speedup", "speedup_ci", "speedup_end_to_end", "match", "total"),
    )
    return {**select(part, names), "draft_prefill_ms": 1e3 * part["time_s"]["draft_prefill"] / prompts}
