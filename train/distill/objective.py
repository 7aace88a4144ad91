"""The loss of a micro-batch: draft predictions at the supervised positions, compared with the target.

Does not own: the terms and their chunked computation (train.distill.chunked_loss), the supervised positions
(train.distill.pairs) and the rows that predict them (train.distill.rows), the division by the number of supervised tokens over
all ranks (train.job.loop).

Shapes: R rows, K steps, S supervised positions, D draft hidden size, E target hidden size, U draft vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from train.config.schema import ObjectiveConfig
from train.distill.chunked_loss import STATISTICS, ChunkedDistillation
from train.distill.rows import Rows

# Metrics in the order of `LossSums.stacked`, whose last entry is the count they are divided by.
METRIC_NAMES = ("loss", "loss_ce", "loss_feature", "agreement", "acceptance", "kl")


@dataclass
class DraftOutput:
    """Predictions of a draft for the supervised positions.

    Attributes:
        hidden: [R, D], input of the draft's lm_head.
        lm_head: [U, D], the draft's own weight, trained or not, or the target's.
        rows: the position and the step of each prediction.
        features: [R, E], predicted target features; None for a draft that predicts none.
    """

    hidden: Tensor
    lm_head: Tensor
    rows: Rows
    features: Tensor | None = None


@dataclass
class LossSums:
    """Sums over supervised positions; divide by `count` for means. Only `loss` carries a gradient.

    All fields except `loss` and `agree_KS` describe the first step, so that they can be compared between drafts; probabilities
    are those at the objective's temperature, within the draft vocabulary.

    Attributes:
        loss: weighted sum of all terms and steps.
        ce: soft cross-entropy in nats.
        feature: SmoothL1, averaged over the E features of each position; 0 if its weight is 0.
        agreement: positions where draft and target have the same most probable token.
        acceptance: sum of min(p, q) over the vocabulary, the acceptance probability of a sampled draft token.
        kl: `ce` minus the entropy of the target; 0 for equal distributions.
        count: supervised positions.
        agree_KS: BoolTensor, agreement of every step and position, False without such a row; not a sum.
    """

    loss: Tensor
    ce: Tensor
    feature: Tensor
    agreement: Tensor
    acceptance: Tensor
    kl: Tensor
    count: Tensor
    agree_KS: Tensor

    def stacked(self) -> Tensor:
        """Returns the sums as a detached [7] float64 tensor, ordered like METRIC_NAMES and then `count`."""
        sums = (self.loss, self.ce, self.feature, self.agreement, self.acceptance, self.kl, self.count)
        return torch.stack([value.detach().double() for value in sums])


class Objective:
    """Sum over steps k of w_k * (sum of weighted terms + feature_weight * SmoothL1), summed over positions.

    w_k is step_decay^k, divided by the sum of all step weights, so that the loss does not grow with the number of steps. The
    target distribution is restricted to the draft vocabulary and renormalized.

    Ref: SpecVLM, arXiv 2509.11815 (0.1 CE + 1.0 SmoothL1); EAGLE-3, arXiv 2503.01840, section 3.2 (steps, reduced
    vocabulary); LK losses, arXiv 2602.23881. Differs by: EAGLE-3 does not divide by the sum of its weights.
    """

    def __init__(self, config: ObjectiveConfig) -> None:
        self.config = config

    def __call__(self, output: DraftOutput, target_features_SE: Tensor, target_lm_head_UE: Tensor) -> LossSums:
        """Returns the sums over all rows.

        Args:
            target_features_SE: features of the target at the supervised positions, the input of its lm_head.
            target_lm_head_UE: frozen lm_head rows of the draft vocabulary.
        """
        rows, wide = output.rows, torch.promote_types(output.hidden.dtype, torch.float32)
        weight_R = self.step_weights(output.hidden.device, wide)[rows.step]
        loss, stats_RX, agree_R = ChunkedDistillation.apply(
            output.hidden, output.lm_head, target_features_SE, target_lm_head_UE, weight_R, rows, self.config
        )
        is_first_R = rows.step == 0
        feature = loss.new_zeros(())
        if self.config.feature_weight:
            assert output.features is not None, "objective.feature_weight with a draft that predicts no feature"
            wanted_RE = target_features_SE.index_select(0, rows.position).to(wide)
            distance_RE = nn.functional.smooth_l1_loss(
                output.features.to(wide), wanted_RE, beta=self.config.smooth_l1_beta, reduction="none"
            )
            distance_R = distance_RE.mean(-1)
            loss = loss + self.config.feature_weight * (weight_R * distance_R).sum()
            feature = (distance_R * is_first_R).sum()
        first = dict(zip(STATISTICS, (stats_RX * is_first_R[:, None]).sum(0), strict=True))
        agree_KS = agree_R.new_zeros(self.config.steps, len(target_features_SE))
        agree_KS[rows.step, rows.position] = agree_R
        return LossSums(loss=loss, feature=feature, count=is_first_R.sum(), agree_KS=agree_KS, **first)

    def step_weights(self, device: torch.device, dtype: torch.dtype) -> Tensor:
        """Returns w_k, [K]."""
        decay_K = self.config.step_decay ** torch.arange(self.config.steps, device=device, dtype=dtype)
        return decay_K / decay_K.sum()
