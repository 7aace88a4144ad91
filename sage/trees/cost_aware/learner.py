"""Statistics of verified rounds: acceptance probabilities, acceptance mass, pass costs, and the price of time.

Shapes: M labelled candidates, R ranks.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from sage.costs.calibration import Acceptance, Calibrator, Reliability
from sage.costs.tables import Costs
from sage.planning.tree import RoundOutcome
from sage.runtime.host_tensors import CPU, double_tensor, long_tensor
from sage.trees.cost_aware.pricing import ChildMass

OFF_PATH_WEIGHT = 0.1
LIVE_RATE = 0.05
LABELLED_RANKS = 4
LEARN_ALL_ROUNDS = 128  # number of initial rounds that are all learned from; after them, one in LEARN_ONE_IN
LEARN_ONE_IN = 8
LEARN_EVERY = 16  # pending rounds per learning step; the first steps are after 1, 2, 4, 8 and 16 rounds
ALONE = (0, 1)  # rows of other requests in a pass, and number of requests
OUTLIER = 3  # times an expected time: timings beyond are interruptions
FIRST_TOKENS = 1.5  # tokens of a round without drafting, assumed before any round


@dataclass
class Extras:
    """Seconds that a draft pass of a request takes beyond its share of the pass of several requests: work of the host."""

    first_s: float = 0.0
    level_s: float = 0.0


@dataclass
class PendingRound:
    """A round that the learner has not processed yet; fields as in `CostPlan`, `others` as in `ALONE`."""

    outcome: RoundOutcome
    drafting_s: float
    masses: list[tuple[int, float, float]]
    left_out: float = 0.0
    others: tuple[int, int] = ALONE


class Learner:
    """Learns from verified rounds in batches; arguments as for `CostAware`.

    Attributes:
        before, after: reliability of the draft's own and of the calibrated probabilities.
        rounds: rounds observed.
        usual_size: moving average of the number of verified nodes.
        left_out: moving average of `CostPlan.left_out`, of requests that do not share their passes.
        pending: rounds that are not processed yet.
        extras: of a request that shares its passes, by the number of requests.
    """

    def __init__(self, calibrate: bool, memory: float, max_depth: int) -> None:
        self.calibrate, self.memory = calibrate, memory
        self.calibrator = Calibrator()
        self.mass = ChildMass(max_depth)
        self.before, self.after = Reliability(), Reliability()
        self.rounds = 0
        self.usual_size = 8.0
        self.left_out = 0.0
        self.pending: list[PendingRound] = []
        self.extras: dict[int, Extras] = {}
        self._tokens = self._seconds = 0.0

    def successor(self) -> Learner:
        """Returns a learner for candidates of another kind. It starts from what this one knows and learns like a new one."""
        other = Learner(self.calibrate, self.memory, len(self.mass.sums) - 1)
        other.calibrator = Calibrator(start=self.calibrator.weights.clone())
        means = self.mass.table(len(self.mass.sums) - 1)
        other.mass.sums = [
            [mean * count for mean, count in zip(*row, strict=False)] for row in zip(means, other.mass.counts, strict=True)
        ]
        other._tokens, other._seconds = self._tokens, self._seconds
        other.usual_size, other.left_out = self.usual_size, self.left_out
        return other

    def price(self, costs: Costs, requests: int = 1) -> float:
        """Returns lambda, the tokens per second of recent rounds; before any round, the speed without speculation. With several
        requests, which are taken to be alike, it is that of all.
        """
        undrafted_s = costs.verify(1) + requests * costs.overhead
        return (self._tokens + requests * FIRST_TOKENS) / (self._seconds + undrafted_s)

    def needs_round(self, num_skipped: int) -> bool:
        """Returns whether the round about to start is learned from; `num_skipped` rounds were not drafted for before it."""
        return self.rounds < LEARN_ALL_ROUNDS or num_skipped > 0 or self.rounds % LEARN_ONE_IN == 0

    @property
    def acceptance(self) -> Acceptance:
        """Returns the function from a node's candidates, their depth and a least probability to their acceptance probabilities
        up to the first below it.
        """
        return self.calibrator.leading if self.calibrate else _own_leading

    def is_due(self) -> bool:
        """Returns whether enough rounds are pending for a learning step."""
        return len(self.pending) >= min(LEARN_EVERY, self.rounds / 2)

    def learn(self, costs: Costs) -> bool:
        """Processes the pending rounds and corrects `costs` in place; returns whether there were any."""
        if not self.pending:
            return False
        for one in self.pending:
            self.learn_prices(one, costs)
            for depth, acceptance, mass in one.masses:
                self.mass.learn(depth, acceptance, mass)
        evidence = labelled_candidates(one.outcome for one in self.pending) if self.calibrate else None
        self.pending.clear()
        if evidence is not None:
            probs, depths, labels, weights = evidence
            self.before.add(depths, probs, labels)
            self.after.add(depths, self.calibrator.learn(probs, depths, labels, weights), labels)
        return True

    def costs_of(self, costs: Costs, others: tuple[int, int]) -> Costs:
        """Returns the costs for a request that shares its passes with `others`."""
        if others == ALONE:
            return costs
        joint, extras = costs.joint(*others), self.extras.get(others[1], Extras())
        joint.commit_s = joint.first_level_s + extras.first_s
        joint.draft.seconds = [seconds + extras.level_s for seconds in joint.draft.seconds]
        return joint

    def learn_prices(self, one: PendingRound, costs: Costs) -> None:
        """Updates lambda. Times are those of the cost tables, because a single timing may include an interruption; those of
        several requests, whose work on the host adds up, are measured unless they are far off.
        """
        outcome, size, requests = one.outcome, len(one.outcome.tree), one.others[1]
        if one.others == ALONE:
            correct_costs(costs, outcome)
            seconds = costs.verify_s(size, outcome.context) + one.drafting_s + costs.overhead
            self.left_out += LIVE_RATE * (one.left_out - self.left_out)
        else:
            seconds = self._learn_joint(one, costs)
        self._tokens = self.memory * self._tokens + requests * (outcome.accepted + 1)
        self._seconds = self.memory * self._seconds + seconds
        self.usual_size += LIVE_RATE * (size - self.usual_size)

    def _learn_joint(self, one: PendingRound, costs: Costs) -> float:
        """Updates `extras`; returns the seconds of the round of all requests, which are taken to be alike."""
        outcome, requests, times = one.outcome, one.others[1], one.outcome.times()
        joint, extras = costs.joint(*one.others), self.extras.setdefault(requests, Extras())
        for width, measured in times.draft:
            name = "level_s" if width else "first_s"
            extra, (expected,) = getattr(extras, name), joint.drafting_s([width])
            bound = OUTLIER * (expected + max(extra, expected))
            setattr(extras, name, max(extra + LIVE_RATE * (min(measured, bound) - expected - extra), 0.0))
        seconds = joint.verify_s(len(outcome.tree), outcome.context) + requests * (one.drafting_s + costs.overhead)
        measured = requests * times.total_s
        return measured if seconds / OUTLIER < measured < OUTLIER * seconds else seconds

    def state(self) -> dict[str, Any]:
        """Returns the learned state as plain numbers."""
        return {
            "calibrator": self.calibrator.state(),
            "mass": {"sums": self.mass.sums, "counts": self.mass.counts},
            "tokens": self._tokens,
            "seconds": self._seconds,
            "rounds": self.rounds,
            "usual_size": self.usual_size,
            "left_out": self.left_out,
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Restores `state`; pending rounds are dropped."""
        self.calibrator.load_state(state["calibrator"])
        self.mass.sums, self.mass.counts = ([[*row] for row in state["mass"][key]] for key in ("sums", "counts"))
        self._tokens, self._seconds, self.rounds = state["tokens"], state["seconds"], state["rounds"]
        self.usual_size = state.get("usual_size", self.usual_size)  # missing in states of earlier versions
        self.left_out = state.get("left_out", self.left_out)
        self.pending.clear()


