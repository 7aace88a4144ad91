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

from typing import Any

import torch
from torch import Tensor

from sage.calibration import Calibrator, Reliability
from sage.costs import Costs
from sage.trees.base import Policy
from sage.trees.tree import Frontier, Growth, Outcome, Tree

CONFIDENCE_BINS = 4
OFF_PATH_WEIGHT = 0.3
LIVE_RATE = 0.05


class ChildMass:
    """s(depth, confidence): the acceptance mass that a node's candidates keep, learned before it has to be paid for."""

    def __init__(self, most_depth: int, start: float = 0.75, weight: float = 2.0, memory: float = 0.995) -> None:
        self.memory = memory
        self.sums = torch.full((most_depth + 1, CONFIDENCE_BINS), start * weight)
        self.counts = torch.full_like(self.sums, weight)

    @staticmethod
    def bins(acceptance: Tensor) -> Tensor:
        """The confidence bin of a node by its own calibrated acceptance."""
        return (acceptance * CONFIDENCE_BINS).long().clamp(0, CONFIDENCE_BINS - 1)

    def __call__(self, depth: int, acceptance: Tensor) -> Tensor:
        """Expected mass below nodes of `depth` accepted with probability `acceptance` [..]."""
        row = min(depth, len(self.sums) - 1)
        return (self.sums[row] / self.counts[row]).to(acceptance)[self.bins(acceptance)]

    def learn(self, depth: int, acceptance: Tensor, mass: Tensor) -> None:
        """Books the mass [F] found below nodes [F] of one depth."""
        row, bins = min(depth, len(self.sums) - 1), self.bins(acceptance).cpu()
        self.sums[row] *= self.memory
        self.counts[row] *= self.memory
        self.sums[row].index_add_(0, bins, mass.float().cpu())
        self.counts[row].index_add_(0, bins, torch.ones(len(bins)))


