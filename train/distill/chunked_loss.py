"""Distillation losses between draft and target distributions at many positions, without materializing their logits.

With p the target distribution, q the draft distribution (softmax of z / temperature), and a = sum_v min(p_v, q_v):

    term   value                  gradient w.r.t. z, times temperature
    ce     -sum_v p_v log q_v     q - p
    tv     1 - a                  -q (m - M)       m_v = 1 where q_v < p_v, 1/2 where equal, else 0; M = sum_v q_v m_v
    lk     -log a                 -q (m - M) / a

The gradients follow from the logits and are therefore computed in the forward pass, chunk by chunk: only the logits of C
rows exist at a time, nothing is recomputed, and [R, U] is never allocated. M / a is at most 1, so the gradient of lk is
bounded.

Ref: LK losses, arXiv 2602.23881 (tv and lk); a is the probability that a token sampled from q is accepted.

Shapes: R rows of the draft, S supervised positions, C rows and P positions of a chunk, B rows of a block, D draft hidden size,
E target hidden size, U draft vocabulary.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.autograd import Function

from sage.targets.target import soft_cap
from train.config.schema import ObjectiveConfig
from train.distill.rows import Part, Rows

STATISTICS = ("ce", "kl", "agreement", "acceptance")  # entries of the second result of `ChunkedDistillation`
SPLIT_SIZE = 4096  # entries of the vocabulary that are summed in one go
Caps: TypeAlias = tuple[float | None, float | None]  # soft caps of the logits of draft and target
# Logits whose distributions exist in float32 at a time: on a CPU so few that its caches hold them, on GPUs enough for a kernel
# to take longer than its launch.
BLOCK_LOGITS = {"cpu": 2**20, "cuda": 2**24}


class ChunkedDistillation(Function):
    """Weighted sum of the loss terms over the rows of a draft.

    A chunk has one product with each lm_head, for all its steps at once. The draft's logits are replaced in place by the loss's
    gradient, from which the gradients of hidden states and lm_head follow by one product each. Distributions, in float32, exist
    for the rows of a block at a time, those of the target once for all rows that predict the position. Sums over rows are taken
    at the end, and the gradient of lm_head is summed over chunks in float32 and cast once, so that `chunk_tokens` does not
    change them. Nothing synchronizes with the device.

    Memory: C U logits of the draft, and P U of the target for the P <= C positions that a chunk's rows predict, in the dtype of
    their lm_heads; up to six arrays of `BLOCK_LOGITS` entries in float32; the gradients.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_RD: Tensor,
        lm_head_UD: Tensor,
        target_hidden_SE: Tensor,
        target_lm_head_UE: Tensor,
        weight_R: Tensor,
        rows: Rows,
        config: ObjectiveConfig,
        caps: Caps,
        state_RX: Tensor | None = None,
        correction_UX: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Differentiable w.r.t. `hidden_RD`, `lm_head_UD`, `state_RX` and `correction_UX`, the factors of a term of rank X that
        is added to the draft's logits. A chunk has at most `chunk_tokens` rows, or one position.

        Returns:
            the sum; STATISTICS of every row [R, 4], unweighted; and BoolTensor [R], whether draft and target have the same most
            probable token. Only the sum carries a gradient.
        """
        wide = torch.promote_types(hidden_RD.dtype, torch.float32)
        loss_R, stats_RX = weight_R.new_empty(len(weight_R), dtype=wide), weight_R.new_empty(len(weight_R), 4, dtype=wide)
        agree_R = torch.empty_like(weight_R, dtype=torch.bool)
        grad_RD = torch.empty_like(hidden_RD) if hidden_RD.requires_grad else None
        grad_UD = torch.zeros_like(lm_head_UD, dtype=wide) if lm_head_UD.requires_grad else None
        term = None if state_RX is None or correction_UX is None else _Correction(state_RX, correction_UX, wide)
        block_logits = BLOCK_LOGITS.get(hidden_RD.device.type, BLOCK_LOGITS["cuda"])
        scale_R1 = (weight_R.to(wide) / config.temperature)[:, None].to(lm_head_UD.dtype)
        for chunk in rows.parts(config.chunk_tokens):
            hidden_CD, scale_C1 = hidden_RD[chunk.rows].to(lm_head_UD.dtype), scale_R1[chunk.rows]
            slope_CU = nn.functional.linear(hidden_CD, lm_head_UD)  # logits, until each block replaces its own
            if term is not None:
                term.add_to(slope_CU, chunk)
            target_PE = target_hidden_SE[chunk.positions].to(target_lm_head_UE.dtype)
            target_PU = soft_cap(nn.functional.linear(target_PE, target_lm_head_UE), caps[1])
            for block in rows.parts(max(1, block_logits // len(lm_head_UD)), chunk):
                own_rows, own_positions = (_within(*pair) for pair in zip(block, chunk, strict=True))
                target = _Target.of(target_PU[own_positions], rows, block, config.temperature, wide)
                figures = _evaluate_block(slope_CU[own_rows], target, config, caps[0])
                loss_R[block.rows], stats_RX[block.rows], agree_R[block.rows] = figures
                del target
            if grad_RD is not None:
                grad_RD[chunk.rows] = (slope_CU @ lm_head_UD) * scale_C1
            if grad_UD is not None:
                add_product(grad_UD, slope_CU.T, hidden_CD * scale_C1)
            if term is not None:
                term.add_gradients(slope_CU, scale_C1, chunk)
            del slope_CU, target_PU  # freed before the logits of the next chunk are computed
        of_term = (None, None) if term is None else (term.grad_RX, term.grad_UX.to(term.weight_UX.dtype))
        ctx.save_for_backward(grad_RD, None if grad_UD is None else grad_UD.to(lm_head_UD.dtype), *of_term)
        ctx.mark_non_differentiable(stats_RX, agree_R)
        return (weight_R.to(wide) * loss_R).sum(), stats_RX, agree_R

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        scaled = [None if grad is None else grad * grads[0].to(grad.dtype) for grad in ctx.saved_tensors]
        return *scaled[:2], None, None, None, None, None, None, *scaled[2:]


class _Correction:
    """A term of rank X that is added to the draft's logits, and the gradients of its factors."""

    def __init__(self, state_RX: Tensor, weight_UX: Tensor, wide: torch.dtype) -> None:
        self.state_RX, self.weight_UX = state_RX, weight_UX
        self.grad_RX, self.grad_UX = torch.empty_like(state_RX), torch.zeros_like(weight_UX, dtype=wide)

    def add_to(self, logits_CU: Tensor, chunk: Part) -> None:
        logits_CU.addmm_(self.state_RX[chunk.rows].to(logits_CU.dtype), self.weight_UX.T)

    def add_gradients(self, slope_CU: Tensor, scale_C1: Tensor, chunk: Part) -> None:
        self.grad_RX[chunk.rows] = (slope_CU @ self.weight_UX) * scale_C1
        add_product(self.grad_UX, slope_CU.T, self.state_RX[chunk.rows].to(slope_CU.dtype) * scale_C1)


