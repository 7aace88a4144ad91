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
from collections.abc import Callable
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from sage.calibration import Calibrator, Reliability
from sage.costs import Costs
from sage.trees.base import Policy
from sage.trees.tree import Drafted, Frontier, HostGrowth, Outcome, Tree

CONFIDENCE_BINS = 4
OFF_PATH_WEIGHT = 0.1
LIVE_RATE = 0.05
LABELLED_RANKS = 4
LEARN_EVERY = 32  # rounds per step of the calibrator, once it has seen as many; before that at 1, 2, 4, 8 and 16
LEAST_PATH = 1e-12  # an acceptance too small to matter, but one that can be divided by

Child = tuple[float, float, int]  # P, own acceptance, pick


class ChildMass:
    """s(depth, confidence): the acceptance mass that a node's candidates keep, learned before it has to be paid for.

    `confidence` is the probability that the node itself is accepted, in CONFIDENCE_BINS equal bins.
    """

    def __init__(self, most_depth: int, start: float = 0.75, weight: float = 2.0, memory: float = 0.995) -> None:
        self.memory = memory
        self.sums = [[start * weight] * CONFIDENCE_BINS for _ in range(most_depth + 1)]
        self.counts = [[weight] * CONFIDENCE_BINS for _ in range(most_depth + 1)]

    def below(self, depth: int) -> list[float]:
        """Expected mass below a node of `depth` that is itself accepted with probability a, at int(a * CONFIDENCE_BINS)."""
        depth = min(depth, len(self.sums) - 1)
        masses = [total / count for total, count in zip(self.sums[depth], self.counts[depth], strict=True)]
        return [*masses, masses[-1]]  # a = 1

    def learn(self, depth: int, acceptance: float, mass: float) -> None:
        """Books the mass found below one node."""
        depth, column = min(depth, len(self.sums) - 1), min(int(acceptance * CONFIDENCE_BINS), CONFIDENCE_BINS - 1)
        sums, counts = self.sums[depth], self.counts[depth]
        sums[column] = self.memory * sums[column] + mass
        counts[column] = self.memory * counts[column] + 1


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
    learns = looks_back = True

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
        for option, value in (("max_depth", max_depth), ("max_nodes", max_nodes), ("max_width", max_width), ("top_k", top_k)):
            if value < 1:
                raise ValueError(f"policy.cost_aware.{option}: {value} is below 1; give at least 1")
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
        self._unlearned: list[tuple[Tree, Tensor, Callable[[], Tensor]]] = []

    # -- what it knows ------------------------------------------------------------------------------------------------

    @property
    def price(self) -> float:
        """lambda: tokens a second of time is worth; before any round, the speed without speculation."""
        assert self.costs is not None, "costs are measured when a request starts"
        alone = self.costs.verify(1) + self.costs.overhead
        return (self._tokens + 1.5) / (self._seconds + alone)

    def state(self) -> dict[str, Any]:
        """Everything learned, as plain numbers; give it to the next request or process with `load_state`."""
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

    # -- one round ----------------------------------------------------------------------------------------------------

    def reset(self) -> None:
        self._skipped = 0

    def wants_draft(self) -> bool:
        if self._skipped == 0 or not self.stop:
            return True
        is_power_of_two = self._skipped & (self._skipped - 1) == 0
        return self._skipped % self.retry_every == 0 or (is_power_of_two and self._skipped < self.retry_every)

    def begin(self) -> dict[str, float]:
        assert self.costs is not None, "costs are measured when a request starts"
        self._lambda = self.price
        self._node_price = self._lambda * self._usual_node()
        self._level_prices = [
            self._lambda * self.costs.draft(width) + width * self._node_price for width in range(1, self.max_width + 1)
        ]
        self._paths: list[float] = []
        self._frontier: list[tuple[float, float]] = [(1.0, 1.0)]  # (P, own acceptance) of each frontier node
        self._plan = {
            "price": self._lambda,
            "gain": 0.0,
            "level_cost": 0.0,
            "asked": 0,
            "levels": 0,
            "drafted": 0,
            "expected": 0.0,
        }
        return self._plan

    def _usual_node(self) -> float:
        """dc_t while drafting: the slope of the cost curve around a usual tree; `select` then uses the curve itself."""
        assert self.costs is not None
        low, high = max(round(self._usual_size / 2), 2), max(round(1.5 * self._usual_size), 4)
        return (self.costs.verify(high) - self.costs.verify(low)) / (high - low)

    def grow(self, frontier: Frontier) -> HostGrowth | None:
        """Nodes that may be worth verifying, P(v) >= lambda * dc_t; one wait for the device per level."""
        level = self._plan["asked"] = frontier.level
        num_candidates = frontier.probs.shape[1]
        children: list[Child] = []
        for row, ((path, own), probs) in enumerate(zip(self._frontier, frontier.probs.tolist(), strict=True)):
            acceptance = self._acceptance(probs, level, self._node_price / max(path, LEAST_PATH))
            self.mass.learn(level - 1, own, sum(acceptance))
            children += [(path * accepted, accepted, pick) for pick, accepted in enumerate(acceptance, row * num_candidates)]
        if not children:
            return None
        if len(children) > self.node_budget:
            children = sorted(sorted(children, reverse=True)[: self.node_budget], key=itemgetter(2))
        self._paths += [path for path, _, _ in children]
        going_on = [child for child in children if child[2] not in frontier.ends] if self.sees_ends else children
        expand = self._worth_expanding(level, going_on)
        self._frontier = [child[:2] for child in expand]
        return HostGrowth([pick for _, _, pick in children], [pick for _, _, pick in expand])

    def _acceptance(self, probs: list[float], depth: int, least: float) -> list[float]:
        """Conditional acceptances of one node's best candidates, down to the first below `least`."""
        if self.calibrate:
            return self.calibrator.likeliest(probs, depth, least)
        return [prob for prob in probs if prob >= least]

    def _worth_expanding(self, level: int, children: list[Child]) -> list[Child]:
        """The new nodes to draft from: the width with the best gain less price; none if it does not pay."""
        if level >= self.max_depth:
            return []
        self._plan["gain"], self._plan["level_cost"] = 0.0, self._level_prices[0]
        masses = self.mass.below(level)
        gains = [(child[0] * masses[int(child[1] * CONFIDENCE_BINS)], child) for child in children]
        gains.sort(reverse=True)
        del gains[self.max_width :]
        total, best_net, best_width = 0.0, -math.inf, 0
        for width, ((gain, _), price) in enumerate(zip(gains, self._level_prices, strict=False), start=1):
            total += gain
            if total - price > best_net:
                best_net, best_width = total - price, width
                self._plan["gain"], self._plan["level_cost"] = total, price
        if self.stop:
            del gains[best_width if best_net > 0 else 0 :]
        return sorted((child for _, child in gains), key=itemgetter(2))

    def select(self, drafted: Drafted) -> list[int] | None:
        """The top n by P, n the best by expected tokens less priced time; ancestors come along because P never grows."""
        if not self._paths:
            return None
        assert self.costs is not None
        order = sorted(range(len(self._paths)), key=self._paths.__getitem__, reverse=True)  # stable: equals keep their order
        verify, price, total, best_net, size = self.costs.verify, self._lambda, 0.0, 0.0, 0
        floor = verify(1)
        for nodes, i in enumerate(order[: self.node_budget], start=1):
            total += self._paths[i]
            net = total - price * (verify(nodes + 1) - floor)
            if net > best_net:
                best_net, size = net, nodes
                self._plan["expected"] = total
        return None if size == len(order) else [0, *(i + 1 for i in sorted(order[:size]))]

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

    def observe(self, outcome: Outcome) -> None:
        self.rounds += 1
        self._skipped = 0 if len(outcome.tree) > 1 else self._skipped + 1
        self._tokens = self.memory * self._tokens + outcome.accepted + 1
        self._correct_costs(outcome)
        self._seconds = self.memory * self._seconds + self._seconds_of(outcome)
        self._usual_size += LIVE_RATE * (len(outcome.tree) - self._usual_size)
        if outcome.labels is not None and self.calibrate:
            self._unlearned.append((outcome.tree, outcome.path, outcome.labels))
            if len(self._unlearned) >= min(LEARN_EVERY, self.rounds / 2):
                self._learn()

    def _correct_costs(self, outcome: Outcome) -> None:
        assert self.costs is not None
        times = outcome.times
        self.costs.verify.correct(len(outcome.tree), times.verify_s, LIVE_RATE)
        for width, seconds in times.draft:
            self.costs.draft.correct(width, seconds, LIVE_RATE)
        explained = times.verify_s + sum(seconds for _, seconds in times.draft)
        self.costs.overhead += LIVE_RATE * (max(times.total_s - explained, 0.0) - self.costs.overhead)

    def _seconds_of(self, outcome: Outcome) -> float:
        """What a round like this one costs by the corrected tables: tokens and time must be priced in one currency, and the
        round's own timing may have been interrupted."""
        assert self.costs is not None
        drafting = sum(self.costs.draft(width) for width, _ in outcome.times.draft)
        return self.costs.verify_s(len(outcome.tree), outcome.context) + drafting + self.costs.overhead

    def _learn(self) -> None:
        """Learns from the likeliest drafted candidates of every verified node of the last rounds, all at once."""
        probs, depths, labels, weights = (column.cpu() for column in _labelled(self._unlearned))
        self._unlearned.clear()
        self.before.add(depths, probs, labels)
        self.after.add(depths, self.calibrator.learn(probs, depths, labels, weights), labels)


def _labelled(rounds: list[tuple[Tree, Tensor, Callable[[], Tensor]]]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What was said and what became of it, from each round's verified tree, accepted path and labels.

    Returns:
        probabilities [M, R], depths [M] of the candidates, labels [M, R] and weights [M].
    """
    trees, paths, labels = zip(*rounds, strict=True)
    weights = [torch.full((len(tree),), OFF_PATH_WEIGHT, device=path.device) for tree, path in zip(trees, paths, strict=True)]
    for weight, path in zip(weights, paths, strict=True):
        weight[path] = 1.0
    drafted = torch.cat([tree.drafted for tree in trees])
    nodes = (drafted >= 0).nonzero()[:, 0]
    said = torch.cat([tree.candidates[tree.drafted, :LABELLED_RANKS] for tree in trees])
    depths = torch.cat([tree.depths for tree in trees])
    return (
        said[nodes],
        depths[nodes] + 1,
        torch.cat([judge() for judge in labels])[nodes, :LABELLED_RANKS],
        torch.cat(weights)[nodes],
    )
