"""SAGE's entropy-adaptive trees. Ref: SAGE, arXiv 2602.00523, section 4, Eq. 7-12 and Algorithm 1.

alpha of one round's draft output plans the next round's depth and width (lookahead); a sliding window of accepted lengths
moves the depth's ceiling (history). Where the paper is silent: D, W and W_l are rounded half up, at least 1; the history's
step is 1 within [min_depth, ceiling]; the recursion is run level by level, best paths first when nodes run out; nothing is
drafted below a token that ends the answer.

Shapes: V vocabulary, K candidates, F frontier nodes.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from enum import StrEnum

import torch
from torch import Tensor

from sage.trees.base import Policy
from sage.trees.options import check_choice, check_count, check_number, check_switch
from sage.trees.static import STATIC_TREE, Static
from sage.trees.tree import Frontier, HostGrowth, Outcome


def confidence(logits: Tensor, top_k: int) -> Tensor:
    """alpha = 1 - H / log k of the k largest probabilities, renormalised (Eq. 7-9).

    Args:
        logits: [..., V], V >= top_k; log-probabilities serve as well.
        top_k: k >= 2.

    Returns:
        [...] in [0, 1]; 1 = certain.
    """
    log_p = torch.log_softmax(logits.topk(top_k, dim=-1).values, -1)
    entropy = torch.special.entr(log_p.exp()).sum(-1)
    return (1 - entropy / math.log(top_k)).clamp(0, 1)


def confidence_of(probs: Sequence[float]) -> float:
    """`confidence` of k probabilities that are at hand as numbers, k >= 2; a policy needs it once per round."""
    total = math.fsum(probs)
    entropy = -math.fsum(share * math.log(share) for prob in probs if (share := prob / total) > 0)
    return min(max(1 - entropy / math.log(len(probs)), 0.0), 1.0)


def depth(alpha: float, min_depth: int, max_depth: int) -> float:
    """D = D_min + alpha (D_max - D_min) (Eq. 10)."""
    return min_depth + alpha * (max_depth - min_depth)


def width(alpha: float, min_width: int, max_width: int) -> float:
    """W = W_min + (1 - alpha) (W_max - W_min) (Eq. 11)."""
    return min_width + (1 - alpha) * (max_width - min_width)


def level_width(width: float, level: int, parent_prob: float) -> float:
    """W_l = W * (1 / l) * (0.5 + P_parent) (Eq. 12); l = 1 below the root."""
    return width * (1 / level) * (0.5 + parent_prob)


def prune_threshold(level: int, depth: float) -> float:
    """theta_l = 0.1 * l / D: a candidate is expanded while its probability exceeds it (section 4, construction)."""
    return 0.1 * level / depth


def round_half_up(value: float) -> int:
    """The nearest whole number, halves upwards, at least 1."""
    return max(1, math.floor(value + 0.5))


class Threshold(StrEnum):
    """Which probability theta_l is compared with: the formal statement's path product, or the prose's own."""

    CUMULATIVE = "cumulative"
    NODE = "node"


class AlphaSource(StrEnum):
    """Which draft output alpha is computed from: below the last accepted node, below the root, or this round's root."""

    ACCEPTED = "accepted"
    ROOT = "root"
    CURRENT = "current"


