"""Policies tuned on the validation split: many configurations replayed on the same drafts, the best few timed.

`static` is tuned by its tree: the n rank paths that recorded answers took most often. `cost_aware` is not tuned: its defaults
take part as they are.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any

import sage
from benchmarks.papers.figures import Json
from benchmarks.papers.lab import Lab
from sage.bench.summary import decode_rate
from sage.costs.tables import Costs
from sage.replay.recording import Recording
from sage.replay.replay import replay

logger = logging.getLogger(__name__)
Options = dict[str, Any]
UNTUNED = "cost_aware"


def tuned(lab: Lab, target: str) -> Json:
    """The figures `tuning_TARGET`: per policy the options to measure with, and how they were found.

    Returns:
        {"costs": cost tables, "rounds": replayed, "policies": {name: {"tried", "options", "most_tokens": options, "timed":
        [{"options", "predicted", "tokens_per_s", "is_default"}]}}}, the timed ones by falling speed. `most_tokens` has the
        most tokens per target pass of all that were tried, whatever they cost.
    """
    settings = lab.settings
    inputs = lab.origin(settings.main[target]) | {"tuning": asdict(settings.tuning), "families": settings.families}
    return lab.make("policies", f"tuning_{target}", inputs, lambda: _tune(lab, target))


def options_of(lab: Lab, target: str, policy: str) -> Options:
    """What a policy is measured with: tuned, or its defaults where it is not."""
    return dict(tuned(lab, target)["policies"].get(policy, {}).get("options", {}))


def most_tokens(lab: Lab, target: str, policy: str) -> Options:
    """The options with the most tokens per target pass of all that were tried, whatever they cost."""
    return dict(tuned(lab, target)["policies"][policy]["most_tokens"])


@dataclass
class Tried:
    """One configuration and what replaying it predicts."""

    options: Options
    tokens_per_s: float
    tokens_per_pass: float


def _tune(lab: Lab, target: str) -> Json:
    plan = lab.settings.tuning
    costs = lab.costs(target)
    recordings = lab.recordings(target, lab.lessons(target))
    ranked = {name: rank(recordings, costs, name, grid(name, recordings, lab)) for name in ("static", *plan.grids)}
    chosen = {name: with_default(found, plan.timed) for name, found in ranked.items()}
    speeds = _timed(lab, target, chosen)
    policies = {name: _entry(ranked[name], chosen[name], speeds[name]) for name in chosen}
    return {"costs": costs.state(), "rounds": sum(len(one.rounds) for one in recordings), "policies": policies}


def _entry(ranked: Sequence[Tried], chosen: Sequence[Tried], speeds: Sequence[float]) -> Json:
    timed: list[Json] = [
        {"options": one.options, "predicted": one.tokens_per_s, "tokens_per_s": speed, "is_default": not one.options}
        for one, speed in zip(chosen, speeds, strict=True)
    ]
    timed.sort(key=lambda one: float(one["tokens_per_s"]), reverse=True)
    greedy = max(ranked, key=lambda one: one.tokens_per_pass)
    return {"tried": len(ranked), "options": timed[0]["options"], "most_tokens": greedy.options, "timed": timed}


def with_default(found: Sequence[Tried], count: int) -> list[Tried]:
    """The `count` best, and the policy's defaults."""
    return [*found[:count], *(one for one in found[count:] if not one.options)]


def rank(recordings: Sequence[Recording], costs: Costs, policy: str, configurations: Sequence[Options]) -> list[Tried]:
    """Configurations by predicted tokens per second, their own time left out; the fastest first."""
    found = []
    for options in configurations:
        summary = replay(recordings, sage.policy(policy, **options), costs).summary()
        found.append(Tried(options, summary["tokens_per_s"], summary["tokens_per_target_pass"]))
    logger.info("  %s: %d configurations replayed", policy, len(found))
    return sorted(found, key=lambda one: -one.tokens_per_s)


def grid(policy: str, recordings: Sequence[Recording], lab: Lab) -> list[Options]:
    """Every configuration to try; the defaults come first."""
    plan = lab.settings.tuning
    if policy == "static":
        return [{}, *({"paths": paths} for paths in usual_paths(recordings, plan.static_sizes))]
    return [{}, *_products(plan.grids[policy])]


def _products(grids: Sequence[Mapping[str, Sequence[Any]]]) -> Iterator[Options]:
    for axes in grids:
        for values in product(*axes.values()):
            yield dict(zip(axes, values, strict=True))


def usual_paths(recordings: Sequence[Recording], sizes: Sequence[int]) -> list[list[list[int]]]:
    """Static trees of these sizes: the rank paths most often taken by the answers, over all recorded rounds.

    A path is taken at most as often as any of its prefixes, so the most frequent ones form a tree.
    """
    taken: Counter[tuple[int, ...]] = Counter()
    for recording in recordings:
        for recorded in recording.rounds:
            answer = recording.tokens[recorded.position :]
            ranks: tuple[int, ...] = ()
            for depth, token in enumerate(answer):
                known = recorded.said.get(tuple(answer[:depth]))
                if known is None or token not in (tokens := known[1].tolist()):
                    break
                ranks += (tokens.index(token),)
                taken[ranks] += 1
    order = sorted(taken, key=lambda path: (-taken[path], len(path), path))
    return [[list(path) for path in order[:size]] for size in dict.fromkeys(min(size, len(order)) for size in sizes) if size]


def _timed(lab: Lab, target: str, chosen: Mapping[str, Sequence[Tried]]) -> dict[str, list[float]]:
    """Measured tokens per second of every chosen configuration, interleaved on the validation split."""
    plan = lab.settings.tuning
    runners = {
        name: [lab.contestant(target, f"{name} {place}", name, one.options) for place, one in enumerate(found)]
        for name, found in chosen.items()
    }
    prompts = lab.prompts(target, "validation", lab.settings.families, plan.timed_prompts, start=plan.prompts)
    everybody = [runner for own in runners.values() for runner in own]
    measured = lab.contest(target, [*everybody, *lab.baselines(target)], prompts, plan.timed_repeats)
    return {name: [decode_rate(measured.runs[runner.name]) for runner in own] for name, own in runners.items()}
