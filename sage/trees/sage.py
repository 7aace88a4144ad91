"""SAGE's entropy-adaptive trees. Ref: SAGE, arXiv 2602.00523, section 4, Eq. 7-12 and Algorithm 1.

The confidence alpha of one round's draft output sets the next round's depth and width (lookahead); a sliding window of accepted
lengths moves the ceiling of the depth (history). Details that the paper leaves open: D, W and W_l are rounded half up, at least
1; the history's step is 1 within [min_depth, ceiling]; the recursion runs level by level, with the best paths first when the
node budget runs out; nothing is drafted below a token that ends the answer.

Shapes: V vocabulary, K candidates, F frontier nodes.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated

import torch
from torch import Tensor

from sage.io.ranges import NonNegativeFloat, PositiveInt, Range
from sage.planning.base import OptionError, Policy
from sage.planning.tree import Frontier, NextLevel, RoundOutcome
from sage.trees.static import STATIC_TREE, Static


def confidence(logits: Tensor, top_k: int) -> Tensor:
    """Returns alpha = 1 - H / log k of the k largest probabilities, renormalized (Eq. 7-9): [...] in [0, 1], 1 = certain.

    Args:
        logits: [..., V], V >= top_k; log-probabilities are equivalent.
        top_k: k >= 2.
    """
    log_p = torch.log_softmax(logits.topk(top_k, dim=-1).values, -1)
    entropy = torch.special.entr(log_p.exp()).sum(-1)
    return (1 - entropy / math.log(top_k)).clamp(0, 1)


def confidence_of(probs: Sequence[float]) -> float:
    """Returns `confidence` of k >= 2 probabilities given as numbers."""
    total = math.fsum(probs)
    entropy = -math.fsum(share * math.log(share) for prob in probs if (share := prob / total) > 0)
    return min(max(1 - entropy / math.log(len(probs)), 0.0), 1.0)


def depth(alpha: float, min_depth: int, max_depth: int) -> float:
    """Returns D = D_min + alpha (D_max - D_min) (Eq. 10)."""
    return min_depth + alpha * (max_depth - min_depth)


def width(alpha: float, min_width: int, max_width: int) -> float:
    """Returns W = W_min + (1 - alpha) (W_max - W_min) (Eq. 11)."""
    return min_width + (1 - alpha) * (max_width - min_width)


def level_width(width: float, level: int, parent_prob: float) -> float:
    """Returns W_l = W * (1 / l) * (0.5 + P_parent) (Eq. 12); l = 1 below the root."""
    return width * (1 / level) * (0.5 + parent_prob)


def prune_threshold(level: int, depth: float) -> float:
    """Returns theta_l = 0.1 * l / D; candidates above it are expanded (section 4, construction)."""
    return 0.1 * level / depth


def round_half_up(value: float) -> int:
    """Returns the nearest integer, halves rounded up, at least 1."""
    return max(1, math.floor(value + 0.5))


class Threshold(StrEnum):
    """The probability compared with theta_l: the path product (formal statement) or the node's own (prose of the paper)."""

    CUMULATIVE = "cumulative"
    NODE = "node"


class AlphaSource(StrEnum):
    """Source of alpha: the last round's draft output below the last accepted node or the root, or this round's at the root."""

    ACCEPTED = "accepted"
    ROOT = "root"
    CURRENT = "current"


@dataclass
class SagePlan:
    """Plan of one round: confidence of the draft, D, W, nodes drafted so far, path probability of each frontier node."""

    alpha: float
    depth: float
    width: float
    num_nodes: int = 0
    paths: list[float] = field(default_factory=lambda: [1.0])


