"""The loss of a micro-batch: draft predictions at the supervised positions, compared with the target.

Does not own: the terms and their chunked computation (train.distill.chunked_loss), the supervised positions
(train.distill.pairs), the division by the number of supervised tokens over all ranks (train.job.loop).

Shapes: K steps, S supervised positions, D draft hidden size, E target hidden size, U draft vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from train.config.schema import ObjectiveConfig
from train.distill.chunked_loss import STATISTICS, ChunkedDistillation

# Metrics in the order of `LossSums.stacked`, whose last entry is the count they are divided by.
METRIC_NAMES = ("loss", "loss_ce", "loss_feature", "agreement", "acceptance", "kl")


@dataclass
class ChainRows:
    """Rows of drafts that start at few anchors; each belongs to one step of one chain.

    Attributes:
        step_N: LongTensor, step of each row in its chain.
        position_N: LongTensor, the supervised position whose token the row predicts.
        chain_N: LongTensor, the row's chain; `num_chains` of them exist.
        scale_N: factor of the row's loss, the reciprocal of the probability with which its chain was drawn.
    """

    step_N: Tensor
    position_N: Tensor
    chain_N: Tensor
    scale_N: Tensor
    num_chains: int


@dataclass
class DraftOutput:
    """Predictions of a draft at the supervised positions, unrolled for K steps.

    Attributes:
        hidden: [K, S, D], input of the draft's lm_head; row s of every step predicts the same token.
        lm_head: [U, D], the draft's own weight, trained or not, or the target's.
        is_valid: BoolTensor [K, S], False where a sequence starts too late for a chain of that depth.
        features: [K, S, E], predicted target features; None for a draft that predicts none.
        chains: steps and positions of N rows, if drafts start at few anchors: K is 1 and S is N in the shapes above.
    """

    hidden: Tensor
    lm_head: Tensor
    is_valid: Tensor
    features: Tensor | None = None
    chains: ChainRows | None = None


@dataclass
class LossSums:
    """Sums over supervised positions; divide by `count` for means. Only `loss` carries a gradient.

    All fields except `loss` and `agreements` describe the first step, so that they can be compared between drafts;
    probabilities are those at the objective's temperature, within the draft vocabulary. With chains from anchors, the sums
    are estimates of those over all positions.

    Attributes:
        loss: weighted sum of all terms and steps.
        ce: soft cross-entropy in nats.
        feature: SmoothL1, averaged over the E features of each position; 0 if its weight is 0.
        agreement: positions where draft and target have the same most probable token.
        acceptance: sum of min(p, q) over the vocabulary, the acceptance probability of a sampled draft token.
        kl: `ce` minus the entropy of the target; 0 for equal distributions.
        count: supervised positions.
        agreements: not a sum: BoolTensor [K, S], agreement of every step and position; with chains from anchors
            `chain_counts`, [2, K].
    """

    loss: Tensor
    ce: Tensor
    feature: Tensor
    agreement: Tensor
    acceptance: Tensor
    kl: Tensor
    count: Tensor
    agreements: Tensor

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
        """Returns the sums over all positions and steps.

        Args:
            target_features_SE: features of the target at the same positions, the input of its lm_head.
            target_lm_head_UE: frozen lm_head rows of the draft vocabulary.
        """
        weight_KS, chains = self.step_weights(output), output.chains
        first_S = output.is_valid[0].to(weight_KS.dtype)
        count = first_S.sum()
        if chains is not None:
            count = torch.full_like(count, len(target_features_SE))
            first_S = first_S * (chains.step_N == 0) * chains.scale_N
            first_S = first_S * (count / first_S.sum().clamp(min=1))  # the ratio estimator: no share exceeds 1
            target_features_SE = target_features_SE[chains.position_N]
        loss, stats_KSX, agree_KS = ChunkedDistillation.apply(
            output.hidden, output.lm_head, target_features_SE, target_lm_head_UE, weight_KS, self.config
        )
        distance_KS = torch.zeros_like(stats_KSX[..., 0])
        if self.config.feature_weight:
            assert output.features is not None, "objective.feature_weight with a draft that predicts no feature"
            wide, beta = torch.promote_types(output.features.dtype, torch.float32), self.config.smooth_l1_beta
            predicted_KSE, target_KSE = output.features.to(wide), target_features_SE.to(wide).expand_as(output.features)
            distance_KS = nn.functional.smooth_l1_loss(predicted_KSE, target_KSE, beta=beta, reduction="none").mean(-1)
            loss = loss + self.config.feature_weight * (weight_KS * distance_KS).sum()
        first = dict(zip(STATISTICS, first_S @ stats_KSX[0], strict=True))
        agreements = agree_KS if chains is None else chain_counts(agree_KS[0], chains, self.config.steps)
        feature = first_S @ distance_KS[0].detach()
        return LossSums(loss=loss, feature=feature, count=count, agreements=agreements, **first)

    def step_weights(self, output: DraftOutput) -> Tensor:
        """Returns w_k of every position, [K, S]; 0 where the chain is not valid. Rows of chains are scaled."""
        wide = torch.promote_types(output.hidden.dtype, torch.float32)
        steps_K = torch.arange(self.config.steps, device=output.hidden.device, dtype=wide)
        decay_K = self.config.step_decay**steps_K
        weight_K, chains = decay_K / decay_K.sum(), output.chains
        if chains is not None:
            return (weight_K[chains.step_N] * chains.scale_N)[None] * output.is_valid
        return weight_K[: len(output.hidden), None] * output.is_valid


def chain_counts(agree_N: Tensor, chains: ChainRows, num_steps: int) -> Tensor:
    """Counts, per step, the chains whose earlier tokens all agree with the target's, and those of them that agree again.

    Args:
        agree_N: BoolTensor, whether draft and target have the same most probable token.

    Returns:
        float64 [2, K]. Worked example of three chains over three steps, whose second ends with the answer after two:

            agree    [1 1 0] [1 1 .] [0 1 1]    reached 3 2 1, agreed 2 2 0
    """
    agree_KC, is_row_KC = agree_N.new_zeros(2, num_steps, chains.num_chains)
    agree_KC[chains.step_N, chains.chain_N] = agree_N
    is_row_KC[chains.step_N, chains.chain_N] = True
    agreed_KC = agree_KC.cumprod(0).bool()
    reached_KC = is_row_KC & torch.cat((torch.ones_like(agreed_KC[:1]), agreed_KC[:-1]))
    return torch.stack((reached_KC.sum(1), agreed_KC.sum(1))).double()
