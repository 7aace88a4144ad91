"""Online calibration of draft probabilities into acceptance probabilities.

A draft's probability is not the probability that the target accepts the token. A greedy target accepts only its argmax: a
candidate at 0.55 is almost certain if the runner-up has 0.2, and close to even if it has 0.45. Draft heads are also
over-confident deep in the tree. A coupled draft's score, softmax(log q + g), is not a probability: its margin measures how far
the draft may err before another token wins. Each verified node labels all of its candidates (greedy and coupled: 1 for the
target's token; else their target probability), so every round yields tens of labels. A logistic model with six weights,
initialized to the identity, is fitted to them with slow forgetting.

The calibrator influences which nodes are drafted, never which are accepted, so decoding stays lossless.

Shapes: M labelled nodes, R candidates per node, X features.
"""

from __future__ import annotations

from collections.abc import Callable
from math import exp, inf, log
from typing import Any

import torch
from torch import Tensor

NUM_FEATURES = 6
MIN_PROB = 1e-5
MARGIN = 1.5  # a factor above e^1.5 between a candidate and its strongest rival carries no further information

Acceptance = Callable[[list[float], int, float], list[float]]  # as `Calibrator.leading`


class Calibrator:
    """P(accepted | parent accepted) from a candidate's probability, its margin over the strongest sibling, rank and depth.

    Args:
        prior: weight of the initial weights, in labels.
        memory: factor that the evidence is multiplied by in every learning step.
    """

    def __init__(self, prior: float = 20.0, memory: float = 0.99) -> None:
        self.prior, self.memory = prior, memory
        self.start = torch.tensor([1.0, *[0.0] * (NUM_FEATURES - 1)], dtype=torch.float64)  # the identity
        self.weights = self.start.clone()
        self._weight_list: list[float] = self.weights.tolist()
        self.curvature = torch.zeros(NUM_FEATURES, NUM_FEATURES, dtype=torch.float64)

    def leading(self, probs: list[float], depth: int, min_prob: float) -> list[float]:
        """Returns the leading acceptance probabilities of one node, up to the first below `min_prob`; without tensors.

        Siblings are mutually exclusive, so their sum is limited to one.
        """
        of_logit, bias, of_margin, second, later, of_depth = self._weight_list
        bias += of_depth * (depth - 1)
        accepted: list[float] = []
        best, room = max(probs[0], MIN_PROB), 1.0
        margin = log(best / max(probs[1], MIN_PROB)) if len(probs) > 1 else MARGIN
        for rank, prob in enumerate(probs):
            if room < min_prob:
                break
            if prob < MIN_PROB:
                prob = MIN_PROB
            elif prob > 1 - MIN_PROB:
                prob = 1 - MIN_PROB
            if rank:
                margin = log(prob / best)
                if rank < 3:
                    bias += second if rank == 1 else later
            if not -MARGIN < margin < MARGIN:
                margin = MARGIN if margin > 0 else -MARGIN
            acceptance = 1 / (1 + exp(-of_logit * log(prob / (1 - prob)) - bias - of_margin * margin))
            if acceptance > room:
                acceptance = room
            if not acceptance >= min_prob:  # also true for NaN
                break
            accepted.append(acceptance)
            room -= acceptance
        return accepted

    def learn(self, probs: Tensor, depths: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
        """Takes one Newton step on the decayed, weighted log-likelihood; returns the predictions [M, R] before it, float64.

        Args:
            probs: [M, R], the R largest draft probabilities below each node, in descending order.
            depths: LongTensor [M], of the candidates.
            labels: [M, R], in [0, 1].
            weights: [M].
        """
        features = self._features(probs, depths)
        predicted = torch.sigmoid(features @ self.weights)
        weights = weights.double().repeat_interleave(probs.shape[1])
        slope = weights * predicted * (1 - predicted)
        self.curvature = self.memory * self.curvature + features.T @ (slope[:, None] * features)
        gradient = features.T @ (weights * (labels.flatten() - predicted))
        # The pull towards the initial weights matches the rate at which evidence decays.
        gradient += (1 - self.memory) * self.prior * (self.start - self.weights)
        ridge = self.prior * torch.eye(NUM_FEATURES, dtype=torch.float64)
        self.weights = self.weights + torch.linalg.solve(self.curvature + ridge, gradient)
        self._weight_list = self.weights.tolist()
        return predicted.view_as(probs)

    @staticmethod
    def _features(probs: Tensor, depths: Tensor) -> Tensor:
        """[M * R, X]: logit, one, margin, rank > 0, rank > 1, depth - 1."""
        probs = probs.double().clamp(MIN_PROB, 1 - MIN_PROB)
        logs = probs.log()
        rivals = logs[:, :1].expand_as(logs).clone()
        rivals[:, 0] = logs[:, 1] if logs.shape[1] > 1 else -inf
        features = torch.ones(*probs.shape, NUM_FEATURES, dtype=torch.float64)
        features[..., 0] = logs - (-probs).log1p()
        features[..., 2] = (logs - rivals).clamp_(-MARGIN, MARGIN)
        features[:, :1, 3] = 0.0
        features[:, :2, 4] = 0.0
        features[..., 5] = depths[:, None] - 1
        return features.flatten(0, 1)

    def state(self) -> dict[str, Any]:
        """Returns the learned state as JSON-serializable numbers."""
        return {"weights": self.weights.tolist(), "curvature": self.curvature.tolist()}

    def load_state(self, state: dict[str, Any]) -> None:
        """Restores the result of `state`; ValueError for a state of another version."""
        if len(state["weights"]) != NUM_FEATURES:
            raise ValueError(f"calibrator: the state has {len(state['weights'])} weights, expected {NUM_FEATURES}; discard it")
        self.weights = torch.tensor(state["weights"], dtype=torch.float64)
        self.curvature = torch.tensor(state["curvature"], dtype=torch.float64)
        self._weight_list = self.weights.tolist()