class CostAware(Policy):
    """Drafts and verifies what pays, at this machine's prices.

    Args:
        max_depth: levels per round at most.
        max_nodes: verified nodes per round at most.
        max_width: nodes of one level the draft is asked about, at most.
        top_k: candidates per node.
        calibrate: learn acceptance from outcomes; else the draft's probabilities are taken at face value.
        stop: end the drafting where the next level does not pay; else always draft `max_depth` levels.
        retry_every: after rounds not worth drafting for, the draft is asked again 1, 2, 4, .. at most this many rounds later.
        memory: share of the evidence for lambda kept from one round to the next.
    """

    name = "cost_aware"
    learns = True

    def __init__(
        self,
        max_depth: int = 12,
        max_nodes: int = 64,
        max_width: int = 10,
        top_k: int = 10,
        calibrate: bool = True,
        stop: bool = True,
        retry_every: int = 16,
        memory: float = 0.98,
    ) -> None:
        for option, value in (("max_depth", max_depth), ("max_nodes", max_nodes), ("max_width", max_width), ("top_k", top_k)):
            if value < 1:
                raise ValueError(f"policy.cost_aware.{option}: {value} is below 1; give at least 1")
        self.max_depth, self.node_budget, self.max_width = max_depth, max_nodes, max_width
        self.candidates = top_k
        self.calibrate, self.stop = calibrate, stop
        self.retry_every, self.memory = retry_every, memory
        self.max_nodes = max(max_nodes + 1, max_depth * max_width)
        self.costs: Costs | None = None
        self.calibrator = Calibrator()
        self.mass = ChildMass(max_depth)
        self.before, self.after = Reliability(), Reliability()
        self.rounds = 0
        self._tokens = self._seconds = 0.0

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
            "mass": {"sums": self.mass.sums.tolist(), "counts": self.mass.counts.tolist()},
            "costs": self.costs.state() if self.costs else None,
            "tokens": self._tokens,
            "seconds": self._seconds,
            "rounds": self.rounds,
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """The reverse of `state`."""
        self.calibrator.load_state(state["calibrator"])
        self.mass.sums, self.mass.counts = (torch.tensor(state["mass"][key]) for key in ("sums", "counts"))
        self.costs = Costs.from_state(state["costs"]) if state["costs"] else None
        self._tokens, self._seconds, self.rounds = state["tokens"], state["seconds"], state["rounds"]

    # -- one round ----------------------------------------------------------------------------------------------------

    def reset(self) -> None:
        self._skipped = 0
        self._context = self.costs.context if self.costs else 0

    def wants_draft(self) -> bool:
        if self._skipped == 0 or not self.stop:
            return True
        is_power_of_two = self._skipped & (self._skipped - 1) == 0
        return self._skipped % self.retry_every == 0 or (is_power_of_two and self._skipped < self.retry_every)

    def begin(self) -> dict[str, float]:
        self._lambda = self.price
        self._paths: list[Tensor] = []
        self._frontier_path = torch.ones(1)
        self._frontier_acceptance = torch.ones(1)
        self._num_drafted = 0
        self._plan = {"price": self._lambda, "gain": 0.0, "level_cost": 0.0}
        return self._plan

    def grow(self, frontier: Frontier) -> Growth | None:
        ranks = torch.arange(frontier.probs.shape[1], device=frontier.probs.device)
        acceptance_FK = self._acceptance(frontier.probs, ranks, frontier.level)
        self.mass.learn(frontier.level - 1, self._frontier_acceptance, acceptance_FK.sum(1))
        path_FK = self._frontier_path.to(acceptance_FK)[:, None] * acceptance_FK
        best = path_FK.flatten().topk(min(self.node_budget, path_FK.numel()))
        num_kept = int((best.values >= self._node_price()).sum())
        if num_kept == 0:
            return None
        kept = best.indices[:num_kept]
        rows, ranks = kept // path_FK.shape[1], kept % path_FK.shape[1]
        paths, acceptance = best.values[:num_kept], acceptance_FK[rows, ranks]
        self._paths.append(paths)
        self._num_drafted += num_kept
        expand = self._worth_expanding(frontier.level, paths, acceptance)
        self._frontier_path, self._frontier_acceptance = paths[expand], acceptance[expand]
        return Growth(rows, ranks, expand)

    def _acceptance(self, probs: Tensor, ranks: Tensor, depth: int) -> Tensor:
        """Calibrated conditional acceptances [F, K]; siblings are exclusive, so they never sum to more than one."""
        if not self.calibrate:
            return probs
        acceptance = self.calibrator(probs, ranks, depth)
        return acceptance / acceptance.sum(-1, keepdim=True).clamp(min=1.0)

    def _node_price(self) -> float:
        """lambda * dc_t: what one more node has to bring, at the flattest stretch of the cost curve still ahead."""
        assert self.costs is not None
        room = [self.costs.verify(n + 1) - self.costs.verify(n) for n in (1, 8, 16, 32)]
        return self._lambda * min(room)

    def _worth_expanding(self, level: int, paths: Tensor, acceptance: Tensor) -> Tensor:
        """Indices [X] of the new nodes to draft from: the width with the best gain less price; none if it does not pay."""
        assert self.costs is not None
        none = paths.new_zeros(0, dtype=torch.long)
        if level >= self.max_depth:
            return none
        gain = (paths * self.mass(level, acceptance)).sort(descending=True)
        gains, order = gain.values[: self.max_width].tolist(), gain.indices[: self.max_width]
        total, best_net, best_width = 0.0, 0.0, 0
        for width, value in enumerate(gains, start=1):
            total += value
            net = total - self._lambda * (self.costs.draft(width) + width * self._node_price() / self._lambda)
            if net > best_net:
                best_net, best_width = net, width
        self._plan |= {"gain": total, "level_cost": self._lambda * self.costs.draft(max(best_width, 1))}
        if not self.stop:
            best_width = max(best_width, min(len(gains), self.max_width))
        return order[:best_width] if best_width else none

    def select(self, tree: Tree) -> Tensor | None:
        """The top n by P, n the best by expected tokens less priced time; ancestors come along because P never grows."""
        if not self._paths:
            return None
        assert self.costs is not None
        best = torch.cat(self._paths).sort(descending=True, stable=True)
        total, best_net, size = 0.0, 0.0, 0
        floor = self.costs.verify_s(1, self._context)
        for nodes, value in enumerate(best.values[: self.node_budget].tolist(), start=1):
            total += value
            net = total - self._lambda * (self.costs.verify_s(nodes + 1, self._context) - floor)
            if net > best_net:
                best_net, size = net, nodes
        keep = best.indices[:size].sort().values + 1
        return torch.cat((keep.new_zeros(1), keep))

    def explain(self, entry: dict[str, float]) -> str:
        if entry["depth"] == 0:
            return f"drafting did not pay at {entry['price']:.0f} tokens/s"
        verdict = "paid" if entry["gain"] > entry["level_cost"] else "would not pay, stopped"
        return (
            f"at {entry['price']:.0f} tokens/s the last level weighed gained {entry['gain']:.2f} tokens for time worth "
            f"{entry['level_cost']:.2f}: {verdict}"
        )

    # -- what it learns -----------------------------------------------------------------------------------------------

    def observe(self, outcome: Outcome) -> None:
        self.rounds += 1
        self._skipped = 0 if len(outcome.tree) > 1 else self._skipped + 1
        self._context = outcome.context
        self._tokens = self.memory * self._tokens + outcome.accepted + 1
        self._seconds = self.memory * self._seconds + outcome.times.total_s
        self._correct_costs(outcome)
        if outcome.labels is not None and len(outcome.labels) and self.calibrate:
            self._learn(outcome)

    def _correct_costs(self, outcome: Outcome) -> None:
        assert self.costs is not None
        times = outcome.times
        self.costs.verify.correct(len(outcome.tree), times.verify_s, LIVE_RATE)
        for width, seconds in times.draft:
            self.costs.draft.correct(width, seconds, LIVE_RATE)
        explained = times.verify_s + sum(seconds for _, seconds in times.draft)
        self.costs.overhead += LIVE_RATE * (max(times.total_s - explained, 0.0) - self.costs.overhead)

    def _learn(self, outcome: Outcome) -> None:
        """Labels of every drafted candidate of every verified node."""
        assert outcome.labels is not None
        tree = outcome.tree
        nodes = (tree.drafted >= 0).nonzero()[:, 0]
        probs_MK = tree.candidates[tree.drafted[nodes]]
        on_path = torch.zeros(len(tree), device=nodes.device)
        on_path[outcome.path] = 1.0
        weights = OFF_PATH_WEIGHT + (1 - OFF_PATH_WEIGHT) * on_path[nodes]
        ranks = torch.arange(probs_MK.shape[1], device=nodes.device).expand_as(probs_MK)
        depths = (tree.depths[nodes] + 1)[:, None].expand_as(probs_MK)
        flat = [t.reshape(-1).cpu() for t in (probs_MK, ranks, depths, outcome.labels, weights[:, None].expand_as(probs_MK))]
        probs, ranks, depths, labels, weights = flat
        self.before.add(depths, probs, labels)
        self.after.add(depths, self.calibrator(probs, ranks, depths), labels)
        self.calibrator.learn(probs, ranks, depths, labels, weights)
