"""Contribution of each part of `sage` and `cost_aware`: timed side by side, and replayed on the same drafts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure

import sage
from benchmarks.papers.figures import Json
from benchmarks.papers.lab import Lab, compare, select
from benchmarks.papers.study import OURS, Expectation, Study
from benchmarks.papers.tuning import depth_on_path, tuned_options
from sage.bench.runners import PolicyRunner
from sage.costs.tables import Costs, Curve
from sage.planning.base import Policy
from sage.planning.tree import RoundOutcome
from sage.replay.recording import Recording
from sage.replay.replay import replay
from sage.trees.cost_aware.policy import CostAware
from train.report import style

SAGE_CHANGES = ({"alpha_from": "root"}, {"alpha_from": "current"}, {"history": False}, {"top_k": 4}, {"top_k": 16})
COST_AWARE_CHANGES = ({"calibrate": False}, {"stop": False}, {"sees_ends": False})
ASSUMED_COSTS = "assumed costs"
ASSUMED_LEVEL = 0.1  # of a pass
ASSUMED_NODES = 65
REPLAYED = ("tokens_per_target_pass", "nodes_per_round", "tokens_per_s", "coverage")
TIMED = ("tokens_per_target_pass", "nodes_per_round", "draft_steps_per_round", "speedup", "speedup_ci", "match", "total")
NOISE = 1.001  # of replayed speeds
ORACLE_SHARE = 0.75


class AssumedCosts(CostAware):
    """`cost_aware` with constant costs: a pass costs the same for every tree, a draft level `ASSUMED_LEVEL` of it.

    Args:
        pass_s: seconds of a pass of one token.
    """

    def __init__(self, pass_s: float) -> None:
        super().__init__()
        nodes = [1, ASSUMED_NODES]
        self.assumed = Costs(Curve(nodes, [pass_s] * 2), Curve(nodes, [ASSUMED_LEVEL * pass_s] * 2), 0)
        self.costs = self.assumed

    def observe(self, outcome: RoundOutcome) -> dict[str, float]:
        figures = super().observe(outcome)
        self.costs = Costs.from_state(self.assumed.state())
        return figures


def _measure(lab: Lab) -> None:
    """Measures `ablations` for the first target."""
    target, sizes = lab.targets[0], lab.sizes["ablations"]
    tuned = tuned_options(lab, target, "sage")

    def compute() -> Json:
        costs, prompts = lab.costs(target), lab.test_prompts(target, "ablations")
        model, draft, pass_s = lab.target(target), lab.main_draft(target), costs.verify(1)
        runners = [PolicyRunner(model, draft, label, policy) for label, policy in ablation_policies(tuned, pass_s).items()]
        timed = compare(lab, target, runners, prompts, sizes["repeats"])["policies"]
        recordings = lab.recordings(target, prompts)
        replayed = {label: _replay(recordings, policy, costs) for label, policy in ablation_policies(tuned, pass_s).items()}
        return {
            "target": target,
            "prompts": len(prompts),
            "options": tuned,
            "rows": [{"label": label, **select(timed[label], TIMED), "replayed": part} for label, part in replayed.items()],
            "oracle": oracle(recordings, costs, CostAware().max_depth),
            "autoregressive_tokens_per_s": 1 / (costs.verify(1) + costs.overhead),
        }

    lab.figures("ablations", "ablations", compute, lab.main_runs(target), study=sizes, options=tuned)


def ablation_policies(tuned: Mapping[str, Any], pass_s: float) -> dict[str, Policy]:
    """Returns new policies by label: tuned `sage` and default `cost_aware`, each followed by its variants."""
    changes = (*SAGE_CHANGES, {"threshold": "cumulative" if tuned.get("threshold") == "node" else "node"})
    return {
        "sage": sage.policy("sage", **tuned),
        **{f"sage, {_label(change)}": sage.policy("sage", **{**tuned, **change}) for change in changes},
        OURS: sage.policy(OURS),
        **{f"{OURS}, {_label(change)}": sage.policy(OURS, **change) for change in COST_AWARE_CHANGES},
        f"{OURS}, {ASSUMED_COSTS}": AssumedCosts(pass_s),
    }


def _label(change: Mapping[str, Any]) -> str:
    return ", ".join(f"{key}={str(value).lower()}" for key, value in change.items())


def _replay(recordings: Sequence[Recording], policy: Policy, costs: Costs) -> Json:
    """Returns the figures of a policy; of its second replay if it learns online.

    `AssumedCosts` plans with the assumed costs and is charged the measured ones.
    """
    planned = policy.assumed if isinstance(policy, AssumedCosts) else costs
    if policy.needs_costs:
        replay(recordings, policy, planned)
    replayed = replay(recordings, policy, planned)
    summary = replayed.summary()
    if planned is not costs:
        spent_s = sum(one.seconds(costs, costs.context) for one in replayed.rounds)
        summary["tokens_per_s"] = sum(one.emitted for one in replayed.rounds) / spent_s
    return select(summary, REPLAYED)


def oracle(recordings: Sequence[Recording], costs: Costs, max_depth: int) -> Json:
    """Returns the figures of a policy with perfect knowledge of acceptance on these drafts.

    In every round it drafts only along the answer, as deep as the recorded candidates contain it and as it pays. The price of a
    second is the oracle's own speed, found by Dinkelbach's iteration: every round's depth maximizes tokens - price * seconds.
    """
    rounds = [
        (min(depth_on_path(recording, one), max_depth), len(recording.tokens) - one.position)
        for recording in recordings
        for one in recording.rounds
    ]
    price = tokens = 0.0
    for _ in range(20):
        chosen = [_best_depth(reachable, left, costs, price) for reachable, left in rounds]
        tokens, seconds = sum(one[0] for one in chosen), sum(one[1] for one in chosen)
        if abs(tokens / seconds - price) < 1e-9 * price:
            break
        price = tokens / seconds
    return {
        "tokens_per_target_pass": tokens / len(rounds),
        "nodes_per_round": sum(one[2] for one in chosen) / len(rounds),
        "tokens_per_s": price,
    }


def _best_depth(reachable: int, left: int, costs: Costs, price: float) -> tuple[int, float, int]:
    """Returns tokens, seconds and depth of the best depth up to `reachable`; `left` tokens of the answer remain."""
    options = []
    for depth in range(reachable + 1):
        seconds = costs.verify_s(depth + 1, costs.context) + depth * costs.draft(1) + costs.overhead
        options.append((min(depth + 1, left), seconds, depth))
    return max(options, key=lambda one: one[0] - price * one[1])


def _expectations(found: Json) -> Iterator[Expectation]:
    """The replay decides, because replays share every draft; the timed difference is reported with it."""
    rows = {row["label"]: row for row in found["rows"]}
    speeds = {label: row["replayed"]["tokens_per_s"] for label, row in rows.items()}
    for name, whose in ((OURS, "Ours"), ("sage", "SAGE")):
        for label in (label for label in rows if label.startswith(f"{name}, ")):
            timed = rows[label]["speedup"] / rows[name]["speedup"] - 1
            claim = f"{whose}: `{name}` at least as fast as with *{label.removeprefix(f'{name}, ')}*"
            evidence = f"variant {speeds[label] / speeds[name] - 1:+.1%} replayed, {timed:+.1%} timed"
            yield Expectation(claim, speeds[label] <= speeds[name] * NOISE, evidence)
    share = speeds[OURS] / found["oracle"]["tokens_per_s"]
    claim = f"Ours: `{OURS}` within {1 - ORACLE_SHARE:.0%} of the oracle's speed, replayed"
    yield Expectation(claim, share >= ORACLE_SHARE, f"{share:.0%} of it")


def _draw(found: Json) -> Figure:
    """Draws the replayed tokens per second of every variant, the oracle last."""
    speeds = {row["label"]: row["replayed"]["tokens_per_s"] for row in found["rows"]}
    speeds["oracle"] = found["oracle"]["tokens_per_s"]
    figure = style.figure(1.2 + 0.31 * len(speeds), "Ablations", "tokens per second, replayed on the same drafts")
    axes = figure.subplots()
    for place, (label, speed) in enumerate(speeds.items()):
        color = style.BAND if label == "oracle" else style.policy_color(label.split(",")[0])
        axes.barh(place, speed, height=0.62, color=color)
        axes.text(speed, place, f" {speed:.0f}", va="center", fontsize=9)
    axes.margins(x=0.1)
    style.label_bars(axes, list(speeds))
    style.despine(axes, "x")
    return figure


STUDY = Study(
    name="ablations",
    measure=_measure,
    expectations=_expectations,
    values=lambda _: {"assumed_costs": ASSUMED_COSTS, "assumed_level": f"{ASSUMED_LEVEL:.0%}"},
    plots={"ablations.png": _draw},
)
