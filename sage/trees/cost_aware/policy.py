"""Trees that maximize tokens per second under measured costs.

A round that drafts d levels and verifies the node set T takes c_0 + sum_l c_d(w_l) + c_t(|T|, S) seconds and yields in
expectation 1 + sum over T of P(v) tokens, P(v) being the product of calibrated conditional acceptance probabilities along v's
path. Time is priced by lambda, the long-run tokens per second (renewal reward, Ross, Stochastic Processes, section 3.6).

Cost-awareness alone is published (SMART, arXiv 2604.09731; CAST, 2510.26577; CaDDTree, 2606.01813); the calibration from
every verified node, the long-run price and the level-by-level stop together are new here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

from sage.costs.tables import Costs
from sage.io.ranges import PositiveInt, Range
from sage.planning.base import Policy
from sage.planning.tree import Frontier, NextLevel, RoundOutcome
from sage.trees.cost_aware.learner import ALONE, LABELLED_RANKS, Learner, PendingRound
from sage.trees.cost_aware.pace import Pace
from sage.trees.cost_aware.planner import CostPlan, Limits, next_level, select, select_shared
from sage.trees.cost_aware.pricing import Prices

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
        self._limits = Limits(self.max_depth, self.max_nodes, self.max_width, self.stop, self.sees_ends)
        self.tree_capacity = max(self.max_nodes + 1, self.max_depth * self.max_width)
        self.costs: Costs | None = None
        self.learner = Learner(self.calibrate, self.memory, self.max_depth)  # of the kind of the current request
        self.pace = Pace()  # of rounds of several requests
        self._is_paused = False  # whether drafting is left out by `pace`
        self._is_coupled = False
        self._others = ALONE  # nodes that other requests verify in the same passes, and number of requests
        self._learners = {False: self.learner}  # by `_is_coupled`: a score needs another calibration than a probability
        self._prices: dict[tuple[Any, ...], tuple[Costs, Prices]] = {}  # since something was learned last

    @property
    def prices(self) -> Prices:
        """Prices under the current cost tables and statistics; requires `costs`."""
        assert self.costs is not None, "costs are measured when a request starts"
        known = self._prices.get((self._is_coupled, *self._others))
        if known is not None and known[0] is self.costs:
            return known[1]
        costs = self.learner.costs_of(self.costs, self._others)
        time, masses = self.learner.price(costs, self._others[1]), self.learner.mass.table(self.max_depth)
        left_out = self.learner.left_out if self._others == ALONE else 0.0
        found = Prices.of(time, costs, self.learner.usual_size, left_out, self.max_nodes, self.max_width, masses)
        self._prices[self._is_coupled, *self._others] = self.costs, found
        return found

    def state(self) -> dict[str, Any]:
        """Returns everything learned as plain numbers, for `load_state` in another request or process."""
        self._learn()  # other learners have no pending rounds
        coupled = self._learners.get(True)
        return {
            **self._learners[False].state(),
            "coupled": coupled.state() if coupled else None,
            "costs": self.costs.state() if self.costs else None,
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Restores `state`."""
        self._learners = {False: self._learners[False]}
        self._learners[False].load_state(state)
        if state["coupled"]:
            self._learners[True] = self._learners[False].successor()
            self._learners[True].load_state(state["coupled"])
        self._use_learner()
        self.costs = Costs.from_state(state["costs"]) if state["costs"] else None
        self._prices.clear()

    def reset(self, is_coupled: bool = False) -> None:
        self._num_skipped, self._is_coupled = 0, is_coupled
        self._use_learner()

    def _use_learner(self) -> None:
        """Switches to the learner of the current kind of candidates; a new one starts from that of the other kind."""
        if self._learners.get(self._is_coupled) is self.learner:
            return
        self._learn()
        learner = self._learners.get(self._is_coupled)
        if learner is None:
            learner = self._learners[self._is_coupled] = self.learner.successor()
        self.learner = learner

    def should_draft(self) -> bool:
        if self._is_paused:
            return False
        if self._num_skipped == 0 or not self.stop:
            return True
        is_power_of_two = self._num_skipped & (self._num_skipped - 1) == 0
        return self._num_skipped % self.retry_every == 0 or (is_power_of_two and self._num_skipped < self.retry_every)

    def for_request(self) -> CostAware:
        """Returns a policy that shares costs and learners with this one: what one request shows is known to all."""
        found = copy(self)
        found._is_paused = self.stop and not self.pace.drafts
        return found

    def share(self, rows: int, requests: int) -> None:
        self._others = ALONE if requests == 1 else (rows - rows % ROWS_STEP, requests)

    @classmethod
    def begin_shared(cls, policies: Sequence[CostAware]) -> None:
        """Lets all requests of a round draft, or none, as measured for their number."""
        drafts = policies[0].pace.begin(len(policies))
        for policy in policies:
            policy._is_paused = policy.stop and not drafts

    @classmethod
    def observe_shared(cls, policies: Sequence[CostAware], tokens: int, seconds: float) -> None:
        policies[0].pace.observe(tokens, seconds)

    def num_candidates_at(self, level: int) -> int:
        return self._num_candidates

    def begin(self) -> None:
        self._num_candidates = min(self.top_k, max(LABELLED_RANKS, round(self.learner.usual_size * USED_RANKS)))
        has_feedback = not self._is_paused and self.learner.needs_round(self._num_skipped)
        self.plan = CostPlan(self._limits, self.prices, self.learner.acceptance, has_feedback)

    def next_level(self, frontier: Frontier) -> NextLevel | None:
        return next_level(self.plan, frontier)

    def select(self) -> list[int] | None:
        return select(self.plan)

    @classmethod
    def select_shared(cls, policies: Sequence[CostAware], requests: int) -> list[Sequence[int] | None]:
        """Shares the nodes of the pass among the requests, by the next best marginal gain."""
        costs = policies[0].costs
        assert costs is not None, "costs are measured when a request starts"
        verify = costs.verify
        return list(select_shared([policy.plan for policy in policies], lambda nodes: verify(requests + nodes)))

    def calibration(self) -> Callable[[list[float], int], list[float]] | None:
        return partial(copy(self.learner.calibrator).leading, min_prob=0.0) if self.calibrate else None

    def needs_feedback(self) -> bool:
        return self.plan.has_feedback

    def observe(self, outcome: RoundOutcome) -> dict[str, float]:
        plan = self.plan
        if self._is_paused:
            return plan.log_entry()
        self.learner.rounds += 1
        self._num_skipped = 0 if len(outcome.tree) > 1 else self._num_skipped + 1
        if plan.has_feedback:
            self.learner.pending.append(PendingRound(outcome, plan.drafting_s, plan.masses, plan.left_out, self._others))
            if self.learner.is_due():
                self._learn()
        return plan.log_entry()

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
