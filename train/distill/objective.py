"""The loss of a micro-batch: what a draft said at the supervised positions, held against the target.

Owns: the mixture of terms, step weights, what is reported beside the loss. Does not own: the chunked computation
(train.distill.chunked_loss), which positions count (`pairs`), the division by the number of supervised tokens (the
step does that, over all ranks).

Shapes: K steps, S supervised positions, D draft's hidden, E target's hidden, U words the draft may say.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor, nn

from train.distill.chunked_loss import STATS, Distillation, Terms


@dataclass
class Drafted:
    """What a draft says at the supervised positions, K steps deep.

    Attributes:
        states: [K, S, D], what its lm_head reads; row s of step k for the same token as row s of step 0.
        head: [U, D], that lm_head: its own, trained or not, or the target's.
        is_real: BoolTensor [K, S], False where a sequence begins too late for a chain of that depth.
        features: [K, S, E], predictions of the target's feature; None of a draft that makes none.
    """

    states: Tensor
    head: Tensor
    is_real: Tensor
    features: Tensor | None = None


@dataclass
class Sums:
    """Sums over supervised positions; divide by `count` for means. `loss` carries the gradient, the rest is for the eye.

    All but `loss` are those of the first step, so they can be compared between drafts; probabilities are those of the laws
    at the objective's temperature, within the words the draft may say.

    Attributes:
        loss: the weighted sum that is trained on.
        ce: soft cross-entropy in nats.
        feature: SmoothL1, a mean over the E features of each position; 0 where it is not trained on.
        agreement: positions where draft and target pick the same token.
        acceptance: sum of min(p, q) over the vocabulary, the chance that a sampled draft token is accepted.
        kl: ce less the target's entropy; 0 for equal laws.
        count: supervised positions.
        agree_KS: BoolTensor, of every step and position; not a sum.
    """

    loss: Tensor
    ce: Tensor
    feature: Tensor
    agreement: Tensor
    acceptance: Tensor
    kl: Tensor
    count: Tensor
    agree_KS: Tensor

    def detached(self) -> Tensor:
        """[7] float64, the sums in the order of the fields, for adding up and reducing over ranks."""
        return torch.stack([getattr(self, f.name).detach().double() for f in fields(self)[:-1]])


@dataclass(kw_only=True)
class Objective:
    """Sum over steps k of w_k * (ce * CE + tv * TV + lk * LK + feature * SmoothL1), summed over positions.

    w_k is step_decay^k, divided by their sum, so that a loss does not grow with the number of steps. The target's law is
    restricted to the words the draft may say and renormalised.

    Ref: SpecVLM, arXiv 2509.11815 (0.1 CE + 1.0 SmoothL1); EAGLE-3, arXiv 2503.01840, section 3.2 (steps, reduced
    vocabulary); LK losses, arXiv 2602.23881. Differs by: EAGLE-3 does not divide by the sum of its weights.

    Args:
        ce_weight, tv_weight, lk_weight, feature_weight: the mixture.
        steps, step_decay: K, and the weight of a step relative to the one before.
        temperature: of both laws.
        smooth_l1_beta: where SmoothL1 turns from square to absolute.
        chunk_tokens: positions whose logits exist at once.
    """

    ce_weight: float
    feature_weight: float
    tv_weight: float = 0.0
    lk_weight: float = 0.0
    steps: int = 1
    step_decay: float = 1.0
    temperature: float = 1.0
    smooth_l1_beta: float = 1.0
    chunk_tokens: int = 256

    def __call__(self, drafted: Drafted, wanted_SE: Tensor, lm_head_UE: Tensor) -> Sums:
        """Sums over all positions and steps.

        Args:
            wanted_SE: the target's features.
            lm_head_UE: frozen, the rows of the words the draft may say.
        """
        weight_KS = self.step_weights(drafted)
        terms = Terms(
            ce=self.ce_weight,
            tv=self.tv_weight,
            lk=self.lk_weight,
            temperature=self.temperature,
            chunk_tokens=self.chunk_tokens,
        )
        loss, stats_KX, agree_KS = Distillation.apply(drafted.states, drafted.head, wanted_SE, lm_head_UE, weight_KS, terms)
        feature_K = loss.new_zeros(len(weight_KS))
        if self.feature_weight:
            assert drafted.features is not None, "objective.feature_weight with a draft that predicts no feature"
            distance_KS = smooth_l1(drafted.features, wanted_SE, self.smooth_l1_beta)
            loss = loss + self.feature_weight * (weight_KS * distance_KS).sum()
            feature_K = distance_KS.sum(1)
        first = dict(zip(STATS, stats_KX[0], strict=True))
        return Sums(loss=loss, feature=feature_K[0], count=drafted.is_real[0].sum(), agree_KS=agree_KS, **first)

    def step_weights(self, drafted: Drafted) -> Tensor:
        """[K, S], 0 where there is no such chain."""
        wide = torch.promote_types(drafted.states.dtype, torch.float32)
        decay_K = self.step_decay ** torch.arange(self.steps, device=drafted.states.device, dtype=wide)
        return (decay_K / decay_K.sum())[: len(drafted.states), None] * drafted.is_real


def smooth_l1(predicted_KSE: Tensor, wanted_SE: Tensor, beta: float) -> Tensor:
    """SmoothL1 in float32 or wider, a mean over features, [K, S]."""
    wide = torch.promote_types(predicted_KSE.dtype, torch.float32)
    wanted_KSE = wanted_SE.to(wide).expand_as(predicted_KSE)
    return nn.functional.smooth_l1_loss(predicted_KSE.to(wide), wanted_KSE, beta=beta, reduction="none").mean(-1)
