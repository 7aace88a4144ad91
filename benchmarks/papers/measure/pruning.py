"""Visual tokens pruned for the draft while decoding. Ref: SAGE, arXiv 2602.00523, Table 5."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import sage
from benchmarks.papers.figures import Json
from benchmarks.papers.lab import Lab
from benchmarks.papers.measure.comparison import compare, visual_figures
from benchmarks.papers.measure.tuning import tuned_options
from sage.bench.runners import PolicyRunner
from sage.drafts.pruning import Pruning

POLICY = "sage"


def measure(lab: Lab) -> None:
    """Measures `pruning`: all ratios for the main draft and the smaller model of the first target that has one."""
    study, target = lab.settings.pruning, next(iter(lab.settings.assistant_runs))
    drafts = {"head": lab.settings.main_runs[target], "smaller model": lab.settings.assistant_runs[target]}
    options = tuned_options(lab, target, POLICY)
    names = list(drafts.values())
    lab.figures("pruning", "pruning", lambda: _measure(lab, target, drafts, options), names, study=study, options=options)


def _measure(lab: Lab, target: str, drafts: Mapping[str, str], options: Mapping[str, Any]) -> Json:
    study, prompts = lab.settings.pruning, lab.test_prompts(target, lab.settings.pruning)

    def make_variant(kind: str, ratio: float) -> PolicyRunner:
        policy, draft = sage.policy(POLICY, **options), lab.draft(drafts[kind])
        return PolicyRunner(lab.target(target), draft, f"{kind} {ratio:g}", policy, Pruning(ratio=ratio))

    variants = {(kind, ratio): make_variant(kind, ratio) for kind in drafts for ratio in study.ratios}
    policies = compare(lab, target, list(variants.values()), prompts, study.repeats)["policies"]
    rows = [
        {"draft": kind, "ratio": ratio, **visual_figures(policies[variant.name], len(prompts))}
        for (kind, ratio), variant in variants.items()
    ]
    return {"target": target, "policy": POLICY, "options": options, "prompts": len(prompts), "rows": rows}
