"""Online calibration of draft probabilities into acceptance probabilities.

A draft's probability is not the chance that the target takes the token: heads are over-confident deep in the tree. Each
verified node labels all of its drafted candidates (greedy: is it the argmax; sampling: its target probability), so every
round brings tens of labels. A logistic model with five weights, started at the identity, follows them and forgets slowly.

The calibrator decides which nodes to draft, never which to accept; it cannot cost losslessness.

Shapes: M labelled candidates, X features.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

NUM_FEATURES = 5
CLIP = 1e-5
BINS = 10
MOST_DEPTH = 32


class Calibrator:
    """P(accepted | parent accepted) from the draft's probability, the candidate's rank and its depth.

    Args:
        prior: weight of the identity, in labels.
        memory: share of the evidence kept from one round to the next.
    """

    def __init__(self, prior: float = 20.0, memory: float = 0.995) -> None:
        self.prior, self.memory = prior, memory
        self.weights = torch.zeros(NUM_FEATURES, dtype=torch.float64)
        self.weights[0] = 1.0
        self.identity = self.weights.clone()
        self._plain: list[float] = self.weights.tolist()
        self.curvature = torch.zeros(NUM_FEATURES, NUM_FEATURES, dtype=torch.float64)

    def __call__(self, probs: Tensor, ranks: Tensor, depth: int | Tensor) -> Tensor:
        """Calibrated acceptance, elementwise.

        Args:
            probs: draft probabilities, any shape.
            ranks: their ranks, broadcastable.
            depth: depth of the candidates, broadcastable.

        Returns:
            as `probs`, in (0, 1).
        """
        w = self._plain
        logit = torch.logit(probs.float(), eps=CLIP)
        bias = w[1] + w[4] * (depth - 1)
        return torch.sigmoid(w[0] * logit + (w[2] * (ranks > 0) + w[3] * (ranks > 1)) + bias)

    def one(self, prob: float, rank: int, depth: int) -> float:
        """The same for one candidate, without tensors: a level has tens of them, and they are wanted at once."""
        w = self._plain
        clipped = min(max(prob, CLIP), 1 - CLIP)
        logit = math.log(clipped / (1 - clipped))
        return 1 / (1 + math.exp(-(w[0] * logit + w[1] + w[2] * (rank > 0) + w[3] * (rank > 1) + w[4] * (depth - 1))))

    def learn(self, probs: Tensor, ranks: Tensor, depths: Tensor, labels: Tensor, weights: Tensor) -> None:
        """One Newton step of the decayed, weighted log-likelihood.

        Args:
            probs, ranks, depths, labels, weights: [M] each; labels in [0, 1].
        """
        features = self._features(probs, ranks, depths)
        predicted = torch.sigmoid(features @ self.weights)
        slope = (weights * predicted * (1 - predicted)).double()
        self.curvature = self.memory * self.curvature + features.T @ (slope[:, None] * features)
        gradient = features.T @ (weights.double() * (labels.double() - predicted))
        # The prior pulls back to the identity as strongly as forgetting lets evidence fade.
        gradient += (1 - self.memory) * self.prior * (self.identity - self.weights)
        ridge = self.prior * torch.eye(NUM_FEATURES, dtype=torch.float64)
        self.weights = self.weights + torch.linalg.solve(self.curvature + ridge, gradient)
        self._plain = self.weights.tolist()

    @staticmethod
    def _features(probs: Tensor, ranks: Tensor, depths: Tensor) -> Tensor:
        logit = torch.logit(probs.double(), eps=CLIP)
        columns = (logit, torch.ones_like(logit), (ranks > 0).double(), (ranks > 1).double(), depths.double() - 1)
        return torch.stack(columns, -1).cpu()

    def state(self) -> dict[str, Any]:
        """As plain numbers, for JSON."""
        return {"weights": self.weights.tolist(), "curvature": self.curvature.tolist()}

    def load_state(self, state: dict[str, Any]) -> None:
        """The reverse of `state`."""
        self.weights = torch.tensor(state["weights"], dtype=torch.float64)
        self.curvature = torch.tensor(state["curvature"], dtype=torch.float64)
        self._plain = self.weights.tolist()


class Reliability:
    """How far predictions are from outcomes, by depth: the expected calibration error over ten equal bins."""

    def __init__(self) -> None:
        self._sums = torch.zeros(3, MOST_DEPTH * BINS, dtype=torch.float64)  # count, predicted, outcome by depth and bin

    def add(self, depths: Tensor, predicted: Tensor, labels: Tensor) -> None:
        """Books predictions [M] in (0, 1) against labels [M]."""
        bins = (predicted * BINS).long().clamp(0, BINS - 1)
        cells = (depths.clamp(max=MOST_DEPTH - 1) * BINS + bins).cpu()
        values = torch.stack((torch.ones_like(predicted), predicted, labels)).double().cpu()
        self._sums.index_add_(1, cells, values)

    def curve(self, depth: int) -> list[tuple[float, float, int]]:
        """(mean prediction, mean outcome, count) of each filled bin at `depth`."""
        rows = self._sums[:, depth * BINS : (depth + 1) * BINS].T.tolist()
        return [(predicted / count, outcome / count, int(count)) for count, predicted, outcome in rows if count]

    def error(self) -> dict[int, float]:
        """Expected calibration error by depth: sum over bins of count share times |mean prediction - mean outcome|."""
        errors = {}
        for depth in range(MOST_DEPTH):
            cells = self.curve(depth)
            total = sum(count for _, _, count in cells)
            if total:
                errors[depth] = sum(count * abs(predicted - outcome) for predicted, outcome, count in cells) / total
        return errors