class _Target(NamedTuple):
    """The target's distribution at the positions of a block, its entropy, and its most probable token.

    The block's B rows are N rows for each of M positions, B = M N; positions with unequal numbers of rows are repeated, N = 1.
    """

    p_M1U: Tensor
    entropy_M1: Tensor
    best_M1: Tensor

    @classmethod
    def of(cls, logits_MU: Tensor, rows: Rows, block: Part, temperature: float, wide: torch.dtype) -> _Target:
        log_p_MU = log_softmax(logits_MU, temperature, wide)
        p_MU = log_p_MU.exp()
        values = (p_MU, -row_dot(p_MU, log_p_MU), p_MU.argmax(-1))
        del log_p_MU
        if rows.rows_per_position(block) is None:
            place_B = rows.position[block.rows] - block.positions.start
            values = tuple(value.index_select(0, place_B) for value in values)
        return cls(*(value[:, None] for value in values))


def _evaluate_block(
    logits_BU: Tensor, target: _Target, config: ObjectiveConfig, cap: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the weighted loss [B], STATISTICS [B, 4] and agreement [B]; replaces the draft's logits by temperature * the
    gradient w.r.t. them.
    """
    positions = len(target.p_M1U)
    logits_MNU = logits_BU.view(positions, len(logits_BU) // max(positions, 1), logits_BU.shape[1])
    capped_MNU = soft_cap(logits_MNU, cap)
    log_q_MNU = log_softmax(capped_MNU, config.temperature, target.p_M1U.dtype)
    ce_MN, agrees_MN = -row_dot(target.p_M1U, log_q_MNU), log_q_MNU.argmax(-1) == target.best_M1
    loss_MN, overlap_MN = evaluate(config, target.p_M1U, log_q_MNU.exp_(), ce_MN, slope_CU=logits_MNU)
    if cap is not None:
        logits_MNU.mul_(1 - (capped_MNU / cap) ** 2)
    stats_MNX = torch.stack((ce_MN, ce_MN - target.entropy_M1, agrees_MN.to(ce_MN.dtype), overlap_MN), -1)
    return loss_MN.flatten(), stats_MNX.flatten(0, 1), agrees_MN.flatten()


def _within(part: slice, whole: slice) -> slice:
    """Returns a part counted from the start of the whole."""
    return slice(part.start - whole.start, part.stop - whole.start)


def evaluate(
    config: ObjectiveConfig, p_CU: Tensor, q_CU: Tensor, cross_entropy_C: Tensor, slope_CU: Tensor
) -> tuple[Tensor, Tensor]:
    """Returns the weighted loss [C] and the overlap a [C]; writes temperature * the gradient w.r.t. the draft logits to
    `slope_CU`, and modifies `q_CU`. C may be several dimensions, of which `p_CU` may be broadcast.
    """
    ce, tv, lk = config.ce_weight, config.tv_weight, config.lk_weight
    if not (tv or lk):
        difference_CU = q_CU.sub_(p_CU)
        torch.mul(difference_CU, ce, out=slope_CU)
        overlap_C = 1 - torch.linalg.vector_norm(difference_CU, 1, dim=-1) / 2  # sum min(p, q) = 1 - |p - q| / 2
        return ce * cross_entropy_C, overlap_C
    difference_CU = p_CU - q_CU
    overlap_C = torch.minimum(p_CU, q_CU).sum(-1).clamp(min=torch.finfo(q_CU.dtype).tiny)
    loss_C = tv * (1 - overlap_C) - lk * overlap_C.log() + ce * cross_entropy_C
    m_CU = torch.heaviside(difference_CU, difference_CU.new_tensor(0.5))
    overlap_gradient_CU = m_CU.sub_(row_dot(q_CU, m_CU)[..., None]).mul_(q_CU)
    torch.sub(overlap_gradient_CU.mul_((-tv - lk / overlap_C)[..., None]), difference_CU, alpha=ce, out=slope_CU)
    return loss_C, overlap_C


def log_softmax(logits_BU: Tensor, temperature: float, wide: torch.dtype) -> Tensor:
    """Returns log-probabilities in `wide`."""
    logits_BU = logits_BU.to(wide)
    return (logits_BU if temperature == 1 else logits_BU / temperature).log_softmax(-1)


def add_product(total_UD: Tensor, left_UC: Tensor, right_CD: Tensor) -> None:
    """Adds a product to `total_UD` in place, without rounding it to the dtype of its factors."""
    if total_UD.device.type == "cuda" and total_UD.dtype != left_UC.dtype:
        torch.addmm(total_UD, left_UC, right_CD, out_dtype=total_UD.dtype, out=total_UD)
    else:
        total_UD.addmm_(left_UC.to(total_UD.dtype), right_CD.to(total_UD.dtype))


def row_dot(left_CU: Tensor, right_CU: Tensor) -> Tensor:
    """Dot product of each row, [C], broadcast; on a CPU in blocks of columns, which take 0.57 times the time there."""
    return blocked_row_dot(left_CU, right_CU) if left_CU.device.type == "cpu" else torch.linalg.vecdot(left_CU, right_CU)


def blocked_row_dot(left_CU: Tensor, right_CU: Tensor) -> Tensor:
    """`row_dot` without a [C, U] product; a library may sum a whole row sequentially."""
    pairs = zip(left_CU.split(SPLIT_SIZE, -1), right_CU.split(SPLIT_SIZE, -1), strict=True)
    return torch.stack([torch.einsum("...u,...u->...", left, right) for left, right in pairs]).sum(0)