@dataclass(eq=False, kw_only=True)
class Sage(Policy):
    """Depth and width from the entropy of the last round's draft, pruned by path probability (arXiv 2602.00523).

    Args:
        max_depth: D_max of Eq. 10, levels of a round at full confidence.
        min_depth: D_min of Eq. 10, levels of a round without confidence.
        max_width: W_max of Eq. 11, nodes of a level without confidence.
        min_width: W_min of Eq. 11, nodes of a level at full confidence.
        top_k: k of Eq. 7-9, also the most children of a node.
        max_nodes: N_max, drafted nodes per round.
        threshold: the probability that theta_l prunes by.
        alpha_from: `accepted` and `root` use the last round (the paper's lookahead), `current` uses this one.
        history: whether accepted lengths move the ceiling of the depth.
        window: rounds of the history.
        history_low: mean accepted length below which the ceiling moves down.
        history_high: mean accepted length above which the ceiling moves up.
        max_depth_ceiling: maximum of the ceiling.
    """

    name = "sage"

    max_depth: PositiveInt = 8
    min_depth: PositiveInt = 3
    max_width: PositiveInt = 10
    min_width: PositiveInt = 2
    top_k: Annotated[int, Range(ge=2)] = 10
    max_nodes: Annotated[int, Range(ge=2)] = 64
    threshold: Threshold = Threshold.CUMULATIVE
    alpha_from: AlphaSource = AlphaSource.ACCEPTED
    history: bool = True
    window: Annotated[int, Range(ge=1, remedy="history=false uses none")] = 10
    history_low: NonNegativeFloat = 2.0
    history_high: NonNegativeFloat = 3.0
    max_depth_ceiling: PositiveInt = 12

    def __post_init__(self) -> None:
        super().__post_init__()
        for low, high in (("min_depth", "max_depth"), ("min_width", "max_width"), ("history_low", "history_high")):
            if getattr(self, low) > getattr(self, high):
                problem = f"{getattr(self, low)} exceeds {high}={getattr(self, high)}; give {low} <= {high}"
                raise OptionError(self.name, low, problem)
        self._static = Static()
        self.num_candidates = max(self.top_k, self._static.num_candidates)
        self.tree_capacity = max(self.max_nodes, len(STATIC_TREE)) + 1
        self.reset()

    def reset(self, is_coupled: bool = False) -> None:
        self.alpha = 0.5
        self.ceiling = self.max_depth
        self._accepted: deque[int] = deque(maxlen=self.window)
        self._is_first = True

    def begin(self) -> None:
        alpha = self.alpha
        self.plan = SagePlan(alpha, depth(alpha, self.min_depth, self.ceiling), width(alpha, self.min_width, self.max_width))

    def next_level(self, frontier: Frontier) -> NextLevel | None:
        if self.alpha_from is AlphaSource.CURRENT:
            if frontier.level == 1:
                self.alpha = confidence_of(frontier.rows[0][: self.top_k])
                self.begin()
        elif self._is_first:
            return self._static.next_level(frontier)
        return self._grow_level(frontier)

    def _grow_level(self, frontier: Frontier) -> NextLevel | None:
        """Returns one level of Algorithm 1: W_l candidates per node, of which those above theta_l are expanded."""
        plan, level = self.plan, frontier.level
        num_candidates = len(frontier.rows[0])
        children = [
            (path * prob, prob, row * num_candidates + rank)
            for row, (path, probs) in enumerate(zip(plan.paths, frontier.rows, strict=True))
            for rank, prob in enumerate(probs[: min(self.top_k, round_half_up(level_width(plan.width, level, path)))])
        ]
        num_left = self.max_nodes - plan.num_nodes
        if len(children) > num_left:
            best = sorted(range(len(children)), key=lambda i: -children[i][0])[:num_left]
            children = [children[i] for i in sorted(best)]
        plan.num_nodes += len(children)
        if not children:
            return None
        is_last = level >= round_half_up(plan.depth) or plan.num_nodes >= self.max_nodes
        threshold = math.inf if is_last else prune_threshold(level, plan.depth)
        column, ends = 0 if self.threshold is Threshold.CUMULATIVE else 1, frontier.ends()
        expand = [child for child in children if child[column] > threshold and child[2] not in ends]
        plan.paths = [child[0] for child in expand]
        return NextLevel([child[2] for child in children], [child[2] for child in expand])

    def explain(self, entry: dict[str, float]) -> str:
        return f"alpha {entry['alpha']:.2f} planned depth {entry['planned_depth']:.1f}, width {entry['width']:.1f}"

    def observe(self, outcome: RoundOutcome) -> dict[str, float]:
        if len(outcome.tree) > 1:  # else there was no room for a drafted token
            self._is_first = False
            self._accepted.append(outcome.accepted)
            if self.alpha_from is not AlphaSource.CURRENT:
                self.alpha = confidence_of(self._lookahead(outcome))
            if self.history:
                self._move_ceiling()
        return {"alpha": self.plan.alpha, "planned_depth": self.plan.depth, "width": self.plan.width}

    def _lookahead(self, outcome: RoundOutcome) -> list[float]:
        """Returns the draft's k largest probabilities at the last expanded node of the accepted path, or at the root."""
        expanded = [topk for topk in (outcome.tree.draft_topk[node] for node in outcome.path) if topk is not None]
        probs, _ = expanded[0 if self.alpha_from is AlphaSource.ROOT else -1]
        return probs[: self.top_k]

    def _move_ceiling(self) -> None:
        mean = sum(self._accepted) / len(self._accepted)
        if mean < self.history_low:
            self.ceiling = max(self.min_depth, self.ceiling - 1)
        elif mean > self.history_high:
            self.ceiling = min(max(self.max_depth_ceiling, self.max_depth), self.ceiling + 1)
