"""Planning of one round under given prices: candidates, nodes to expand, nodes to verify. Owns no state between rounds.

* A node is worth verifying iff P(v) >= lambda * dc_t, a level worth drafting iff its expected gain exceeds lambda * c_d.
* P never increases along a path, so the best n-node subtree is the top n by P and its size is a one-dimensional search.
* The expected gain of a level, before it is drafted, is the sum over the frontier of P(v) * s, s being an online estimate of
  the acceptance mass of the children of such a node.

Shapes: F frontier nodes, K candidates, N drafted nodes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import itemgetter

from sage.costs.calibration import Acceptance
from sage.planning.tree import Frontier, NextLevel
from sage.trees.cost_aware.pricing import CONFIDENCE_BINS, Prices

MIN_PATH_PROB = 1e-12  # divisor in place of an acceptance probability of 0

Children = tuple[list[float], list[float], list[int]]  # P, own acceptance probability and pick of each, by increasing pick


@dataclass(frozen=True, slots=True)
class Limits:
    """Options of the policy that bound a round; see `CostAware`."""

    max_depth: int
    max_nodes: int
    max_width: int
    stop: bool
    sees_ends: bool


@dataclass(slots=True)
class CostPlan:
    """Plan of one round.

    Attributes:
        limits: of every round.
        prices: of this round.
        acceptance: acceptance probabilities of candidates, as learned before this round.
        has_feedback: whether the round is used for learning.
        gain, level_cost: expected tokens of the level considered last, and the price of its time in tokens.
        expanded: deepest level for which the draft ran.
        levels: deepest level with nodes worth verifying.
        expected: expected accepted tokens of the selected nodes.
        left_out: P of the most probable node that was drafted and not selected; 0 if all were.
        drafting_s: seconds of the draft passes by the cost tables, of a round with feedback.
        masses: depth, own acceptance probability and acceptance mass of the candidates of each expanded node.
        paths: P of each drafted node.
        frontier: P and own acceptance probability of each frontier node.
        is_chain: whether every level so far has a single node, the draft's most probable candidate.
    """

    limits: Limits
    prices: Prices
    acceptance: Acceptance
    has_feedback: bool
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
    is_chain: bool = True

    def log_entry(self) -> dict[str, float]:
        """Returns the figures for `Stats.rounds_log`."""
        return {
            "price": self.prices.time,
            "gain": self.gain,
            "level_cost": self.level_cost,
            "expanded": self.expanded,
            "levels": self.levels,
            "drafted": len(self.paths),
            "expected": self.expected,
        }


def next_level(plan: CostPlan, frontier: Frontier) -> NextLevel | None:
    """Adds the nodes that may be worth verifying, P(v) >= lambda * dc_t, and expands those that pay for a level."""
    level, prices, rows = frontier.level, plan.prices, frontier.rows
    plan.expanded = level
    found = [
        plan.acceptance(probs, level, prices.node / (path or MIN_PATH_PROB))
        for (path, _), probs in zip(plan.frontier, rows, strict=True)
    ]
    plan.drafting_s += prices.first_s if level == 1 else prices.level_s[len(rows) - 1]
    children = paths, acceptances, picks = _children(plan, frontier, found)
    if not paths:
        return None
    plan.levels = level
    plan.paths += paths
    plan.is_chain = plan.is_chain and len(paths) == 1 and picks[0] == 0
    expand = _worth_expanding(plan, children, frontier) if level < plan.limits.max_depth else []
    plan.frontier = [(paths[i], acceptances[i]) for i in expand]
    return NextLevel(picks, [picks[i] for i in expand])


def _children(plan: CostPlan, frontier: Frontier, found: Sequence[list[float]]) -> Children:
    """Returns the candidates whose P pays for a node of a tree of usual size, at most the `max_nodes` most probable.

    Args:
        found: acceptance probabilities of those below each frontier node.
    """
    paths: list[float] = []
    acceptances: list[float] = []
    picks: list[int] = []
    first = 0
    for (path, own), probs, accepted in zip(plan.frontier, frontier.rows, found, strict=True):
        paths += [path * probability for probability in accepted]
        picks += range(first, first + len(accepted))
        acceptances += accepted
        if plan.has_feedback:
            plan.masses.append((frontier.level - 1, own, sum(accepted)))
        first += len(probs)
    if len(paths) <= plan.limits.max_nodes:
        return paths, acceptances, picks
    kept = sorted(sorted(range(len(paths)), key=paths.__getitem__)[-plan.limits.max_nodes :])
    return [paths[i] for i in kept], [acceptances[i] for i in kept], [picks[i] for i in kept]


def _worth_expanding(plan: CostPlan, children: Children, frontier: Frontier) -> list[int]:
    """Selects the nodes to expand: the width that maximizes expected gain minus cost; empty if that is negative."""
    prices, masses = plan.prices.levels, plan.prices.masses[frontier.level]
    paths, acceptances, picks = children
    means = [masses[int(acceptance * CONFIDENCE_BINS)] for acceptance in acceptances]
    gains = [(path * mean, i) for i, (path, mean) in enumerate(zip(paths, means, strict=True))]
    if plan.limits.sees_ends and (ends := frontier.ends()):
        gains = [(gain, i) for gain, i in gains if picks[i] not in ends]
    gains.sort(reverse=True)
    total, best_net, best_gain, best_width = 0.0, -math.inf, 0.0, 0
    for width, ((gain, _), price) in enumerate(zip(gains, prices, strict=False), start=1):
        total += gain
        if total - price > best_net:
            best_net, best_gain, best_width = total - price, total, width
    plan.gain, plan.level_cost = best_gain, prices[max(best_width, 1) - 1]
    if plan.limits.stop and best_net <= 0:
        return []
    return sorted([i for _, i in gains[: best_width if plan.limits.stop else plan.limits.max_width]])


def select(plan: CostPlan) -> list[int] | None:
    """Returns the top n nodes by P in that order, n maximizing expected tokens minus priced time; None for all of a chain.

    Ancestors are included because P never increases along a path. The path most likely to be accepted tends to come first.
    """
    if not plan.paths:
        return None
    drafted = len(plan.paths)
    order = range(min(drafted, plan.limits.max_nodes)) if plan.is_chain else _by_path(plan)
    size = _best_size([plan.paths[i] for i in order], plan.prices.time, plan.prices.verify_s.__getitem__)
    chosen = _chosen(plan, order, size)
    return None if plan.is_chain and size == drafted else chosen


def select_shared(plans: Sequence[CostPlan], verify_s: Callable[[int], float]) -> list[list[int] | None]:
    """Selects for several requests whose trees one pass verifies: the top n nodes of all by P, n maximizing the expected tokens
    of all minus priced time.

    Args:
        verify_s: seconds of the pass with 0, 1, 2, .. nodes besides the roots.
    """
    orders = [_by_path(plan) for plan in plans]
    pairs = [(plan.paths[i], number) for number, plan in enumerate(plans) for i in orders[number]]
    pairs.sort(key=itemgetter(0), reverse=True)
    price = sum(plan.prices.time for plan in plans) / len(plans)
    sizes = [0] * len(plans)
    for _, number in pairs[: _best_size([path for path, _ in pairs], price, verify_s)]:
        sizes[number] += 1
    chosen = zip(plans, orders, sizes, strict=True)
    return [_chosen(plan, order, size) if plan.paths else None for plan, order, size in chosen]


def _by_path(plan: CostPlan) -> list[int]:
    """Returns the nodes by decreasing P, at most as many as are verified; ties keep their order."""
    return sorted(range(len(plan.paths)), key=plan.paths.__getitem__, reverse=True)[: plan.limits.max_nodes]


def _best_size(paths: Sequence[float], price: float, verify_s: Callable[[int], float]) -> int:
    """Returns the n that maximizes the sum of the first n of decreasing `paths` minus the priced time of verifying them."""
    total = best_net = 0.0
    size, start_s = 0, verify_s(0)
    for nodes, path in enumerate(paths, start=1):
        total += path
        net = total - price * (verify_s(nodes) - start_s)
        if net > best_net:
            best_net, size = net, nodes
    return size


def _chosen(plan: CostPlan, order: Sequence[int], size: int) -> list[int]:
    """Returns the root and the first `size` nodes in the order of selection."""
    plan.expected = sum(plan.paths[i] for i in order[:size])
    plan.left_out = plan.paths[order[size]] if size < len(order) else 0.0
    return [0, *[i + 1 for i in order[:size]]]
