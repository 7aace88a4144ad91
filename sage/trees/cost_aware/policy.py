"""Trees that maximise tokens per second under measured costs.

A round that drafts d levels and verifies the node set T takes c_0 + sum_l c_d(w_l) + c_t(|T|, S) seconds and yields in
expectation 1 + sum over T of P(v) tokens, P(v) being the product of calibrated conditional acceptances along v's path.

* Time is priced by lambda, the long-run tokens per second (renewal reward, Ross, Stochastic Processes, section 3.6): a node
  is worth verifying iff P(v) >= lambda * dc_t, a level worth drafting iff its expected gain exceeds lambda * c_d.
* P never grows down a path, so the best n-node subtree is the top n by P and its size is a one-dimensional search.
* The gain of a level before it is paid for is the sum over the frontier of P(v) * s, s an online estimate of the
  acceptance mass that the children of such a node keep.

Cost-awareness alone is published (SMART, arXiv 2604.09731; CAST, 2510.26577; CaDDTree, 2606.01813); the calibration from
every verified node, the long-run price and the level-by-level stop together are this module's own.

Shapes: F frontier nodes, K candidates, N drafted nodes, M labelled candidates.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from sage.costs.calibration import Calibrator, Reliability
from sage.costs.tables import Costs
from sage.host_tensors import CPU, doubles, longs
from sage.trees.base import Policy
from sage.trees.cost_aware.pricing import CONFIDENCE_BINS, ChildMass, Prices
from sage.trees.options import check_count, check_number, check_switch
from sage.trees.tree import Drafted, Frontier, HostGrowth, Outcome

OFF_PATH_WEIGHT = 0.1
LIVE_RATE = 0.05
LABELLED_RANKS = 4
STUDIED = 256  # rounds that are all learned from; of the later ones, which hardly move what is known, one in STUDIED_ONE_IN
STUDIED_ONE_IN = 4
LEARN_EVERY = 64  # studied rounds per step of learning, once there have been as many; before that at 1, 2, 4, .. and 32
LEAST_PATH = 1e-12  # to divide by in place of an acceptance that is 0

Children = tuple[list[float], list[float], list[int]]  # P, own acceptance and pick of each, in the order of their picks


@dataclass
class Noted:
    """A round that nothing has been learned from yet.

    Attributes:
        outcome: of the round.
        drafting_s: what its draft passes should have taken.
        masses: depth, own acceptance and mass found below each node that the draft was asked about.
    """

    outcome: Outcome
    drafting_s: float
    masses: list[tuple[int, float, float]]


class CostAware(Policy):
    """Drafts and verifies what pays, at this machine's prices.

    Args:
        max_depth: levels per round at most.
        max_nodes: verified nodes per round at most.
        max_width: nodes of one level the draft is asked about, at most.
        top_k: candidates per node.
        calibrate: learn acceptance from outcomes; else the draft's probabilities are taken at face value.
        stop: end the drafting where the next level does not pay; else always draft `max_depth` levels.
        sees_ends: draft nothing below a token that ends the answer.
        retry_every: after rounds not worth drafting for, the draft is asked again 1, 2, 4, .. at most this many rounds later.
        memory: share of the evidence for lambda kept from one round to the next.
    """

    name = "cost_aware"
    on_host = learns = True

    def __init__(
        self,
        max_depth: int = 12,
        max_nodes: int = 64,
        max_width: int = 10,
        top_k: int = 10,
        calibrate: bool = True,
        stop: bool = True,
        sees_ends: bool = True,
        retry_every: int = 16,
        memory: float = 0.98,
    ) -> None:
        counts = {"max_depth": max_depth, "max_nodes": max_nodes, "max_width": max_width, "top_k": top_k}
        for option, count in (counts | {"retry_every": retry_every}).items():
            check_count(f"policy.cost_aware.{option}", count, 1)
        for option, switch in {"calibrate": calibrate, "stop": stop, "sees_ends": sees_ends}.items():
            check_switch(f"policy.cost_aware.{option}", switch)
        check_number("policy.cost_aware.memory", memory, 0, 1)
        self.max_depth, self.node_budget, self.max_width = max_depth, max_nodes, max_width
        self.candidates = top_k
        self.calibrate, self.stop, self.sees_ends = calibrate, stop, sees_ends
        self.retry_every, self.memory = retry_every, memory
        self.max_nodes = max(max_nodes + 1, max_depth * max_width)
        self.costs: Costs | None = None
        self.calibrator = Calibrator()
        self.mass = ChildMass(max_depth)
        self.before, self.after = Reliability(), Reliability()
        self.rounds = 0
        self._tokens = self._seconds = 0.0
        self._usual_size = 8.0
        self._noted: list[Noted] = []
        self._priced: Costs | None = None  # the tables that `_prices` come from

    # -- what it knows ------------------------------------------------------------------------------------------------

    @property
    def price(self) -> float:
        """lambda: tokens a second of time is worth; before any round, the speed without speculation."""
        assert self.costs is not None, "costs are measured when a request starts"
        alone = self.costs.verify(1) + self.costs.overhead
        return (self._tokens + 1.5) / (self._seconds + alone)

    def _reprice(self) -> None:
        assert self.costs is not None, "costs are measured when a request starts"
        masses = self.mass.table(self.max_depth)
        self._prices = Prices.of(self.price, self.costs, self._usual_size, self.node_budget, self.max_width, masses)
        self._priced = self.costs

    def state(self) -> dict[str, Any]:
        """Everything learned, as plain numbers; give it to the next request or process with `load_state`."""
        self._learn()
        return {
            "calibrator": self.calibrator.state(),
            "mass": {"sums": self.mass.sums, "counts": self.mass.counts},
            "costs": self.costs.state() if self.costs else None,
            "tokens": self._tokens,
            "seconds": self._seconds,
            "rounds": self.rounds,
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """The reverse of `state`."""
        self.calibrator.load_state(state["calibrator"])
        self.mass.sums, self.mass.counts = ([[*row] for row in state["mass"][key]] for key in ("sums", "counts"))
        self.costs = Costs.from_state(state["costs"]) if state["costs"] else None
        self._tokens, self._seconds, self.rounds = state["tokens"], state["seconds"], state["rounds"]
        self._noted.clear()
        self._priced = None

    # -- one round ----------------------------------------------------------------------------------------------------

    def reset(self) -> None:
        self._skipped = 0

    def wants_draft(self) -> bool:
        if self._skipped == 0 or not self.stop:
            return True
        is_power_of_two = self._skipped & (self._skipped - 1) == 0
        return self._skipped % self.retry_every == 0 or (is_power_of_two and self._skipped < self.retry_every)

    def begin(self) -> dict[str, float]:
        if self._priced is not self.costs or self._priced is None:
            self._reprice()
        self._drafting_s = 0.0
        self._is_studied = self.rounds < STUDIED or self._skipped > 0 or self.rounds % STUDIED_ONE_IN == 0
        self._masses: list[tuple[int, float, float]] = []
        self._paths: list[float] = []
        self._frontier: list[tuple[float, float]] = [(1.0, 1.0)]
        self._plan = {
            "price": self._prices.time,
            "gain": 0.0,
            "level_cost": 0.0,
            "asked": 0,
            "levels": 0,
            "drafted": 0,
            "expected": 0.0,
        }
        return self._plan

    def grow(self, frontier: Frontier) -> HostGrowth | None:
        """Nodes that may be worth verifying, P(v) >= lambda * dc_t; one wait for the device per level."""
        level = self._plan["asked"] = frontier.level
        self._drafting_s += self._prices.level_s[len(frontier.rows) - 1]
        children = paths, chances, picks = self._children(frontier)
        if not paths:
            return None
        self._plan["levels"] = level
        self._paths += paths
        expand = self._worth_expanding(children, frontier) if level < self.max_depth else []
        self._frontier = [(paths[i], chances[i]) for i in expand]
        return HostGrowth(picks, [picks[i] for i in expand])

    def _children(self, frontier: Frontier) -> Children:
        """Every candidate whose P pays for a node of a usual tree; of too many the likeliest."""
        likeliest = self.calibrator.likeliest if self.calibrate else _face_value
        level, node_price = frontier.level, self._prices.node
        paths: list[float] = []
        chances: list[float] = []
        picks: list[int] = []
        first = 0
        for (path, own), probs in zip(self._frontier, frontier.rows, strict=True):
            accepted = likeliest(probs, level, node_price / (path or LEAST_PATH))
            pick = first
            for chance in accepted:
                paths.append(path * chance)
                picks.append(pick)
                pick += 1
            chances += accepted
            if self._is_studied:
                self._masses.append((level - 1, own, sum(accepted)))
            first += len(probs)
        if len(paths) <= self.node_budget:
            return paths, chances, picks
        kept = sorted(sorted(range(len(paths)), key=paths.__getitem__)[-self.node_budget :])
        return [paths[i] for i in kept], [chances[i] for i in kept], [picks[i] for i in kept]

    def _worth_expanding(self, children: Children, frontier: Frontier) -> list[int]:
        """Which of the new nodes to draft from: the width with the best gain less price; none if it does not pay."""
        prices, masses = self._prices.levels, self._prices.masses[frontier.level]
        paths, chances, picks = children
        gains: list[tuple[float, int]] = []
        for i, path in enumerate(paths):
            gains.append((path * masses[int(chances[i] * CONFIDENCE_BINS)], i))
        if frontier.ends and self.sees_ends:
            gains = [(gain, i) for gain, i in gains if picks[i] not in frontier.ends]
        gains.sort(reverse=True)
        total, best_net, best_gain, best_width = 0.0, -math.inf, 0.0, 0
        for width, ((gain, _), price) in enumerate(zip(gains, prices, strict=False), start=1):
            total += gain
            if total - price > best_net:
                best_net, best_gain, best_width = total - price, total, width
        self._plan["gain"], self._plan["level_cost"] = best_gain, prices[max(best_width, 1) - 1]
        if self.stop and best_net <= 0:
            return []
        return sorted([i for _, i in gains[: best_width if self.stop else self.max_width]])

    def select(self, drafted: Drafted) -> list[int] | None:
        """The top n by P, n the best by expected tokens less priced time; ancestors come along because P never grows.

        In that order: the path that is likeliest to be accepted then tends to stand first.
        """
        paths = self._paths
        if not paths:
            return None
        self._plan["drafted"] = len(paths)
        order = sorted(range(len(paths)), key=paths.__getitem__, reverse=True)  # stable: equals keep their order
        del order[self.node_budget :]
        verify_s, price = self._prices.verify_s, self._prices.time
        total = expected = best_net = 0.0
        size = 0
        for nodes, i in enumerate(order, start=1):
            total += paths[i]
            net = total - price * (verify_s[nodes] - verify_s[0])
            if net > best_net:
                best_net, expected, size = net, total, nodes
        self._plan["expected"] = expected
        return [0, *[i + 1 for i in order[:size]]]

    def explain(self, entry: dict[str, float]) -> str:
        price = f"at {entry['price']:.0f} tokens/s"
        if entry["asked"] == 0:
            return f"{price} drafting has not paid lately: not asked"
        if entry["levels"] == 0:
            return f"{price} no candidate was worth verifying"
        weighed = f"for {entry['gain']:.2f} tokens, its time worth {entry['level_cost']:.2f}"
        if entry["gain"] <= entry["level_cost"]:
            return f"{price} level {entry['levels'] + 1} would not pay, {weighed}"
        if entry["asked"] > entry["levels"]:
            return f"{price} level {entry['asked']} was drafted {weighed}, and held nothing worth verifying"
        return f"{price} level {entry['asked']} was drafted {weighed}; no deeper one is allowed"

    # -- what it learns -----------------------------------------------------------------------------------------------

    def studies(self) -> bool:
        return self._is_studied

    def observe(self, outcome: Outcome) -> None:
        self.rounds += 1
        self._skipped = 0 if len(outcome.tree) > 1 else self._skipped + 1
        if not self._is_studied:
            return
        self._noted.append(Noted(outcome, self._drafting_s, self._masses))
        if len(self._noted) >= min(LEARN_EVERY, self.rounds / 2):
            self._learn()

    def _learn(self) -> None:
        """Learns from the last rounds, all at once: what time is worth, what passes cost, what becomes of candidates."""
        if not self._noted:
            return
        for noted in self._noted:
            self._learn_prices(noted)
            for depth, acceptance, mass in noted.masses:
                self.mass.learn(depth, acceptance, mass)
        evidence = _evidence(noted.outcome for noted in self._noted) if self.calibrate else None
        self._noted.clear()
        if evidence is not None:
            probs, depths, labels, weights = evidence
            self.before.add(depths, probs, labels)
            self.after.add(depths, self.calibrator.learn(probs, depths, labels, weights), labels)
        self._reprice()

    def _learn_prices(self, noted: Noted) -> None:
        """Tokens and time are priced in one currency, and a round's own timing may have been interrupted: so by the tables."""
        outcome, size = noted.outcome, len(noted.outcome.tree)
        assert self.costs is not None
        self._correct_costs(outcome)
        seconds = self.costs.verify_s(size, outcome.context) + noted.drafting_s + self.costs.overhead
        self._tokens = self.memory * self._tokens + outcome.accepted + 1
        self._seconds = self.memory * self._seconds + seconds
        self._usual_size += LIVE_RATE * (size - self._usual_size)

    def _correct_costs(self, outcome: Outcome) -> None:
        assert self.costs is not None
        times = outcome.times()
        expected_s = self.costs.verify_s(len(outcome.tree), outcome.context)
        self.costs.verify.correct(expected_s, times.verify_s, LIVE_RATE)
        for width, seconds in times.draft:
            self.costs.draft.correct(self.costs.draft(width), seconds, LIVE_RATE)
        explained = times.verify_s + sum(seconds for _, seconds in times.draft)
        self.costs.overhead += LIVE_RATE * (max(times.total_s - explained, 0.0) - self.costs.overhead)


def _face_value(probs: list[float], depth: int, least: float) -> list[float]:
    """As `Calibrator.likeliest`, without calibration."""
    return [prob for prob in probs if prob >= least]


def _evidence(outcomes: Iterable[Outcome]) -> tuple[Tensor, Tensor, Tensor, Tensor] | None:
    """What was said below every verified node that the draft was asked about, and what became of it; None if nothing was.

    Returns:
        probabilities [M, R], depths [M] of the candidates, labels [M, R] and weights [M].
    """
    said: list[float] = []
    labels: list[float] = []
    depths: list[int] = []
    weights: list[float] = []
    ranks = 0
    for outcome in outcomes:
        tree, path = outcome.tree, set(outcome.path)
        for label in outcome.labels(LABELLED_RANKS):
            labels += label
        for node, one in enumerate(tree.said):
            if one is not None:
                probs = one[0][:LABELLED_RANKS]
                said += probs
                ranks = len(probs)
                depths.append(tree.columns.depths[node] + 1)
                weights.append(1.0 if node in path else OFF_PATH_WEIGHT)
    if not said:
        return None
    return doubles(said).view(-1, ranks), longs(depths, CPU), doubles(labels).view(-1, ranks), doubles(weights)
