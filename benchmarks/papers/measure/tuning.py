"""Tunes policies on the validation split: replays many configurations on the same drafts, then times the best few.

`static` is tuned by its tree: the n rank paths that recorded answers took most often. `cost_aware` keeps its defaults.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import sage
from benchmarks.papers.figures import Json
from benchmarks.papers.lab import Lab
from benchmarks.papers.measure.answers import ranks_on_path
from sage.bench.summary import decode_rate
from sage.costs.tables import Costs
from sage.replay.recording import Recording
from sage.replay.replay import replay

logger = logging.getLogger(__name__)
Options = dict[str, Any]


def tuning_figures(lab: Lab, target: str) -> Json:
    """Returns the figures `tuning_TARGET`.

    Returns:
        {"costs": cost tables, "rounds": number replayed, "policies": {name: {"tried": number of configurations, "options",
        "most_tokens": options, "timed": [{"options", "predicted", "tokens_per_s", "is_default"}]}}}; `timed` is sorted by
        decreasing speed.
    """
    plan, families, run = lab.settings.tuning, lab.settings.families, lab.settings.main_runs[target]
    return lab.figures("policies", f"tuning_{target}", lambda: _tune(lab, target), [run], tuning=plan, families=families)


def tuned_options(lab: Lab, target: str, policy: str) -> Options:
    """Returns the tuned options of a policy; empty (its defaults) if it is not tuned."""
    return dict(tuning_figures(lab, target)["policies"].get(policy, {}).get("options", {}))


def most_tokens(lab: Lab, target: str, policy: str) -> Options:
    """Returns the options with the most tokens per target pass of all that were replayed, regardless of cost."""
    return dict(tuning_figures(lab, target)["policies"][policy]["most_tokens"])


@dataclass
class Replayed:
    """One configuration and its predicted performance."""

    options: Options
    tokens_per_s: float
    tokens_per_pass: float


def _tune(lab: Lab, target: str) -> Json:
    plan = lab.settings.tuning
    costs = lab.costs(target)
    recordings = lab.recordings(target, lab.tuning_prompts(target))
    ranked = {name: rank(recordings, costs, name, grid(name, recordings, lab)) for name in ("static", *plan.grids)}
    chosen = {name: with_default(candidates, plan.timed) for name, candidates in ranked.items()}
    speeds = _timed(lab, target, chosen)
    policies = {name: _entry(ranked[name], chosen[name], speeds[name]) for name in chosen}
    return {"costs": costs.state(), "rounds": sum(len(one.rounds) for one in recordings), "policies": policies}


def _entry(ranked: Sequence[Replayed], chosen: Sequence[Replayed], speeds: Sequence[float]) -> Json:
    timed: list[Json] = [
        {"options": one.options, "predicted": one.tokens_per_s, "tokens_per_s": speed, "is_default": not one.options}
        for one, speed in zip(chosen, speeds, strict=True)
    ]
    timed.sort(key=lambda one: float(one["tokens_per_s"]), reverse=True)
    greedy = max(ranked, key=lambda one: one.tokens_per_pass)
    return {"tried": len(ranked), "options": timed[0]["options"], "most_tokens": greedy.options, "timed": timed}


def with_default(ranked: Sequence[Replayed], count: int) -> list[Replayed]:
    """Returns the `count` best and the defaults of the policy."""
    return [*ranked[:count], *(one for one in ranked[count:] if not one.options)]


def rank(recordings: Sequence[Recording], costs: Costs, policy: str, configurations: Sequence[Options]) -> list[Replayed]:
    """Returns configurations by decreasing predicted tokens per second; the time of the policy itself is not included."""
    found = []
    for options in configurations:
        summary = replay(recordings, sage.policy(policy, **options), costs).summary()
        found.append(Replayed(options, summary["tokens_per_s"], summary["tokens_per_target_pass"]))
    logger.info("  %s: %d configurations replayed", policy, len(found))
    return sorted(found, key=lambda one: -one.tokens_per_s)


def grid(policy: str, recordings: Sequence[Recording], lab: Lab) -> list[Options]:
    """Returns the configurations to replay, the defaults first."""
    plan = lab.settings.tuning
    if policy == "static":
        return [{}, *({"paths": paths} for paths in most_frequent_paths(recordings, plan.static_sizes))]
    return [{}, *(dict(zip(axes, values, strict=True)) for axes in plan.grids[policy] for values in product(*axes.values()))]


def most_frequent_paths(recordings: Sequence[Recording], sizes: Sequence[int]) -> list[list[list[int]]]:
    """Returns static trees of these sizes: the rank paths that the answers took most often, over all recorded rounds.

    A path is taken at most as often as each of its prefixes, so the most frequent paths form a tree.
    """
    taken: Counter[tuple[int, ...]] = Counter()
    for recording in recordings:
        for recorded in recording.rounds:
            ranks: tuple[int, ...] = ()
            for _, rank in ranks_on_path(recording, recorded):
                if rank is not None:
                    ranks += (rank,)
                    taken[ranks] += 1
    order = sorted(taken, key=lambda path: (-taken[path], len(path), path))
    return [[list(path) for path in order[:size]] for size in dict.fromkeys(min(size, len(order)) for size in sizes) if size]


def _timed(lab: Lab, target: str, chosen: Mapping[str, Sequence[Replayed]]) -> dict[str, list[float]]:
    """Returns the measured tokens per second of every chosen configuration, interleaved on the validation split."""
    plan = lab.settings.tuning
    runners = {
        name: [lab.variant(target, f"{name} {place}", name, one.options) for place, one in enumerate(found)]
        for name, found in chosen.items()
    }
    prompts = lab.prompts(target, "validation", lab.settings.families, plan.timed_prompts, start=plan.prompts)
    variants = [runner for group in runners.values() for runner in group]
    measured = lab.run_comparison(target, [*variants, *lab.baselines(target)], prompts, plan.timed_repeats)
    return {name: [decode_rate(measured.runs[runner.name]) for runner in group] for name, group in runners.items()}
