"""Tunes policies on the validation split: replays many configurations on the same drafts, then times the best few.

`static` is tuned by its tree: the n rank paths that recorded answers took most often. `cost_aware` keeps its defaults. Studies
share `ranks_on_path`: how far, and at which ranks, the recorded candidates of a draft contain the tokens of the answer.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import product

from torch import Tensor

import sage
from benchmarks.papers.figures import Json
from benchmarks.papers.lab import Lab, compare
from sage.costs.tables import Costs
from sage.replay.recording import RecordedRound, Recording
from sage.replay.replay import replay

logger = logging.getLogger(__name__)


def ranks_on_path(recording: Recording, recorded: RecordedRound) -> Iterator[tuple[Tensor, int | None]]:
    """Yields, per recorded node on the path of the answer, the probabilities of its candidates [K] and the rank of the token.

    The rank of the answer's token is None, and the path ends, where the token is not among the candidates.
    """
    answer = tuple(recording.tokens[recorded.position :])
    for depth, token in enumerate(answer):
        if answer[:depth] not in recorded.candidates:
            return
        probs, candidates = recorded.candidates[answer[:depth]]
        tokens = candidates.tolist()
        yield probs, tokens.index(token) if token in tokens else None
        if token not in tokens:
            return


def depth_on_path(recording: Recording, recorded: RecordedRound) -> int:
    """Returns the number of tokens of the answer that the candidates of a round contain."""
    return sum(rank is not None for _, rank in ranks_on_path(recording, recorded))


def tuning_figures(lab: Lab, target: str) -> Json:
    """Returns the figures `tuning_TARGET`.

    Returns:
        {"costs": cost tables, "rounds": number replayed, "policies": {name: {"tried": number of configurations, "options",
        "most_tokens": options, "timed": [{"options", "predicted", "tokens_per_s", "is_default"}]}}}; `timed` is sorted by
        decreasing speed.
    """
    inputs = {"tuning": lab.sizes["tuning"], "families": lab.settings.families}
    return lab.figures("policies", f"tuning_{target}", lambda: _tune(lab, target), lab.main_runs(target), **inputs)


def tuned_options(lab: Lab, target: str, policy: str) -> Json:
    """Returns the tuned options of a policy; empty (its defaults) if it is not tuned."""
    return dict(tuning_figures(lab, target)["policies"].get(policy, {}).get("options", {}))


def most_tokens(lab: Lab, target: str, policy: str) -> Json:
    """Returns the options with the most tokens per target pass of all that were replayed, regardless of cost."""
    return dict(tuning_figures(lab, target)["policies"][policy]["most_tokens"])


def _tune(lab: Lab, target: str) -> Json:
    plan, costs = lab.sizes["tuning"], lab.costs(target)
    recordings = lab.recordings(target, lab.tuning_prompts(target))
    ranked = {name: _rank(lab, recordings, costs, name) for name in ("static", *plan["grids"])}
    chosen = {  # the best ones and the defaults of the policy
        name: [one for place, one in enumerate(found) if place < plan["timed"] or not one["options"]]
        for name, found in ranked.items()
    }
    runners = {
        name: [lab.runner(target, f"{name} {place}", name, one["options"]) for place, one in enumerate(found)]
        for name, found in chosen.items()
    }
    prompts = lab.prompts(target, "validation", lab.settings.families, plan["timed_prompts"], start=plan["prompts"])
    timed = compare(lab, target, sum(runners.values(), []), prompts, plan["timed_repeats"])["policies"]
    policies = {
        name: _entry(ranked[name], found, [timed[runner.name]["tokens_per_s"] for runner in runners[name]])
        for name, found in chosen.items()
    }
    return {"costs": costs.state(), "rounds": sum(len(one.rounds) for one in recordings), "policies": policies}


def _rank(lab: Lab, recordings: Sequence[Recording], costs: Costs, policy: str) -> list[Json]:
    """Returns configurations by decreasing predicted tokens per second; the time of the policy itself is not included."""
    found = []
    for options in _configurations(lab, recordings, policy):
        summary = replay(recordings, sage.policy(policy, **options), costs).summary()
        found.append({"options": options, "speed": summary["tokens_per_s"], "tokens": summary["tokens_per_target_pass"]})
    logger.info("  %s: %d configurations replayed", policy, len(found))
    return sorted(found, key=lambda one: -one["speed"])


def _configurations(lab: Lab, recordings: Sequence[Recording], policy: str) -> list[Json]:
    """Returns the configurations to replay, the defaults first."""
    plan = lab.sizes["tuning"]
    if policy == "static":
        return [{}, *({"paths": paths} for paths in most_frequent_paths(recordings, plan["static_sizes"]))]
    grids = plan["grids"][policy]
    return [{}, *(dict(zip(axes, values, strict=True)) for axes in grids for values in product(*axes.values()))]


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


def _entry(ranked: Sequence[Json], chosen: Sequence[Json], speeds: Sequence[float]) -> Json:
    timed: list[Json] = [
        {"options": one["options"], "predicted": one["speed"], "tokens_per_s": speed, "is_default": not one["options"]}
        for one, speed in zip(chosen, speeds, strict=True)
    ]
    timed.sort(key=lambda one: -one["tokens_per_s"])
    greedy = max(ranked, key=lambda one: float(one["tokens"]))
    return {"tried": len(ranked), "options": timed[0]["options"], "most_tokens": greedy["options"], "timed": timed}
