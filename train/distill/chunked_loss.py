"""Distillation losses between draft and target distributions at many positions, without materializing their logits.

With p the target distribution, q the draft distribution (softmax of z / temperature), and a = sum_v min(p_v, q_v):

    term   value                  gradient w.r.t. z, times temperature
    ce     -sum_v p_v log q_v     q - p
    tv     1 - a                  -q (m - M)       m_v = 1 where q_v < p_v, 1/2 where equal, else 0; M = sum_v q_v m_v
    lk     -log a                 -q (m - M) / a

The gradients follow from the logits and are therefore computed in the forward pass, chunk by chunk: only the logits of C
positions exist at a time, nothing is recomputed, and [S, V] is never allocated. M / a is at most 1, so the gradient of lk is
bounded.

Ref: LK losses, arXiv 2602.23881 (tv and lk); a is the probability that a token sampled from q is accepted.

Shapes: K steps, S supervised positions, C positions of a chunk, D draft hidden size, E target hidden size, U draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from train.config.schema import ObjectiveConfig

STATISTICS = ("ce", "kl", "agreement", "acceptance")  # entries of the second result of `ChunkedDistillation`
SPLIT_SIZE = 4096  # entries of the vocabulary that are summed in one go


class Statistic(Enum):
    """The two quantities of a position that loss terms are functions of."""

    cross_entropy = auto()  # gradient w.r.t. z, times temperature: q - p
    overlap = auto()  # a; gradient w.r.t. z, times temperature: q (m - M)


@dataclass(frozen=True)
class Term:
    """A loss that is a function f of one statistic x of each position.

    Attributes:
        name: `objective.<name>_weight` is its weight w.
        statistic: x.
        value: (w, x [C]) -> w f(x), [C].
        slope: (w, x [C]) -> w f'(x); a number for `cross_entropy`, a number or [C] for `overlap`.
    """

    name: str
    statistic: Statistic
    value: Callable[[float, Tensor], Tensor]
    slope: Callable[[float, Tensor], float | Tensor]


TERMS = (
    Term("tv", Statistic.overlap, value=lambda w, a_C: w * (1 - a_C), slope=lambda w, a_C: -w),
    Term("lk", Statistic.overlap, value=lambda w, a_C: -w * a_C.log(), slope=lambda w, a_C: -w / a_C),
    Term("ce", Statistic.cross_entropy, value=lambda w, ce_C: w * ce_C, slope=lambda w, ce_C: w),
)


def weighted_terms(config: ObjectiveConfig) -> list[tuple[Term, float]]:
    """Returns the terms with a weight other than 0, and that weight."""
    weights = [(term, float(getattr(config, f"{term.name}_weight"))) for term in TERMS]
    return [(term, weight) for term, weight in weights if weight]


class ChunkedDistillation(Function):
    """Weighted sum of the loss terms over steps and positions.

    The target distribution of a chunk is computed once for all steps. The gradient of lm_head is summed over chunks and steps
    in float32 and cast once, so that `chunk_tokens` does not change it. Nothing synchronizes with the device.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_KSD: Tensor,
        lm_head_UD: Tensor,
        target_hidden_SE: Tensor,
        target_lm_head_UE: Tensor,
        weight_KS: Tensor,
        config: ObjectiveConfig,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Differentiable w.r.t. `hidden_KSD` and `lm_head_UD`.

        Args:
            weight_KS: weight of each position at each step; 0 excludes it.
            config: weights of the terms, `temperature`, `chunk_tokens`.

        Returns:
            the sum; STATISTICS of every step and position, unweighted, [K, S, 4]; and BoolTensor [K, S], whether draft and
            target have the same most probable token. Only the sum carries a gradient.
        """
        temperature, terms = config.temperature, weighted_terms(config)
        wide = torch.promote_types(hidden_KSD.dtype, torch.float32)
        total = hidden_KSD.new_zeros((), dtype=wide)
        stats_KSX = hidden_KSD.new_zeros(*weight_KS.shape, len(STATISTICS), dtype=wide)
        agree_KS = torch.zeros_like(weight_KS, dtype=torch.bool)
        grad_KSD = torch.empty_like(hidden_KSD) if hidden_KSD.requires_grad else None
        grad_UD = torch.zeros_like(lm_head_UD, dtype=wide) if lm_head_UD.requires_grad else None
        for start in range(0, len(target_hidden_SE), config.chunk_tokens):
            rows = slice(start, start + config.chunk_tokens)
            p_CU, entropy_C = _exp_and_entropy(_log_softmax(target_hidden_SE[rows], target_lm_head_UE, temperature, wide))
            best_C = p_CU.argmax(-1)
            for step, (hidden_SD, weight_S) in enumerate(zip(hidden_KSD, weight_KS, strict=True)):
                weight_C, hidden_CD = weight_S[rows].to(wide), hidden_SD[rows].to(lm_head_UD.dtype)
                log_q_CU = _log_softmax(hidden_CD, lm_head_UD, temperature, wide)
                ce_C = -row_dot(p_CU, log_q_CU)
                agree_KS[step, rows] = agrees_C = log_q_CU.argmax(-1) == best_C
                loss_C, overlap_C, slope_CU = _evaluate(terms, p_CU, log_q_CU.exp_(), ce_C)
                total += (weight_C * loss_C).sum()
                stats_KSX[step, rows] = torch.stack((ce_C, ce_C - entropy_C, agrees_C.to(wide), overlap_C), 1)
                slope_CU = slope_CU.to(lm_head_UD.dtype)
                scale_C1 = (weight_C / temperature)[:, None].to(lm_head_UD.dtype)
                if grad_KSD is not None:
                    grad_KSD[step, rows] = (slope_CU @ lm_head_UD) * scale_C1
                if grad_UD is not None:
                    _add_product(grad_UD, slope_CU.T, hidden_CD * scale_C1)
                del log_q_CU, slope_CU  # freed before the logits of the next step are computed
            del p_CU
        ctx.save_for_backward(grad_KSD, None if grad_UD is None else grad_UD.to(lm_head_UD.dtype))
        ctx.mark_non_differentiable(stats_KSX, agree_KS)
        return total, stats_KSX, agree_KS

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        scaled = (None if grad is None else grad * grads[0].to(grad.dtype) for grad in ctx.saved_tensors)
        return *scaled, None, None, None, None


def _evaluate(
    terms: list[tuple[Term, float]], p_CU: Tensor, q_CU: Tensor, cross_entropy_C: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the weighted loss [C], the overlap a [C], and temperature * the gradient w.r.t. the draft logits [C, U].

    Modifies `q_CU` in place.
    """
    needs_overlap_gradient = any(term.statistic is Statistic.overlap for term, _ in terms)
    if needs_overlap_gradient:
        difference_CU = p_CU - q_CU
        overlap_C = torch.minimum(p_CU, q_CU).sum(-1).clamp(min=torch.finfo(q_CU.dtype).tiny)
    else:
        difference_CU = q_CU.sub_(p_CU)
        overlap_C = 1 - torch.linalg.vector_norm(difference_CU, 1, dim=-1) / 2  # sum min(p, q) = 1 - |p - q| / 2
    statistics = {Statistic.cross_entropy: cross_entropy_C, Statistic.overlap: overlap_C}
    loss_C, ce_slope, overlap_slope_C = torch.zeros_like(overlap_C), 0.0, torch.zeros_like(overlap_C)
    for term, weight in terms:
        value_C = statistics[term.statistic]
        loss_C = loss_C + term.value(weight, value_C)
        if term.statistic is Statistic.cross_entropy:
            ce_slope += float(term.slope(weight, value_C))
        else:
            overlap_slope_C = overlap_slope_C + term.slope(weight, value_C)
    if not needs_overlap_gradient:
        return loss_C, overlap_C, difference_CU.mul_(ce_slope)
    m_CU = torch.heaviside(difference_CU, difference_CU.new_tensor(0.5))
    overlap_gradient_CU = m_CU.sub_(row_dot(q_CU, m_CU)[:, None]).mul_(q_CU)
    return loss_C, overlap_C, overlap_gradient_CU.mul_(overlap_slope_C[:, None]).sub_(difference_CU, alpha=ce_slope)