def _own_leading(probs: list[float], depth: int, least: float) -> list[float]:
    return [prob for prob in probs if prob >= least]


def correct_costs(costs: Costs, outcome: RoundOutcome) -> None:
    """Moves the cost tables towards the timings of a round."""
    times = outcome.times()
    expected_s = costs.verify_s(len(outcome.tree), outcome.context)
    costs.verify.correct(expected_s, times.verify_s, LIVE_RATE)
    for width, seconds in times.draft:
        if width == 0:
            costs.correct_commit(seconds, LIVE_RATE)
        else:
            costs.draft.correct(costs.draft(width), seconds, LIVE_RATE)
    explained = times.verify_s + sum(seconds for _, seconds in times.draft)
    costs.overhead += LIVE_RATE * (max(times.total_s - explained, 0.0) - costs.overhead)


def labelled_candidates(outcomes: Iterable[RoundOutcome]) -> tuple[Tensor, Tensor, Tensor, Tensor] | None:
    """Collects the candidates of every expanded node; None without one.

    Returns draft probabilities [M, R], depths [M] of the candidates, labels [M, R] and weights [M].
    """
    draft_probs: list[float] = []
    labels: list[float] = []
    depths: list[int] = []
    weights: list[float] = []
    ranks = 0
    for outcome in outcomes:
        tree, path = outcome.tree, set(outcome.path)
        for label in outcome.labels(LABELLED_RANKS):
            labels += label
        for node, topk in enumerate(tree.draft_topk):
            if topk is not None:
                probs = topk[0][:LABELLED_RANKS]
                draft_probs += probs
                ranks = len(probs)
                depths.append(tree.columns.depths[node] + 1)
                weights.append(1.0 if node in path else OFF_PATH_WEIGHT)
    if not draft_probs:
        return None
    return (
        double_tensor(draft_probs).view(-1, ranks),
        long_tensor(depths, CPU),
        double_tensor(labels).view(-1, ranks),
        double_tensor(weights),
    )