class Sage(Policy):
    """Depth and width from the draft's entropy.

    Args:
        max_depth, min_depth: D_max and D_min of Eq. 10.
        max_width, min_width: W_max and W_min of Eq. 11.
        top_k: k of Eq. 7-9, also the most children of a node.
        max_nodes: N_max, drafted nodes per round.
        threshold: what theta_l prunes by.
        alpha_from: `accepted` and `root` look at the last round (the paper's lookahead), `current` at this one.
        history: whether accepted lengths move the depth's ceiling.
        window: rounds the history looks back on.
        history_low, history_high: mean accepted lengths below and above which the ceiling moves.
        max_depth_ceiling: how far the history may raise it.

    Raises:
        ValueError: an option that is out of range or no number, or bounds in the wrong order.
    """

    name = "sage"
    on_host = True

    def __init__(
        self,
        max_depth: int = 8,
        min_depth: int = 3,
        max_width: int = 10,
        min_width: int = 2,
        top_k: int = 10,
        max_nodes: int = 64,
        threshold: str = Threshold.CUMULATIVE,
        alpha_from: str = AlphaSource.ACCEPTED,
        history: bool = True,
        window: int = 10,
        history_low: float = 2.0,
        history_high: float = 3.0,
        max_depth_ceiling: int = 12,
    ) -> None:
        _check_bounds("depth", min_depth, max_depth)
        _check_bounds("width", min_width, max_width)
        check_count("policy.sage.top_k", top_k, 2)
        check_count("policy.sage.max_nodes", max_nodes, 2)
        check_choice("policy.sage.threshold", threshold, Threshold)
        check_choice("policy.sage.alpha_from", alpha_from, AlphaSource)
        check_switch("policy.sage.history", history)
        check_count("policy.sage.window", window, 1, "; history=false looks back on nothing")
        _check_history(history_low, history_high)
        check_count("policy.sage.max_depth_ceiling", max_depth_ceiling, 1)
        self.min_depth, self.max_depth = min_depth, max_depth
        self.min_width, self.max_width = min_width, max_width
        self.top_k = top_k
        self.node_budget = max_nodes
        self.max_nodes = max(max_nodes, len(STATIC_TREE)) + 1
        self.threshold, self.alpha_from = Threshold(threshold), AlphaSource(alpha_from)
        self.history, self.window = history, window
        self.history_low, self.history_high = history_low, history_high
        self.max_depth_ceiling = max(max_depth_ceiling, max_depth)
        self._static = Static()
        self.candidates = max(top_k, self._static.candidates)
        self.reset()

    def reset(self) -> None:
        self.alpha = 0.5
        self.ceiling = self.max_depth
        self._accepted: deque[int] = deque(maxlen=self.window)
        self._is_first = True
        self._plan_tree()

    def _plan_tree(self) -> None:
        self.depth = depth(self.alpha, self.min_depth, self.ceiling)
        self.width = width(self.alpha, self.min_width, self.max_width)

    def begin(self) -> dict[str, float]:
        self._nodes, self._paths = 0, [1.0]  # drafted so far, and P of each frontier node
        self._plan_tree()
        return {"alpha": self.alpha, "planned_depth": self.depth, "width": self.width}

    def grow(self, frontier: Frontier) -> HostGrowth | None:
        if self.alpha_from is AlphaSource.CURRENT:
            if frontier.level == 1:
                self.alpha = confidence_of(frontier.rows[0][: self.top_k])
                self._plan_tree()
        elif self._is_first:
            return self._static.grow(frontier)
        return self._grow_level(frontier)

    def _grow_level(self, frontier: Frontier) -> HostGrowth | None:
        """Algorithm 1's construction for one level: W_l candidates of each node, the unlikely ones left unexpanded."""
        level = frontier.level
        num_candidates = len(frontier.rows[0])
        children = [
            (path * prob, prob, row * num_candidates + rank)
            for row, (path, probs) in enumerate(zip(self._paths, frontier.rows, strict=True))
            for rank, prob in enumerate(probs[: min(self.top_k, round_half_up(level_width(self.width, level, path)))])
        ]
        left = self.node_budget - self._nodes
        if len(children) > left:
            best = sorted(range(len(children)), key=lambda i: -children[i][0])[:left]
            children = [children[i] for i in sorted(best)]
        self._nodes += len(children)
        if not children:
            return None
        is_last = level >= round_half_up(self.depth) or self._nodes >= self.node_budget
        least = math.inf if is_last else prune_threshold(level, self.depth)
        judged = 0 if self.threshold is Threshold.CUMULATIVE else 1
        expand = [child for child in children if child[judged] > least and child[2] not in frontier.ends]
        self._paths = [child[0] for child in expand]
        return HostGrowth([child[2] for child in children], [child[2] for child in expand])

    def explain(self, entry: dict[str, float]) -> str:
        return f"alpha {entry['alpha']:.2f} planned depth {entry['planned_depth']:.1f}, width {entry['width']:.1f}"

    def observe(self, outcome: Outcome) -> None:
        if outcome.tree.said[0] is None:  # one token was left to emit, so nothing was drafted
            return
        self._is_first = False
        self._accepted.append(outcome.accepted)
        if self.alpha_from is not AlphaSource.CURRENT:
            self.alpha = confidence_of(self._lookahead(outcome))
        if self.history:
            self._move_ceiling()

    def _lookahead(self, outcome: Outcome) -> list[float]:
        """The draft's k largest probabilities at the accepted node nearest to the next root that it was asked about."""
        said = [one for one in (outcome.tree.said[node] for node in outcome.path) if one is not None]
        probs, _ = said[0 if self.alpha_from is AlphaSource.ROOT else -1]
        return probs[: self.top_k]

    def _move_ceiling(self) -> None:
        mean = sum(self._accepted) / len(self._accepted)
        if mean < self.history_low:
            self.ceiling = max(self.min_depth, self.ceiling - 1)
        elif mean > self.history_high:
            self.ceiling = min(self.max_depth_ceiling, self.ceiling + 1)


def _check_bounds(what: str, low: int, high: int) -> None:
    check_count(f"policy.sage.min_{what}", low, 1)
    check_count(f"policy.sage.max_{what}", high, 1)
    if low > high:
        raise ValueError(f"policy.sage: min_{what}={low}, max_{what}={high}; give 1 <= min_{what} <= max_{what}")


def _check_history(low: float, high: float) -> None:
    check_number("policy.sage.history_low", low, 0)
    check_number("policy.sage.history_high", high, 0)
    if low > high:
        raise ValueError(f"policy.sage: history_low={low}, history_high={high}; give history_low <= history_high")
