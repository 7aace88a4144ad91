"""Trees that maximize tokens per second under measured costs.

A round that drafts d levels and verifies the node set T takes c_0 + sum_l c_d(w_l) + c_t(|T|, S) seconds and yields in
expectation 1 + sum over T of P(v) tokens, P(v) being the product of calibrated conditional acceptance probabilities along v's
path. Time is priced by lambda, the long-run tokens per second (renewal reward, Ross, Stochastic Processes, section 3.6).

* A node is worth verifying iff P(v) >= lambda * dc_t, a level worth drafting iff its expected gain exceeds lambda * c_d.
* P never increases along a path, so the best n-node subtree is the top n by P and its size is a one-dimensional search.
* The expected gain of a level, before it is drafted, is the sum over the frontier of P(v) * s, s being an online estimate of
  the acceptance mass of the children of such a node.

Cost-awareness alone is published (SMART, arXiv 2604.09731; CAST, 2510.26577; CaDDTree, 2606.01813); the calibration from
every verified node, the long-run price and the level-by-level stop together are new here.

Shapes: F frontier nodes, K candidates, N drafted nodes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

from sage.costs.tables import Costs
from sage.io.ranges import PositiveInt, Range
from sage.planning.base import Policy
from sage.planning.tree import Frontier, NextLevel, RoundOutcome
from sage.trees.cost_aware.learner import ALONE, CONFIDENCE_BINS, LABELLED_RANKS, Learner, Pace, Plan, Prices

MIN_PATH_PROB = 1e-12  # divisor in place of an acceptance probability of 0
USED_RANKS = 0.5  # of the nodes of a usual tree: candidates of later ranks below a node are seldom among them
ROWS_STEP = 8  # prices are computed again when the nodes of other requests change by this many


@dataclass(eq=False, kw_only=True)
class CostAware(Policy):
    """Drafts and verifies what is worth its measured cost, with calibrated acceptance probabilities.

    Args:
        max_depth: levels per round at most.
        max_nodes: verified nodes per round at most.
        max_width: expanded nodes of one level at most.
        top_k: candidates per node at most; of narrow trees fewer are looked at.
        calibrate: learn acceptance probabilities from outcomes; otherwise the draft's probabilities are used.
        stop: end the drafting where the next level does not pay; otherwise always draft `max_depth` levels.
        sees_ends: draft nothing below a token that ends the answer.
        retry_every: after rounds without drafting, drafting is retried 1, 2, 4, .. and at most this many rounds later.
        memory: share of the evidence for lambda kept from one round to the next.
        fresh_costs: measure the costs of passes instead of reading those kept on disk.
    """

    name = "cost_aware"
    needs_costs = True

    max_depth: PositiveInt = 12
    max_nodes: PositiveInt = 64
    max_width: PositiveInt = 10
    top_k: PositiveInt = 10
    calibrate: bool = True
    stop: bool = True
    sees_ends: bool = True
    retry_every: PositiveInt = 16
    memory: Annotated[float, Range(ge=0, le=1)] = 0.98
    fresh_costs: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self.num_candidates = self._num_candidates = self.top_k
        self.tree_capacity = max(self.max_nodes + 1, self.max_depth * self.max_width)
        self.costs: Costs | None = None
        self._others = ALONE  # nodes that other requests verify in the same passes, and number of requests
        self._learners: dict[bool, Learner] = {}  # by `is_coupled`: a score needs another calibration than a probability
        self._prices: dict[tuple[Any, ...], tuple[Costs, Prices]] = {}  # since something was learned last
        self._paces: dict[int, Pace] = {}  # by the size of the number of requests; that of the last round is the last one
        self._is_coupled = self._is_paused = False  # paused: drafting is left out by a pace
        self.reset()

    def _learner(self, is_coupled: bool) -> Learner:
        if is_coupled not in self._learners:
            self._learners[is_coupled] = Learner(self.calibrate, self.memory, self.max_depth)
        return self._learners[is_coupled]

    @property
    def prices(self) -> Prices:
        """Prices under the current cost tables and statistics; requires `costs`."""
        assert self.costs is not None, "costs are measured when a request starts"
        learner, key = self.learner, (self._is_coupled, *self._others)
        known_costs, prices = self._prices.get(key, (None, None))
        if prices is None or known_costs is not self.costs:
            costs, left_out = self.costs.shared(*self._others), learner.left_out if self._others == ALONE else 0.0
            tokens_per_s, masses = learner.price(costs, self._others[1]), learner.mass.table(self.max_depth)
            prices = Prices.of(tokens_per_s, costs, learner.usual_size, left_out, self.max_nodes, self.max_width, masses)
            self._prices[key] = self.costs, prices
        return prices

    def state(self) -> dict[str, Any]:
        """Returns everything learned as plain numbers, for `load_state` in another request or process."""
        self._learn()  # the other learner has no pending rounds
        coupled = self._learners.get(True)
        return {
            **self._learner(False).state(),
            "coupled": coupled.state() if coupled else None,
            "costs": self.costs.state() if self.costs else None,
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Restores `state`."""
        self._learners.clear()
        self._learner(False).load_state(state)
        if state["coupled"]:
            self._learner(True).load_state(state["coupled"])
        self.learner = self._learner(self._is_coupled)
        self.costs = Costs.from_state(state["costs"]) if state["costs"] else None
        self._prices.clear()

    def reset(self, is_coupled: bool = False) -> None:
        if self._learners and is_coupled != self._is_coupled:
            self._learn()
        self._num_skipped, self._is_coupled = 0, is_coupled
        self.learner = self._learner(is_coupled)

    def for_request(self) -> CostAware:
        """Returns a policy that shares costs and learners with this one: what one request shows is known to all."""
        policy = copy(self)
        policy._is_paused = self.stop and not all(pace.drafts for pace in list(self._paces.values())[-1:])
        return policy

    def share(self, rows: int, requests: int) -> None:
        self._others = ALONE if requests == 1 else (rows - rows % ROWS_STEP, requests)
        size = requests.bit_length()
        if size not in self._paces:
            nearest = min(self._paces, key=lambda known: abs(known - size), default=None)
            self._paces[size] = Pace(nearest is None or self._paces[nearest].is_faster)
        self._paces[size] = self._paces.pop(size)
        self._is_paused = self.stop and not self._paces[size].drafts

    def observe_together(self, requests: int, tokens: int, seconds: float) -> None:
        self._paces[requests.bit_length()].observe(requests, tokens, seconds)

    def should_draft(self) -> bool:
        if self._is_paused:
            return False
        if self._num_skipped == 0 or not self.stop:
            return True
        is_power_of_two = self._num_skipped & (self._num_skipped - 1) == 0
        return self._num_skipped % self.retry_every == 0 or (is_power_of_two and self._num_skipped < self.retry_every)

    def num_candidates_at(self, level: int) -> int:
        return self._num_candidates

    def begin(self) -> None:
        self._num_candidates = min(self.top_k, max(LABELLED_RANKS, round(self.learner.usual_size * USED_RANKS)))
        has_feedback = not self._is_paused and self.learner.needs_round(self._num_skipped)
        self.plan = Plan(self.prices, self.learner.acceptance, has_feedback, self._others)

    def next_level(self, frontier: Frontier) -> NextLevel | None:
        """Adds the nodes that may be worth verifying, P(v) >= lambda * dc_t, and expands those that pay for a level."""
        plan, level, prices = self.plan, frontier.level, self.plan.prices
        plan.expanded = level
        plan.drafting_s += prices.first_s if level == 1 else prices.level_s[len(frontier.rows) - 1]
        paths, acceptances, picks = self._children(frontier)
        if not paths:
            return None
        plan.levels = level
        plan.paths += paths
        expand: list[int] = []
        if level < self.max_depth:
            ends = frontier.ends() if self.sees_ends else ()
            means = prices.masses[level]
            gains = [path * means[int(share * CONFIDENCE_BINS)] for path, share in zip(paths, acceptances, strict=True)]
            expand = self._worth_expanding([(gain, i) for i, gain in enumerate(gains) if picks[i] not in ends])
        plan.frontier = [(paths[i], acceptances[i]) for i in expand]
        return NextLevel(picks, [picks[i] for i in expand])

    def _children(self, frontier: Frontier) -> tuple[list[float], list[float], list[int]]:
        """Returns P, own acceptance probability and pick of the candidates whose P pays for a node of a tree of usual size, at
        most the `max_nodes` most probable; by increasing pick.
        """
        plan, paths, acceptances, picks, first = self.plan, list[float](), list[float](), list[int](), 0
        for (path, acceptance), probs in zip(plan.frontier, frontier.rows, strict=True):
            accepted = plan.acceptance(probs, frontier.level, plan.prices.node / (path or MIN_PATH_PROB))
            paths += [path * probability for probability in accepted]
            picks += range(first, first + len(accepted))
            acceptances += accepted
            if plan.has_feedback:
                plan.masses.append((frontier.level - 1, acceptance, sum(accepted)))
            first += len(probs)
        if len(paths) <= self.max_nodes:
            return paths, acceptances, picks
        kept = sorted(sorted(range(len(paths)), key=paths.__getitem__)[-self.max_nodes :])
        return [paths[i] for i in kept], [acceptances[i] for i in kept], [picks[i] for i in kept]

    def _worth_expanding(self, gains: list[tuple[float, int]]) -> list[int]:
        """Returns the nodes to expand, given the expected gain of each: as many as maximize gain minus cost; none if that is
        negative.
        """
        plan, prices = self.plan, self.plan.prices.levels
        gains.sort(reverse=True)
        total, best_net, best_gain, best_width = 0.0, -math.inf, 0.0, 0
        for width, ((gain, _), price) in enumerate(zip(gains, prices, strict=False), start=1):
            total += gain
            if total - price > best_net:
                best_net, best_gain, best_width = total - price, total, width
        plan.gain, plan.level_cost = best_gain, prices[max(best_width, 1) - 1]
        if self.stop and best_net <= 0:
            return []
        return sorted([i for _, i in gains[: best_width if self.stop else self.max_width]])

    def select(self) -> Sequence[int] | None:
        """Returns the top n nodes by P in that order, n maximizing expected tokens minus priced time.

        Ancestors are included because P never increases along a path. The path most likely to be accepted tends to come first.
        """
        plan, paths = self.plan, self.plan.paths
        order = sorted(range(len(paths)), key=paths.__getitem__, reverse=True)[: self.max_nodes]
        size = _best_size([paths[i] for i in order], plan.prices.tokens_per_s, plan.prices.verify_s)
        plan.expected = sum([paths[i] for i in order[:size]])
        plan.left_out = paths[order[size]] if size < len(order) else 0.0
        chosen = [0, *[i + 1 for i in order[:size]]]
        return None if chosen == list(range(len(paths) + 1)) else chosen

    def calibration(self) -> Callable[[list[float], int], list[float]] | None:
        return partial(copy(self.learner.calibrator).leading, min_prob=0.0) if self.calibrate else None

    def needs_feedback(self) -> bool:
        return self.plan.has_feedback

    def observe(self, outcome: RoundOutcome) -> dict[str, float]:
        if self._is_paused:
            return self.plan.log_entry()
        self.learner.rounds += 1
        self._num_skipped = 0 if len(outcome.tree) > 1 else self._num_skipped + 1
        if self.plan.has_feedback:
            self.learner.pending.append((outcome, self.plan))
            if self.learner.is_due():
                self._learn()
        return self.plan.log_entry()

    def _learn(self) -> None:
        if self.costs is not None and self.learner.learn(self.costs):
            self._prices.clear()

    def explain(self, entry: dict[str, float]) -> str:
        price = f"at {entry['price']:.0f} tokens/s:"
        if entry["expanded"] == 0:
            return f"{price} no draft pass: drafting has not paid recently"
        if entry["levels"] == 0:
            return f"{price} no candidate was worth verifying"
        compared = f"for {entry['gain']:.2f} expected tokens at a cost of {entry['level_cost']:.2f}"
        if entry["gain"] <= entry["level_cost"]:
            return f"{price} level {entry['levels'] + 1} would not pay, {compared}"
        if entry["expanded"] > entry["levels"]:
            return f"{price} level {entry['expanded']} was drafted {compared}, without a candidate worth verifying"
        return f"{price} level {entry['expanded']} was drafted {compared}; no deeper level is allowed"


def _best_size(paths: Sequence[float], price: float, verify_s: Sequence[float]) -> int:
    """Returns the n that maximizes the sum of the first n of decreasing `paths` minus the priced time of verifying them.

    Args:
        verify_s: seconds of verifying the root and 0, 1, 2, .. nodes.
    """
    total = best_net = 0.0
    size = 0
    for nodes, path in enumerate(paths, start=1):
        total += path
        net = total - price * (verify_s[nodes] - verify_s[0])
        if net > best_net:
            best_net, size = net, nodes
    return size
