"""The loss of a micro-batch: draft predictions at the supervised positions, compared with the target.

Its terms are in `chunked_loss.py`, the rows in `rows.py`; the loop divides by the supervised tokens of all micro-batches.

Shapes: R rows, K steps, S supervised positions, D draft hidden size, E target hidden size, U draft vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from train.config.schema import ObjectiveConfig
from train.distill.chunked_loss import STATISTICS, ChunkedDistillation
from train.distill.rows import Rows

ACCEPTANCE = STATISTICS.index("acceptance")
# Metrics of a micro-batch: the loss; soft cross-entropy in nats; SmoothL1, averaged over the E features of each position, 0 if
# its weight is 0; share of equal most probable tokens of draft and target; sum of min(p, q) over the vocabulary, the acceptance
# probability of a sampled draft token; `loss_ce` minus the entropy of the target, 0 for equal distributions.
METRIC_NAMES = ("loss", "loss_ce", "loss_feature", "agreement", "acceptance", "kl")


@dataclass
class DraftOutput:
    """Predictions of a draft for the supervised positions.

    Attributes:
        hidden: [R, D], input of the draft's lm_head.
        lm_head: [U, D], the draft's own weight, trained or not, or the target's.
        rows: the position and the step of each prediction.
        features: [R, E], predicted target features.
        correction: factors [R, X] and [U, X] of a term that is added to the logits.
        cap: soft cap of the logits; None without.
        confidence: [R], predicted logits of the acceptance probability.
    """

    hidden: Tensor
    lm_head: Tensor
    rows: Rows
    features: Tensor | None = None
    correction: tuple[Tensor, Tensor] | None = None
    confidence: Tensor | None = None
    cap: float | None = None


class LossSums(NamedTuple):
    """Sums over supervised positions.

    Attributes:
        loss: weighted sum of all terms and steps, the only one with a gradient.
        sums: float64 [7], ordered like METRIC_NAMES, and the number of supervised positions, which makes them means. All but
            the loss describe the first step, so that they can be compared between drafts; probabilities are those at the
            objective's temperature, within the draft vocabulary. With chains from anchors, they are estimates.
        agreements: BoolTensor [K, S], agreement of every step and position, False without such a row; with chains from anchors
            `chain_counts`, [2, K].
    """

    loss: Tensor
    sums: Tensor
    agreements: Tensor


class Objective:
    """Sum over steps k of w_k * (sum of weighted terms + feature_weight * SmoothL1), summed over positions.

    w_k is step_decay^k, divided by the sum of all step weights, so that the loss does not grow with the number of steps. The
    target distribution is restricted to the draft vocabulary and renormalized.

    Ref: SpecVLM, arXiv 2509.11815 (0.1 CE + 1.0 SmoothL1); EAGLE-3, arXiv 2503.01840, section 3.2 (steps, reduced
    vocabulary); LK losses, arXiv 2602.23881. Differs by: EAGLE-3 does not divide by the sum of its weights.
    """

    def __init__(self, config: ObjectiveConfig) -> None:
        self.config = config

    def __call__(
        self, output: DraftOutput, target_features_SE: Tensor, target_lm_head_UE: Tensor, target_cap: float | None = None
    ) -> LossSums:
        """Returns the sums over all rows; target features at the supervised positions, lm_head rows of the draft vocabulary,
        and the soft cap of the target's logits.
        """
        target = (target_features_SE, target_lm_head_UE, target_cap)
        rows, wide = output.rows, torch.promote_types(output.hidden.dtype, torch.float32)
        weight_R = self.step_weights(output.hidden.device, wide)[rows.step] * rows.scale
        count, first_R = rows.num_supervised.to(wide), (rows.step == 0).to(wide) * rows.scale
        first_R = first_R * (count / first_R.sum().clamp(min=1))  # the ratio estimator: no share exceeds 1
        if self.config.dpace_alpha is not None:
            with torch.no_grad():
                _, stats_RX, _ = self._distill(output, *target, weight_R)
            weight_R = pace_weights(stats_RX[:, ACCEPTANCE], rows, self.config.steps, self.config.dpace_alpha)
        loss, stats_RX, agree_R = self._distill(output, *target, weight_R)
        if output.confidence is not None:
            loss = loss + confidence_loss(output.confidence, stats_RX[:, ACCEPTANCE], weight_R)
        feature = loss.new_zeros(())
        if self.config.feature_weight:
            assert output.features is not None, "objective.feature_weight with a draft that predicts no feature"
            wanted_RE = target_features_SE.index_select(0, rows.position).to(wide)
            distance_RE = nn.functional.smooth_l1_loss(
                output.features.to(wide), wanted_RE, beta=self.config.smooth_l1_beta, reduction="none"
            )
            distance_R = distance_RE.mean(-1)
            loss = loss + self.config.feature_weight * (weight_R * distance_R).sum()
            feature = (distance_R * first_R).sum()
        if rows.is_complete:
            agreements = agree_R.new_zeros(self.config.steps, len(rows.counts))
            agreements[rows.step, rows.position] = agree_R
        else:
            agreements = chain_counts(agree_R, rows, self.config.steps)
        ce, kl, agreement, acceptance = (stats_RX * first_R[:, None]).sum(0)
        sums = torch.stack([each.detach().double() for each in (loss, ce, feature, agreement, acceptance, kl, count)])
        return LossSums(loss, sums, agreements)

    def _distill(
        self, output: DraftOutput, features_SE: Tensor, lm_head_UE: Tensor, target_cap: float | None, weight_R: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        factors = (output.hidden, output.lm_head)
        if not torch.is_grad_enabled():
            factors = (output.hidden.detach(), output.lm_head.detach())
        inputs = (*factors, features_SE, lm_head_UE, weight_R, output.rows, self.config, (output.cap, target_cap))
        results: tuple[Tensor, Tensor, Tensor] = ChunkedDistillation.apply(*inputs, *(output.correction or ()))
        return results

    def step_weights(self, device: torch.device, dtype: torch.dtype) -> Tensor:
        """Returns w_k, [K]."""
        decay_K = self.config.step_decay ** torch.arange(self.config.steps, device=device, dtype=dtype)
        return decay_K / decay_K.sum()


def pace_weights(acceptance_R: Tensor, rows: Rows, num_steps: int, alpha: float) -> Tensor:
    """Returns the weights of the rows of chains by D-PACE, [R], scaled by the factors of their chains.

    Step k weighs the sum over the steps j >= k of the probability that a chain is accepted up to j, where (1 - alpha) a + alpha
    replaces every acceptance probability a. The weights of a chain sum to 1 in the mean over all chains.

    Ref: D-PACE, arXiv 2605.18810. Differs by: a is the overlap of draft and target, not the probability of the data's token.
    """
    accepted_CK = acceptance_R.new_ones(rows.num_chains, num_steps)
    is_row_CK = torch.zeros_like(accepted_CK)
    accepted_CK[rows.chain, rows.step] = (1 - alpha) * acceptance_R + alpha
    is_row_CK[rows.chain, rows.step] = 1
    reached_CK = accepted_CK.cumprod(1) * is_row_CK
    from_KK = reached_CK.new_ones(num_steps, num_steps).tril()  # cumsum of floats has no deterministic kernel on GPUs
    weight_CK = reached_CK @ from_KK * is_row_CK
    mean = weight_CK.sum() / is_row_CK[:, 0].sum().clamp(min=1)
    return weight_CK[rows.chain, rows.step] * rows.scale / mean.clamp(min=torch.finfo(mean.dtype).tiny)


def confidence_loss(logits_R: Tensor, acceptance_R: Tensor, weight_R: Tensor) -> Tensor:
    """Returns the weighted sum of the binary cross-entropy between predicted and true acceptance probabilities.

    Ref: DSpark, arXiv 2607.05147, with a weight of 1. The prediction reads detached states and does not change the draft.
    """
    wanted_R = acceptance_R.clamp(0, 1)
    loss_R = nn.functional.binary_cross_entropy_with_logits(logits_R.to(wanted_R.dtype), wanted_R, reduction="none")
    return (weight_R * loss_R).sum()


def chain_counts(agree_R: Tensor, rows: Rows, num_steps: int) -> Tensor:
    """Counts, per step, the chains whose earlier tokens all agree with the target's, and those of them that agree again.

    Returns float64 [2, K]. Worked example of three chains over three steps, whose second ends with the answer after two:

        agree    [1 1 0] [1 1 .] [0 1 1]    reached 3 2 1, agreed 2 2 0
    """
    agree_KC, is_row_KC = agree_R.new_zeros(2, num_steps, rows.num_chains)
    agree_KC[rows.step, rows.chain] = agree_R
    is_row_KC[rows.step, rows.chain] = True
    agreed_KC = agree_KC.cumprod(0).bool()
    reached_KC = is_row_KC & torch.cat((torch.ones_like(agreed_KC[:1]), agreed_KC[:-1]))
    return torch.stack((reached_KC.sum(1), agreed_KC.sum(1))).double()
