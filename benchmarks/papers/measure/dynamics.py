"""What changes with the length of an answer (SAGE's Figure 3, arXiv 2602.00523) and with the temperature."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import sage
from benchmarks.papers.figures import Json
from benchmarks.papers.lab import Lab
from benchmarks.papers.measure.policies import PUBLISHED
from benchmarks.papers.measure.tuning import options_of
from benchmarks.papers.page.tables import kept
from sage.bench import PolicyRunner
from sage.replay.replay import replay

AS_PUBLISHED = {PUBLISHED.format(name): name for name in ("static", "sage")}
SAMPLED = ("chain", "static", "sage", "cost_aware")


def _published(lab: Lab, target: str) -> list[PolicyRunner]:
    """As published, so that the comparison is the paper's; and `cost_aware`."""
    own = [lab.contestant(target, label, name, {}) for label, name in AS_PUBLISHED.items()]
    return [*own, lab.contestant(target, "cost_aware", "cost_aware", {})]


# -- length ----------------------------------------------------------------------------------------------------------------


def measure_length(lab: Lab) -> None:
    """`length`: answers forced to a length, and answers that end by themselves, stretch by stretch; the first target."""
    study, target = lab.settings.length, next(iter(lab.settings.targets))
    inputs = lab.origin(lab.settings.main[target]) | lab.study(study)

    def measure() -> Json:
        forced = [_forced(lab, target, length) for length in study.lengths]
        return {"target": target, "forced": forced, "stretches": _stretches(lab, target)}

    lab.make("length", "length", inputs, measure)


def _forced(lab: Lab, target: str, length: int) -> Json:
    """The end-of-answer token is forbidden before `length` tokens, for everybody alike."""
    study, runners = lab.settings.length, _published(lab, target)
    prompts = lab.tested(target, study)
    measured = lab.contest(
        target, [*runners, *lab.baselines(target)], prompts, study.repeats, max_new_tokens=length, min_new_tokens=length
    )
    figures = kept(measured, lab.target(target), [runner.name for runner in runners])
    return {"length": length, "prompts": len(prompts), "policies": figures["policies"]}


def _stretches(lab: Lab, target: str) -> list[Json]:
    """Tokens per target pass of rounds that start in each stretch of an answer, replayed on the same drafts."""
    study, limit = lab.settings.length, lab.settings.max_new_tokens
    recordings = lab.recordings(target, lab.prompts(target, "test", study.families, 4 * study.prompts))
    starts = [one.position for recording in recordings for one in recording.rounds]
    labels = {**AS_PUBLISHED, "cost_aware": "cost_aware"}
    found = {label: replay(recordings, sage.policy(name), lab.costs(target)).rounds for label, name in labels.items()}
    rows = []
    for low, high in pairwise([*study.edges, limit]):
        chosen = [place for place, position in enumerate(starts) if low <= position < high]
        policies = {label: sum(own[i].emitted for i in chosen) / max(len(chosen), 1) for label, own in found.items()}
        rows.append({"from": low, "to": high, "rounds": len(chosen), "policies": policies})
    return rows


# -- temperature -----------------------------------------------------------------------------------------------------------


def measure_temperature(lab: Lab) -> None:
    """`temperature`: acceptance, speed and equality by seed, for every target."""
    study, targets = lab.settings.temperature, list(lab.settings.targets)
    options = {target: {name: options_of(lab, target, name) for name in SAMPLED} for target in targets}
    inputs = lab.origin(*(lab.settings.main[target] for target in targets)) | lab.study(study) | {"options": options}

    def measure() -> Json:
        return {"rows": [_sampled(lab, target, value, options[target]) for target in targets for value in study.values]}

    lab.make("temperature", "temperature", inputs, measure)


def _sampled(lab: Lab, target: str, temperature: float, options: Mapping[str, Mapping[str, Any]]) -> Json:
    study = lab.settings.temperature
    runners = [lab.contestant(target, name, name, options[name]) for name in SAMPLED]
    prompts = lab.tested(target, study)
    measured = lab.contest(target, [*runners, *lab.baselines(target)], prompts, study.repeats, temperature=temperature, seed=1)
    figures = kept(measured, lab.target(target), [runner.name for runner in runners])
    baselines = {"autoregressive": figures["baselines"]["autoregressive"]["tokens_per_s"]}
    return {
        "target": target,
        "temperature": temperature,
        "prompts": len(prompts),
        "policies": figures["policies"],
        "baselines": baselines,
    }
