"""Online calibration of draft probabilities into acceptance probabilities.

A draft's probability is not the chance that the target takes the token. A greedy target takes the likeliest token whole: a
candidate at 0.55 whose best rival has 0.2 is all but sure, one whose rival has 0.45 is a coin toss. And heads are
over-confident deep in the tree. Each verified node labels all of its drafted candidates (greedy: is it the argmax; sampling:
its target probability), so every round brings tens of labels. A logistic model with six weights, started at the identity,
follows them and forgets slowly.

The calibrator decides which nodes to draft, never which to accept; it cannot cost losslessness.

Shapes: M labelled nodes, R ranks looked at, X features.
"""

from __future__ import annotations

from math import exp, inf, log
from typing import Any

import torch
from torch import Tensor

NUM_FEATURES = 6
CLIP = 1e-5
MARGIN = 1.5  # beyond a factor of e^1.5 between a candidate and its best rival more lead says nothing more
BINS = 10
MOST_DEPTH = 32


class Calibrator:
    """P(accepted | parent accepted) from a candidate's probability, its lead over the best rival, its rank and its depth.

    Args:
        prior: weight of the identity, in labels.
        memory: share of the evidence kept from one step of learning to the next.
    """

    def __init__(self, prior: float = 20.0, memory: float = 0.99) -> None:
        self.prior, self.memory = prior, memory
        self.identity = torch.zeros(NUM_FEATURES, dtype=torch.float64)
        self.identity[0] = 1.0
        self.weights = self.identity.clone()
        self._plain: list[float] = self.weights.tolist()
        self.curvature = torch.zeros(NUM_FEATURES, NUM_FEATURES, dtype=torch.float64)

    def __call__(self, probs: Tensor, depths: Tensor) -> Tensor:
        """Calibrated acceptances.

        Args:
            probs: [M, R], the R largest draft probabilities below each node, descending.
            depths: LongTensor [M], the candidates' depth.

        Returns:
            [M, R] float64, in (0, 1).
        """
        return torch.sigmoid(self._features(probs, depths) @ self.weights).view_as(probs)

    def likeliest(self, probs: list[float], depth: int, least: float) -> list[float]:
        """The same for one node without tensors, down to the first below `least`: a few floats, and they are wanted at once.

        Siblings are exclusive, so their acceptances are kept from summing to more than one.
        """
        of_logit, bias, of_margin, second, later, of_depth = self._plain
        bias += of_depth * (depth - 1)
        accepted: list[float] = []
        best, room = max(probs[0], CLIP), 1.0
        lead = log(best / max(probs[1], CLIP)) if len(probs) > 1 else MARGIN
        for rank, prob in enumerate(probs):
            if room < least:
                break
            if prob < CLIP:
                prob = CLIP
            elif prob > 1 - CLIP:
                prob = 1 - CLIP
            if rank:
                lead = log(prob / best)
                if rank < 3:
                    bias += second if rank == 1 else later
            if not -MARGIN < lead < MARGIN:
                lead = MARGIN if lead > 0 else -MARGIN
            chance = 1 / (1 + exp(-of_logit * log(prob / (1 - prob)) - bias - of_margin * lead))
            if chance > room:
                chance = room
            if not chance >= least:  # nor is a NaN
                break
            accepted.append(chance)
            room -= chance
        return accepted

    def learn(self, probs: Tensor, depths: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
        """One Newton step of the decayed, weighted log-likelihood.

        Args:
            probs, labels: [M, R]; labels in [0, 1].
            depths, weights: [M].

        Returns:
            [M, R], what was predicted before the step.
        """
        features = self._features(probs, depths)
        predicted = torch.sigmoid(features @ self.weights)
        weights = weights.double().repeat_interleave(probs.shape[1])
        slope = weights * predicted * (1 - predicted)
        self.curvature = self.memory * self.curvature + features.T @ (slope[:, None] * features)
        gradient = features.T @ (weights * (labels.flatten() - predicted))
        # The prior pulls back to the identity as strongly as forgetting lets evidence fade.
        gradient += (1 - self.memory) * self.prior * (self.identity - self.weights)
        ridge = self.prior * torch.eye(NUM_FEATURES, dtype=torch.float64)
        self.weights = self.weights + torch.linalg.solve(self.curvature + ridge, gradient)
        self._plain = self.weights.tolist()
        return predicted.view_as(probs)

    @staticmethod
    def _features(probs: Tensor, depths: Tensor) -> Tensor:
        """[M * R, X]: logit, one, margin, rank > 0, rank > 1, depth - 1."""
        probs = probs.double().clamp(CLIP, 1 - CLIP)
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
        """As plain numbers, for JSON."""
        return {"weights": self.weights.tolist(), "curvature": self.curvature.tolist()}

    def load_state(self, state: dict[str, Any]) -> None:
        """The reverse of `state`.

        Raises:
            ValueError: the state is another version's.
        """
        if len(state["weights"]) != NUM_FEATURES:
            raise ValueError(f"calibrator: a state of {len(state['weights'])} weights, {NUM_FEATURES} are known; learn it anew")
        self.weights = torch.tensor(state["weights"], dtype=torch.float64)
        self.curvature = torch.tensor(state["curvature"], dtype=torch.float64)
        self._plain = self.weights.tolist()


class Reliability:
    """How far predictions are from outcomes, by depth: the expected calibration error over ten equal bins."""

    def __init__(self) -> None:
        self._sums = torch.zeros(3, MOST_DEPTH * BINS, dtype=torch.float64)  # count, predicted, outcome by depth and bin

    def add(self, depths: Tensor, predicted: Tensor, labels: Tensor) -> None:
        """Books predictions [M, R] in (0, 1) against labels [M, R] at depths [M]."""
        bins = (predicted * BINS).long().clamp(0, BINS - 1)
        cells = (depths.clamp(max=MOST_DEPTH - 1)[:, None] * BINS + bins).flatten().cpu()
        values = torch.stack([column.double().flatten() for column in (torch.ones_like(predicted), predicted, labels)]).cpu()
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
