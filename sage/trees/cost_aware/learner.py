"""What `cost_aware` learns from verified rounds: acceptance probabilities and mass, costs of passes, and prices.

Shapes: M labelled candidates, R ranks.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

from sage.costs.calibration import Acceptance, Calibrator
from sage.costs.tables import Costs, correction
from sage.planning.tree import RoundOutcome
from sage.runtime.host_tensors import CPU, double_tensor, long_tensor

CONFIDENCE_BINS = 4
LEAST_SIZE = 4  # nodes of the smallest tree that the price of a node is taken from
OFF_PATH_WEIGHT = 0.1
LIVE_RATE = 0.05
LABELLED_RANKS = 4
LEARN_ALL_ROUNDS = 128  # number of initial rounds that are all learned from; after them, one in LEARN_ONE_IN
LEARN_ONE_IN = 8
LEARN_EVERY = 16  # pending rounds per learning step; the first steps are after 1, 2, 4, 8 and 16 rounds
ALONE = (0, 1)  # rows of other requests in a pass, and number of requests
OUTLIER = 3  # times an expected time: timings beyond are interruptions
FIRST_TOKENS = 1.5  # tokens of a round without drafting, assumed before any round
PACE_MEMORY = 0.98  # share of the evidence that is kept from one round to the next
TRIAL_ROUNDS, TRIAL_REQUESTS = 6, 32  # a trial has at least as many rounds, and rounds of requests
MIN_GAP, MAX_GAP = 64, 1024  # rounds between two trials, after the first one


class Prices(NamedTuple):
    """Prices of one round; constant between two learning steps.

    Attributes:
        tokens_per_s: lambda, the price of a second.
        node: price of one more node of a tree of usual size, in tokens.
        levels: price of a level of 1, 2, .. expanded nodes, verification of as many nodes included, in tokens.
        level_s: seconds of drafting such a level.
        first_s: seconds of the draft pass over the accepted tokens, whose candidates are the first level.
        verify_s: seconds of verifying 1, 2, .. nodes.
        masses: acceptance mass of children, by depth and confidence (`ChildMass.table`).
    """

    tokens_per_s: float
    node: float
    levels: list[float]
    level_s: list[float]
    first_s: float
    verify_s: list[float]
    masses: list[list[float]]

    @classmethod
    def of(
        cls,
        tokens_per_s: float,
        costs: Costs,
        usual_size: float,
        left_out: float,
        nodes: int,
        width: int,
        masses: list[list[float]],
    ) -> Prices:
        """Returns the prices under measured costs.

        Args:
            tokens_per_s: the price of a second.
            usual_size: usual number of nodes of a tree. The mean slope of the cost curve up to it is the price of a node while
                levels are drafted; the final selection uses the curve itself. Beyond it, a kernel may need one more tile of
                rows, at the price of a third of a pass: no reason to draft less than fits into those that are needed anyway.
            left_out: usual P of the best node that was drafted and not verified. A node must promise half of it at least:
                where rows of a tile are free, the slope alone would let any number of nodes be drafted for a few rows.
            nodes, width: maximum number of verified nodes, and of expanded nodes of a level.
        """
        size = max(round(usual_size), LEAST_SIZE)
        node = max(tokens_per_s * (costs.verify(size) - costs.verify(2)) / (size - 2), left_out / 2, 0.0)
        level_s = costs.draft.up_to(width)
        levels = [tokens_per_s * seconds + count * node for count, seconds in enumerate(level_s, start=1)]
        return cls(tokens_per_s, node, levels, level_s, costs.first_level_s, costs.verify.up_to(nodes + 1), masses)


@dataclass(slots=True)
class Plan:
    """Plan of one round.

    Attributes:
        acceptance: acceptance probabilities of candidates, as learned before this round.
        has_feedback: whether the round is used for learning.
        others: rows of other requests in its passes, and number of requests.
        gain, level_cost: expected tokens of the level considered last, and the price of its time in tokens.
        expanded: deepest level for which the draft ran.
        levels: deepest level with nodes worth verifying.
        expected: expected accepted tokens of the selected nodes.
        left_out: P of the most probable node that was drafted and not selected; 0 if all were.
        drafting_s: seconds of the draft passes by the cost tables.
        masses: depth, own acceptance probability and acceptance mass of the candidates of each expanded node, with feedback.
        paths: P of each drafted node.
        frontier: P and own acceptance probability of each frontier node.
    """

    prices: Prices
    acceptance: Acceptance
    has_feedback: bool
    others: tuple[int, int] = ALONE
    gain: float = 0.0
    level_cost: float = 0.0
    expanded: int = 0
    levels: int = 0
    expected: float = 0.0
    left_out: float = 0.0
    drafting_s: float = 0.0
    masses: list[tuple[int, float, float]] = field(default_factory=list)
    paths: list[float] = field(default_factory=list)
    frontier: list[tuple[float, float]] = field(default_factory=lambda: [(1.0, 1.0)])

    def log_entry(self) -> dict[str, float]:
        """Returns the figures for `Stats.rounds_log`."""
        names = ("gain", "level_cost", "expanded", "levels", "expected")
        return {"price": self.prices.tokens_per_s, "drafted": len(self.paths)} | {name: getattr(self, name) for name in names}


class ChildMass:
    """s(depth, confidence): mean acceptance mass of the candidates below a node, used before the node is expanded.

    `confidence` is the acceptance probability of the node itself, in CONFIDENCE_BINS equal bins.
    """

    def __init__(self, most_depth: int, start: float = 0.75, weight: float = 2.0, memory: float = 0.995) -> None:
        self.memory = memory
        self.sums = [[start * weight] * CONFIDENCE_BINS for _ in range(most_depth + 1)]
        self.counts = [[weight] * CONFIDENCE_BINS for _ in range(most_depth + 1)]

    def table(self, most_depth: int) -> list[list[float]]:
        """Returns, by depth, the mean mass below a node of acceptance probability a, at index int(a * CONFIDENCE_BINS)."""
        cells = zip(self.sums, self.counts, strict=True)
        means = [[total / count for total, count in zip(*row, strict=True)] for row in cells]
        means = [[*row, row[-1]] for row in means]  # a = 1
        return [means[min(depth, len(means) - 1)] for depth in range(most_depth + 1)]

    def learn(self, depth: int, acceptance: float, mass: float) -> None:
        """Adds the mass observed below one node."""
        depth, column = min(depth, len(self.sums) - 1), min(int(acceptance * CONFIDENCE_BINS), CONFIDENCE_BINS - 1)
        sums, counts = self.sums[depth], self.counts[depth]
        sums[column] = self.memory * sums[column] + mass
        counts[column] = self.memory * counts[column] + 1


@dataclass
class Pace:
    """Whether rounds of so many requests are faster with drafting or without it, by measurement of whole rounds.

    Costs of passes are measured for one request, and work of the host adds up over requests, so prices do not decide where the
    two are close. Once in a while a few rounds of the other kind are run; such trials become rare while they change nothing.

    Attributes:
        is_faster: whether drafting is faster as far as known.
        gap: rounds until the next trial, of which `waited` have passed.
        trial: rounds of the present trial that are left.
        speeds: recent tokens and seconds of rounds with drafting, and without it.
    """

    is_faster: bool = True
    gap: int = 6
    waited: int = 0
    trial: int = 0
    speeds: dict[bool, tuple[float, float]] = field(default_factory=lambda: {True: (0.0, 0.0), False: (0.0, 0.0)})

    @property
    def drafts(self) -> bool:
        """Whether the next round drafts."""
        return self.is_faster != (self.trial > 0)

    def observe(self, requests: int, tokens: int, seconds: float) -> None:
        """Learns from a round."""
        drafts = self.drafts
        known = self.speeds[drafts]
        self.speeds[drafts] = PACE_MEMORY * known[0] + tokens, PACE_MEMORY * known[1] + seconds
        if self.trial == 0:
            self.waited += 1
            if self.waited >= self.gap:
                self.trial, self.waited = max(TRIAL_ROUNDS, TRIAL_REQUESTS // requests), 0
            return
        self.trial -= 1
        if self.trial == 0:
            (tokens_now, seconds_now), (tokens_else, seconds_else) = self.speeds[drafts], self.speeds[not drafts]
            changes = tokens_now * seconds_else > tokens_else * seconds_now
            self.gap = MIN_GAP if changes else min(max(2 * self.gap, MIN_GAP), MAX_GAP)
            self.is_faster = drafts if changes else not drafts


class Learner:
    """Learns from verified rounds in batches; arguments as for `CostAware`.

    Attributes:
        rounds: rounds observed.
        usual_size: moving average of the number of verified nodes.
        left_out: moving average of `Plan.left_out`, of requests that do not share their passes.
        pending: rounds that are not processed yet, and their plans.
    """

    def __init__(self, calibrate: bool, memory: float, max_depth: int) -> None:
        self.calibrate, self.memory = calibrate, memory
        self.calibrator = Calibrator()
        self.mass = ChildMass(max_depth)
        self.rounds = 0
        self.usual_size = 8.0
        self.left_out = 0.0
        self.pending: list[tuple[RoundOutcome, Plan]] = []
        self._tokens = self._seconds = 0.0

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
        """Maps a node's candidates, their depth and a least probability to acceptance probabilities, up to the first below."""
        return self.calibrator.leading if self.calibrate else _uncalibrated

    def is_due(self) -> bool:
        """Returns whether enough rounds are pending for a learning step."""
        return len(self.pending) >= min(LEARN_EVERY, self.rounds / 2)

    def learn(self, costs: Costs) -> bool:
        """Processes the pending rounds and corrects `costs` in place; returns whether there were any."""
        if not self.pending:
            return False
        for outcome, plan in self.pending:
            self._learn_prices(outcome, plan, costs)
            for depth, acceptance, mass in plan.masses:
                self.mass.learn(depth, acceptance, mass)
        evidence = labelled_candidates(outcome for outcome, _ in self.pending) if self.calibrate else None
        self.pending.clear()
        if evidence is not None:
            self.calibrator.learn(*evidence)
        return True

    def _learn_prices(self, outcome: RoundOutcome, plan: Plan, costs: Costs) -> None:
        """Updates lambda. Times are those of the cost tables, because a single timing may include an interruption; those of
        several requests, whose work on the host adds up, are measured unless they are far off.
        """
        size, requests = len(outcome.tree), plan.others[1]
        if requests == 1:
            correct_costs(costs, outcome)
            self.left_out += LIVE_RATE * (plan.left_out - self.left_out)
        shared = costs.shared(*plan.others)
        seconds = shared.verify_s(size, outcome.context) + requests * (plan.drafting_s + costs.overhead)
        if requests > 1:
            measured_s = requests * outcome.times().total_s
            seconds = measured_s if seconds / OUTLIER < measured_s < OUTLIER * seconds else seconds
        self._tokens = self.memory * self._tokens + requests * (outcome.accepted + 1)
        self._seconds = self.memory * self._seconds + seconds
        self.usual_size += LIVE_RATE * (size - self.usual_size)

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


def _uncalibrated(probs: list[float], depth: int, least: float) -> list[float]:
    return [prob for prob in probs if prob >= least]


def correct_costs(costs: Costs, outcome: RoundOutcome) -> None:
    """Moves the cost tables towards the timings of a round."""
    times = outcome.times()
    expected_s = costs.verify_s(len(outcome.tree), outcome.context)
    costs.verify.correct(expected_s, times.verify_s, LIVE_RATE)
    for width, seconds in times.draft:
        if width == 0:
            costs.commit_s = costs.first_level_s * correction(costs.first_level_s, seconds, LIVE_RATE)
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
