"""Fewer visual tokens for the draft: SAGE's Table 5 (pruning while decoding) and SpecVLM's Tables 3 and 4 (compressors)."""

from __future__ import annotations

from typing import Any

import sage
from benchmarks.papers import runs
from benchmarks.papers.figures import Json
from benchmarks.papers.lab import Lab
from benchmarks.papers.measure.tuning import options_of
from benchmarks.papers.page.tables import kept
from sage.bench import PolicyRunner
from sage.drafts import Pruning

POLICY = "sage"


# -- pruning while decoding ----------------------------------------------------------------------------------------------


def measure_pruning(lab: Lab) -> None:
    """`pruning`: ratios 0 to 0.95 for the main draft and the smaller model of the first target that has one."""
    study, target = lab.settings.pruning, next(iter(lab.settings.assistants))
    drafts = {"head": lab.settings.main[target], "smaller model": lab.settings.assistants[target]}
    options = options_of(lab, target, POLICY)
    inputs = lab.origin(*drafts.values()) | lab.study(study) | {"options": options}
    lab.make("pruning", "pruning", inputs, lambda: _prune(lab, target, drafts, options))


def _prune(lab: Lab, target: str, drafts: dict[str, str], options: dict[str, Any]) -> Json:
    study, model = lab.settings.pruning, lab.target(target)
    prompts = lab.tested(target, study)
    chosen = [(kind, run, ratio) for kind, run in drafts.items() for ratio in study.ratios]
    runners = {
        (kind, ratio): PolicyRunner(
            model, lab.draft(run), f"{kind} {ratio:g}", sage.policy(POLICY, **options), Pruning(ratio=ratio)
        )
        for kind, run, ratio in chosen
    }
    measured = lab.contest(target, [*runners.values(), *lab.baselines(target)], prompts, study.repeats)
    figures = kept(measured, model, [runner.name for runner in runners.values()])
    rows = [
        {
            "draft": kind,
            "ratio": ratio,
            **_figures(figures["policies"][runners[kind, ratio].name], len(prompts)),
        }
        for kind, run, ratio in chosen
    ]
    return {"target": target, "policy": POLICY, "options": options, "prompts": len(prompts), "rows": rows}


def _figures(part: Json, prompts: int) -> Json:
    names = (
        *("tokens_per_target_pass", "mean_accepted_draft", "prompt_tokens", "draft_context", "nodes_per_round"),
        *("speedup", "speedup_ci", "speedup_end_to_end", "match", "total"),
    )
    prefill_ms = 1e3 * part["time_s"]["draft_prefill"] / prompts
    return {**{name: part[name] for name in names if name in part}, "draft_prefill_ms": prefill_ms}


# -- compressors, trained ------------------------------------------------------------------------------------------------


def measure_compressors(lab: Lab) -> None:
    """`compressor`: a head per mode, trained alike, all decoding the same prompts in turns."""
    study = lab.settings.compressor
    target = lab.settings.training.runs[study.runs[0]].target
    options = {name: options_of(lab, target, name) for name in study.policies}
    inputs = lab.origin(*study.runs) | lab.study(study) | {"options": options}
    lab.make("compressor", "compressor", inputs, lambda: _compare(lab, target, options))


def _compare(lab: Lab, target: str, options: dict[str, dict[str, Any]]) -> Json:
    study, model = lab.settings.compressor, lab.target(target)
    prompts = lab.tested(target, study)
    runners = {
        (run, policy): lab.contestant(target, f"{run} {policy}", policy, options[policy], run)
        for run in study.runs
        for policy in study.policies
    }
    measured = lab.contest(target, [*runners.values(), *lab.baselines(target)], prompts, study.repeats)
    figures = kept(measured, model, [runner.name for runner in runners.values()])
    rows = [
        {
            "run": run,
            "policy": policy,
            "command": runs.command(lab.settings, run),
            "choice": [word for word in lab.settings.training.runs[run].extra],
            **_figures(figures["policies"][runner.name], len(prompts)),
        }
        for (run, policy), runner in runners.items()
    ]
    return {"target": target, "prompts": len(prompts), "rows": rows}