def _log_softmax(hidden_CD: Tensor, lm_head_UD: Tensor, temperature: float, wide: torch.dtype) -> Tensor:
    logits_CU = nn.functional.linear(hidden_CD.to(lm_head_UD.dtype), lm_head_UD).to(wide)
    if temperature != 1:
        logits_CU /= temperature
    return logits_CU.log_softmax(-1)


def _exp_and_entropy(log_p_CU: Tensor) -> tuple[Tensor, Tensor]:
    p_CU = log_p_CU.exp()
    return p_CU, -row_dot(p_CU, log_p_CU)


def _add_product(total_UD: Tensor, left_UC: Tensor, right_CD: Tensor) -> None:
    """Adds a product to `total_UD` in place, without rounding it to the dtype of its factors."""
    if total_UD.device.type == "cuda" and total_UD.dtype != left_UC.dtype:
        torch.addmm(total_UD, left_UC, right_CD, out_dtype=total_UD.dtype, out=total_UD)
    else:
        total_UD.addmm_(left_UC.to(total_UD.dtype), right_CD.to(total_UD.dtype))


def row_dot(left_CU: Tensor, right_CU: Tensor) -> Tensor:
    """Dot product of each row, [C]; on a CPU in blocks of columns, which saves memory (`benchmarks.training objective`)."""
    return blocked_row_dot(left_CU, right_CU) if left_CU.device.type == "cpu" else torch.linalg.vecdot(left_CU, right_CU)


def blocked_row_dot(left_CU: Tensor, right_CU: Tensor) -> Tensor:
    """`row_dot` without a [C, U] product; a library may sum a whole row sequentially."""
    pairs = zip(left_CU.split(SPLIT_SIZE, 1), right_CU.split(SPLIT_SIZE, 1), strict=True)
    return torch.stack([torch.einsum("cu,cu->c", left, right) for left, right in pairs]).sum(0)
