"""The distillation loss: from features of both sides to one sum, without ever holding logits of every position.

Owns: soft cross-entropy through the frozen lm_head in chunks, SmoothL1 on features, which positions count. Does not own:
where features come from, the division by the number of supervised tokens (the step does that, over all ranks).

Index shift, by a sequence of five tokens x0..x4 of which x3 and x4 are the answer (loss_mask 0 0 0 1 1), features f0..f4:

    pair t           predicts   whose lm_head is the law of   supervised
    0 = (f0, e1)     f1         x2                            loss_mask[2] = 0, no
    1 = (f1, e2)     f2         x3                            loss_mask[3] = 1, yes
    2 = (f2, e3)     f3         x4                            loss_mask[4] = 1, yes
    3 = (f3, e4)     f4         x5, not in the sequence       not computed

So T tokens give T - 2 pairs: features[:, :T-2] and embeds[:, 1:T-1] in, features[:, 1:T-1] to match, loss_mask[:, 2:].

Shapes: B batch, T tokens, P = T - 2 pairs, S supervised positions, C positions of one chunk, D hidden, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function


@dataclass
class Pairs:
    """What a draft is trained on: inputs and the features to match.

    Attributes:
        embeds_next: [B, P, D], embedding of token t + 1.
        features: [B, P, D], the target's feature of token t.
        position_ids: [B, P] or [3, B, P], rope positions of token t.
        wanted: [B, P, D], the target's feature of token t + 1.
        mask: BoolTensor [B, P], whether token t + 2 is supervised.
    """

    embeds_next: Tensor
    features: Tensor
    position_ids: Tensor
    wanted: Tensor
    mask: Tensor


def make_pairs(embeds: Tensor, features: Tensor, position_ids: Tensor, loss_mask: Tensor) -> Pairs:
    """Shifts whole sequences into pairs (see the table above).

    Args:
        embeds, features: [B, T, D]; position_ids: [B, T] or [3, B, T]; loss_mask: [B, T].
    """
    return Pairs(
        embeds_next=embeds[:, 1:-1],
        features=features[:, :-2],
        position_ids=position_ids[..., :-2],
        wanted=features[:, 1:-1],
        mask=loss_mask[:, 2:].bool(),
    )


def count_supervised(loss_mask: Tensor) -> Tensor:
    """The number of positions `make_pairs` supervises: tokens of the answer that have two tokens before them."""
    return loss_mask[:, 2:].sum()


def with_noise(features: Tensor, half_width: float) -> Tensor:
    """Uniform noise in [-half_width, half_width] on the draft's input, against its own errors piling up when drafting.

    Ref: EAGLE, arXiv 2401.15077, section 4.2 (0.1). Draws from torch's generator, so a resumed run draws the same.
    """
    if not half_width:
        return features
    return features + half_width * (2 * torch.rand_like(features) - 1)


@dataclass
class Sums:
    """Sums over supervised positions; divide by `count` for means. `loss` carries the gradient, the rest is for the eye.

    Attributes:
        loss: the weighted sum that is trained on.
        ce: soft cross-entropy in nats.
        feature: SmoothL1, a mean over the D features of each position.
        agreement: positions where draft and target pick the same token.
        acceptance: sum of min(p, q) over the vocabulary, the chance that a sampled draft token is accepted.
        count: supervised positions.
    """

    loss: Tensor
    ce: Tensor
    feature: Tensor
    agreement: Tensor
    acceptance: Tensor
    count: Tensor

    def detached(self) -> Tensor:
        """[6] float64, in the order of the fields, for adding up and reducing over ranks."""
        return torch.stack([getattr(self, f.name).detach().double() for f in fields(self)])


@dataclass(kw_only=True)
class Objective:
    """ce_weight * CE(softmax(z_target), z_draft) + feature_weight * SmoothL1(f_draft, f_target), summed over positions.

    Ref: SpecVLM, arXiv 2509.11815, online distillation (0.1 and 1.0); EAGLE, arXiv 2401.15077, section 4.2.

    Args:
        smooth_l1_beta: where SmoothL1 turns from square to absolute.
        chunk_tokens: C, positions whose logits exist at once.
    """

    ce_weight: float
    feature_weight: float
    smooth_l1_beta: float
    chunk_tokens: int

    def __call__(self, predicted: Tensor, wanted: Tensor, mask: Tensor, lm_head: Tensor) -> Sums:
        """Sums over the positions of `mask`.

        Args:
            predicted, wanted: [B, P, D], the draft's and the target's features.
            mask: BoolTensor [B, P].
            lm_head: [V, D], frozen.
        """
        predicted_SD, wanted_SD = predicted[mask], wanted[mask]
        ce, stats = SoftCrossEntropy.apply(predicted_SD, wanted_SD, lm_head, self.chunk_tokens)
        feature = smooth_l1(predicted_SD, wanted_SD, self.smooth_l1_beta)
        return Sums(
            loss=self.ce_weight * ce + self.feature_weight * feature,
            ce=ce,
            feature=feature,
            agreement=stats[0],
            acceptance=stats[1],
            count=mask.sum(),
        )


def smooth_l1(predicted_SD: Tensor, wanted_SD: Tensor, beta: float) -> Tensor:
    """SmoothL1 in float32 or wider, a mean over features, a sum over positions."""
    wide = _wide(predicted_SD)
    loss = nn.functional.smooth_l1_loss(predicted_SD.to(wide), wanted_SD.to(wide), beta=beta, reduction="none")
    return loss.mean(-1).sum()


class SoftCrossEntropy(Function):
    """sum over positions of -sum_v p_v log q_v, p and q the softmaxes of both features through one frozen lm_head.

    The gradient with respect to the draft's features, (q - p) @ W, is a by-product of the logits, so it is computed in
    the forward pass, chunk by chunk: logits of C positions exist at a time, nothing is recomputed, [S, V] never exists.
    """

    @staticmethod
    def forward(ctx: Any, draft_SD: Tensor, target_SD: Tensor, lm_head_VD: Tensor, chunk_tokens: int) -> tuple[Tensor, Tensor]:
        """-> (the sum, [2] agreement and acceptance sums); the latter carry no gradient."""
        wide = _wide(draft_SD)
        loss = draft_SD.new_zeros((), dtype=wide)
        stats = draft_SD.new_zeros(2, dtype=wide)
        grad_SD = torch.empty_like(draft_SD) if draft_SD.requires_grad else None
        for start in range(0, len(draft_SD), chunk_tokens):
            rows = slice(start, start + chunk_tokens)
            log_q_CV = _log_probs(draft_SD[rows], lm_head_VD, wide)
            p_CV = _log_probs(target_SD[rows], lm_head_VD, wide).exp_()
            loss -= torch.einsum("cv,cv->", p_CV, log_q_CV)
            stats[0] += (p_CV.argmax(-1) == log_q_CV.argmax(-1)).sum()
            q_CV = log_q_CV.exp_()
            difference_CV = q_CV.sub_(p_CV)
            stats[1] += len(p_CV) - difference_CV.abs().sum() / 2  # sum min(p, q) = 1 - |p - q| / 2 for laws
            if grad_SD is not None:
                grad_SD[rows] = difference_CV.to(lm_head_VD.dtype) @ lm_head_VD
        ctx.save_for_backward(grad_SD)
        ctx.mark_non_differentiable(stats)
        return loss, stats

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (grad_SD,) = ctx.saved_tensors
        return grad_SD * grads[0].to(grad_SD.dtype), None, None, None


def _log_probs(features_CD: Tensor, lm_head_VD: Tensor, wide: torch.dtype) -> Tensor:
    logits_CV = nn.functional.linear(features_CD.to(lm_head_VD.dtype), lm_head_VD).to(wide)
    return logits_CV.log_softmax(-1)


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)
