"""Distances between the laws of draft and target at many positions, without ever holding their logits.

Owns: the chunked computation of the terms and of their gradients. Does not own: which positions, which weights.

With p the target's law, q the draft's (softmax of z / temperature), and a = sum_v min(p_v, q_v):

    term   value                  gradient by z, times temperature
    ce     -sum_v p_v log q_v     q - p
    tv     1 - a                  -q (m - M)       m_v = 1 where q_v < p_v, 1/2 where equal, else 0; M = sum_v q_v m_v
    lk     -log a                 -q (m - M) / a

The gradients are by-products of the logits, so they are computed in the forward pass, chunk by chunk: logits of C positions
exist at a time, nothing is recomputed, [S, V] never exists on either side. M / a is at most 1, so lk's gradient is bounded.

Ref: LK losses, arXiv 2602.23881 (tv and lk); a is the chance that a token sampled from q is accepted.

Shapes: K steps, S supervised positions, C positions of a chunk, D draft's hidden, E target's hidden, U words the draft may say.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

STATS = ("ce", "kl", "agreement", "acceptance")  # columns of the second result
STRETCH = 4096  # words whose products are added up in one go


@dataclass(frozen=True, kw_only=True)
class Terms:
    """How much of each term, at which temperature, and C."""

    ce: float = 0.0
    tv: float = 0.0
    lk: float = 0.0
    temperature: float = 1.0
    chunk_tokens: int = 256

    @property
    def has_overlap(self) -> bool:
        """Whether a term needs the overlap's gradient."""
        return bool(self.tv or self.lk)


class Distillation(Function):
    """sum over steps and positions of weight * (ce * CE + tv * TV + lk * LK).

    The teacher's law of a chunk is computed once for all steps.
    """

    @staticmethod
    def forward(
        ctx: Any,
        states_KSD: Tensor,
        head_UD: Tensor,
        wanted_SE: Tensor,
        target_head_UE: Tensor,
        weight_KS: Tensor,
        terms: Terms,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Differentiable by `states_KSD` and `head_UD`.

        Args:
            weight_KS: 0 leaves a position out.

        Returns:
            the sum; STATS of every step [K, 4], unweighted sums over its positions; and BoolTensor [K, S], whether draft and
            target pick the same token. Only the sum carries a gradient.
        """
        wide = torch.promote_types(states_KSD.dtype, torch.float32)
        total = states_KSD.new_zeros((), dtype=wide)
        stats_KX = states_KSD.new_zeros(len(states_KSD), len(STATS), dtype=wide)
        agree_KS = torch.zeros_like(weight_KS, dtype=torch.bool)
        grad_KSD = torch.empty_like(states_KSD) if states_KSD.requires_grad else None
        grad_UD = torch.zeros_like(head_UD) if head_UD.requires_grad else None
        for start in range(0, len(wanted_SE), terms.chunk_tokens):
            rows = slice(start, start + terms.chunk_tokens)
            p_CU, entropy_C = _law_and_entropy(_log_law(wanted_SE[rows], target_head_UE, terms.temperature, wide))
            best_C = p_CU.argmax(-1)
            for step, (states_SD, weight_S) in enumerate(zip(states_KSD, weight_KS, strict=True)):
                weight_C, states_CD = weight_S[rows].to(wide), states_SD[rows].to(head_UD.dtype)
                log_q_CU = _log_law(states_CD, head_UD, terms.temperature, wide)
                ce_C = -_dot(p_CU, log_q_CU)
                agree_KS[step, rows] = agrees_C = log_q_CU.argmax(-1) == best_C
                value_C, overlap_C, slope_CU = _compare(p_CU, log_q_CU.exp_(), terms)
                total += (weight_C * (terms.ce * ce_C + value_C)).sum()
                stats_KX[step] += torch.stack((ce_C, ce_C - entropy_C, agrees_C.to(wide), overlap_C))[:, weight_C > 0].sum(1)
                slope_CU = slope_CU.to(head_UD.dtype)
                scale_C1 = (weight_C / terms.temperature)[:, None].to(head_UD.dtype)
                if grad_KSD is not None:
                    grad_KSD[step, rows] = (slope_CU @ head_UD) * scale_C1
                if grad_UD is not None:
                    grad_UD.addmm_(slope_CU.T, states_CD * scale_C1)
                del log_q_CU, slope_CU  # the next law would find them still there
            del p_CU
        ctx.save_for_backward(grad_KSD, grad_UD)
        ctx.mark_non_differentiable(stats_KX, agree_KS)
        return total, stats_KX, agree_KS

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        scaled = (None if grad is None else grad * grads[0].to(grad.dtype) for grad in ctx.saved_tensors)
        return *scaled, None, None, None, None


def _log_law(states_CD: Tensor, head_UD: Tensor, temperature: float, wide: torch.dtype) -> Tensor:
    logits_CU = nn.functional.linear(states_CD.to(head_UD.dtype), head_UD).to(wide)
    if temperature != 1:
        logits_CU /= temperature
    return logits_CU.log_softmax(-1)


def _law_and_entropy(log_p_CU: Tensor) -> tuple[Tensor, Tensor]:
    p_CU = log_p_CU.exp()
    return p_CU, -_dot(p_CU, log_p_CU)


def _compare(p_CU: Tensor, q_CU: Tensor, terms: Terms) -> tuple[Tensor, Tensor, Tensor]:
    """tv and lk, weighted [C]; the overlap a [C]; temperature * the gradient by the draft's logits [C, U].

    Takes `q_CU` for itself.
    """
    if not terms.has_overlap:
        difference_CU = q_CU.sub_(p_CU)
        overlap_C = 1 - torch.linalg.vector_norm(difference_CU, 1, dim=-1) / 2  # sum min(p, q) = 1 - |p - q| / 2 for laws
        return torch.zeros_like(overlap_C), overlap_C, difference_CU.mul_(terms.ce)
    overlap_C = torch.minimum(p_CU, q_CU).sum(-1).clamp(min=torch.finfo(q_CU.dtype).tiny)
    missing_CU = p_CU - q_CU
    m_CU = torch.heaviside(missing_CU, missing_CU.new_tensor(0.5))
    rate_C = terms.tv + terms.lk / overlap_C
    slope_CU = m_CU.sub_(_dot(q_CU, m_CU)[:, None]).mul_(q_CU).mul_(-rate_C[:, None]).sub_(missing_CU, alpha=terms.ce)
    return terms.tv * (1 - overlap_C) - terms.lk * overlap_C.log(), overlap_C, slope_CU


def _dot(left_CU: Tensor, right_CU: Tensor) -> Tensor:
    """Row by row, [C], without a [C, U] product; in stretches, as a library may add a whole row up one by one."""
    pairs = zip(left_CU.split(STRETCH, 1), right_CU.split(STRETCH, 1), strict=True)
    return torch.stack([torch.einsum("cu,cu->c", left, right) for left, right in pairs]).sum(0)
