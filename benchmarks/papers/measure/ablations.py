"""What each part of `sage` and of `cost_aware` is worth: timed side by side, and replayed on the same drafts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import sage
from benchmarks.papers.figures import Json
from benchmarks.papers.lab import Lab
from benchmarks.papers.measure.tuning import options_of
from benchmarks.papers.page.tables import kept
from sage.bench import PolicyRunner
from sage.costs.tables import Costs, Curve
from sage.replay.recording import RecordedRound, Recording
from sage.replay.replay import replay
from sage.trees import Policy
from sage.trees.cost_aware.policy import CostAware
from sage.trees.tree import Outcome

SAGE_PARTS: Mapping[str, Mapping[str, Any]] = {
    "alpha of the last round's root": {"alpha_from": "root"},
    "alpha of this round": {"alpha_from": "current"},
    "no history": {"history": False},
    "the other threshold": {},  # filled in: it depends on what was tuned
    "k 4": {"top_k": 4},
    "k 16": {"top_k": 16},
}
COST_PARTS: Mapping[str, Mapping[str, Any]] = {
    "no calibration": {"calibrate": False},
    "no stop": {"stop": False},
    "blind to ends": {"sees_ends": False},
}
GUESSED_COSTS, ORACLE = "guessed costs", "oracle"
GUESSED_LEVEL = 0.1  # of a pass
GUESSED_NODES = 65


class GuessedCosts(CostAware):
    """`cost_aware` that measures nothing and corrects nothing: a pass costs the same whatever its tree, a level a tenth.

    Args:
        pass_s: seconds of a pass of one token.
    """

    def __init__(self, pass_s: float) -> None:
        super().__init__()
        self.guess = Costs(Curve([1, GUESSED_NODES], [pass_s] * 2), Curve([1, GUESSED_NODES], [GUESSED_LEVEL * pass_s] * 2), 0)
        self.costs = self.guess

    def observe(self, outcome: Outcome) -> None:
        super().observe(outcome)
        self.costs = Costs.from_state(self.guess.state())


def measure_ablations(lab: Lab) -> None:
    """`ablations`, for the first target."""
    target = next(iter(lab.settings.targets))
    study, tuned = lab.settings.ablations, options_of(lab, target, "sage")
    inputs = lab.origin(lab.settings.main[target]) | lab.study(study) | {"options": tuned}
    lab.make("ablations", "ablations", inputs, lambda: _measure(lab, target, tuned))


def variants(tuned: Mapping[str, Any], pass_s: float) -> dict[str, Policy]:
    """Fresh policies by label: what was tuned and `cost_aware` first, each followed by itself without a part."""
    other = "cumulative" if tuned.get("threshold", "cumulative") == "node" else "node"
    parts = {**SAGE_PARTS, "the other threshold": {"threshold": other}}
    return {
        "sage": sage.policy("sage", **tuned),
        **{f"sage, {label}": sage.policy("sage", **{**tuned, **change}) for label, change in parts.items()},
        "cost_aware": sage.policy("cost_aware"),
        **{f"cost_aware, {label}": sage.policy("cost_aware", **change) for label, change in COST_PARTS.items()},
        f"cost_aware, {GUESSED_COSTS}": GuessedCosts(pass_s),
    }


def _measure(lab: Lab, target: str, tuned: Mapping[str, Any]) -> Json:
    study, costs = lab.settings.ablations, lab.costs(target)
    pass_s, prompts = costs.verify(1), lab.tested(target, study)
    model, draft = lab.target(target), lab.main(target)
    runners = [PolicyRunner(model, draft, label, policy) for label, policy in variants(tuned, pass_s).items()]
    measured = kept(
        lab.contest(target, [*runners, *lab.baselines(target)], prompts, study.repeats), model, [r.name for r in runners]
    )
    recordings = lab.recordings(target, prompts)
    replayed = {label: _replayed(recordings, policy, costs) for label, policy in variants(tuned, pass_s).items()}
    rows = [{"label": label, **_row(measured["policies"][label]), "replayed": own} for label, own in replayed.items()]
    return {
        "target": target,
        "prompts": len(prompts),
        "options": dict(tuned),
        "rows": rows,
        "oracle": oracle(recordings, costs, CostAware().max_depth),
        "autoregressive_tokens_per_s": 1 / (costs.verify(1) + costs.overhead),
    }


def _row(part: Mapping[str, Any]) -> Json:
    names = ("tokens_per_target_pass", "nodes_per_round", "draft_steps_per_round", "speedup", "speedup_ci", "match", "total")
    return {name: part[name] for name in names if name in part}


def _replayed(recordings: Sequence[Recording], policy: Policy, costs: Costs) -> Json:
    """A policy that learns sees the drafts once before it counts. One that brings costs of its own keeps them."""
    if isinstance(policy, GuessedCosts):
        return _priced(recordings, policy, costs)
    if policy.learns:
        replay(recordings, policy, costs)
    return _short(replay(recordings, policy, costs).summary())


def _priced(recordings: Sequence[Recording], policy: GuessedCosts, costs: Costs) -> Json:
    """Planned at the guess, charged at the true costs."""
    replay(recordings, policy, policy.guess)
    found = replay(recordings, policy, policy.guess)
    spent = sum(
        costs.verify_s(one.nodes + 1, costs.context) + sum(costs.draft(width) for width in one.widths) + costs.overhead
        for one in found.rounds
    )
    summary = found.summary()
    return _short(summary | {"tokens_per_s": sum(one.emitted for one in found.rounds) / spent})


def _short(summary: Mapping[str, float]) -> Json:
    return {name: summary[name] for name in ("tokens_per_target_pass", "nodes_per_round", "tokens_per_s", "coverage")}


def oracle(recordings: Sequence[Recording], costs: Costs, max_depth: int) -> Json:
    """What perfect knowledge of acceptance would give on these drafts: in every round it drafts along the answer only, as far
    as the recorded candidates hold it and as a second is worth drafting, and verifies nothing that is refused.

    The price of time is its own speed, found by iteration (Dinkelbach): each round's depth maximises tokens - price * seconds.
    """
    rounds = [
        (_reach(recording, one, max_depth), len(recording.tokens) - one.position)
        for recording in recordings
        for one in recording.rounds
    ]
    price = tokens = 0.0
    for _ in range(20):
        chosen = [_best(reach, left, costs, price) for reach, left in rounds]
        tokens, seconds = sum(one[0] for one in chosen), sum(one[1] for one in chosen)
        if abs(tokens / seconds - price) < 1e-9 * price:
            break
        price = tokens / seconds
    return {
        "tokens_per_target_pass": tokens / len(rounds),
        "nodes_per_round": sum(one[2] for one in chosen) / len(rounds),
        "tokens_per_s": price,
    }


def _reach(recording: Recording, recorded: RecordedRound, max_depth: int) -> int:
    """How deep the recorded candidates follow the answer."""
    answer = tuple(recording.tokens[recorded.position :][:max_depth])
    for depth, token in enumerate(answer):
        known = recorded.said.get(answer[:depth])
        if known is None or token not in known[1].tolist():
            return depth
    return len(answer)


def _best(reach: int, left: int, costs: Costs, price: float) -> tuple[int, float, int]:
    """Tokens, seconds and nodes of the best depth."""
    options = []
    for depth in range(reach + 1):
        seconds = costs.verify_s(depth + 1, costs.context) + depth * costs.draft(1) + costs.overhead
        options.append((min(depth + 1, left), seconds, depth))
    return max(options, key=lambda one: one[0] - price * one[1])
