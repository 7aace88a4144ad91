"""The chunked loss against a naive float64 loop, in value and gradient; masks by hand."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from train.objective import Objective, SoftCrossEntropy, count_supervised, make_pairs

VOCABULARY, HIDDEN = 37, 12


def tensors(batch: int = 3, tokens: int = 9, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    draft, target = torch.randn(2, batch, tokens, HIDDEN, dtype=dtype)
    mask = torch.rand(batch, tokens) < 0.6
    return draft.clone().requires_grad_(), target, mask, torch.randn(VOCABULARY, HIDDEN, dtype=dtype)


def naive(draft: Tensor, target: Tensor, mask: Tensor, lm_head: Tensor, ce: float, feature: float, beta: float) -> Tensor:
    """One position at a time, straight from the definition."""
    total = torch.zeros((), dtype=torch.float64)
    for b in range(mask.shape[0]):
        for t in range(mask.shape[1]):
            if not mask[b, t]:
                continue
            p = torch.softmax(target[b, t].double() @ lm_head.double().T, -1)
            log_q = torch.log_softmax(draft[b, t].double() @ lm_head.double().T, -1)
            gap = (draft[b, t].double() - target[b, t].double()).abs()
            smooth = torch.where(gap < beta, gap**2 / (2 * beta), gap - beta / 2)
            total = total + ce * -(p * log_q).sum() + feature * smooth.mean()
    return total


@pytest.mark.parametrize("chunk", [1, 4, 1000])
@pytest.mark.parametrize("beta", [1.0, 0.3])
def test_value_and_gradient_equal_the_naive_loss(chunk: int, beta: float) -> None:
    draft, target, mask, lm_head = tensors()
    sums = Objective(ce_weight=0.1, feature_weight=1.0, smooth_l1_beta=beta, chunk_tokens=chunk)(draft, target, mask, lm_head)
    reference = draft.detach().clone().requires_grad_()
    expected = naive(reference, target, mask, lm_head, 0.1, 1.0, beta)
    torch.testing.assert_close(sums.loss, expected, rtol=1e-12, atol=0)
    (3 * sums.loss).backward()
    (3 * expected).backward()
    torch.testing.assert_close(draft.grad, reference.grad, rtol=1e-10, atol=1e-13)
    assert sums.count == mask.sum()


def test_gradcheck() -> None:
    draft, target, mask, lm_head = tensors(1, 4)
    rows = draft.detach()[0].requires_grad_()
    assert torch.autograd.gradcheck(lambda x: SoftCrossEntropy.apply(x, target[0], lm_head, 3)[0], (rows,))


def test_float32_is_as_exact_as_float32_can_be() -> None:
    draft, target, mask, lm_head = tensors(dtype=torch.float32)
    sums = Objective(ce_weight=1.0, feature_weight=0.0, smooth_l1_beta=1.0, chunk_tokens=5)(draft, target, mask, lm_head)
    expected = naive(draft.detach(), target, mask, lm_head, 1.0, 0.0, 1.0)
    torch.testing.assert_close(sums.loss.double(), expected, rtol=1e-6, atol=0)  # ~20 terms of 1e-7 relative rounding


def test_no_position_gives_zero_and_a_gradient_of_zero() -> None:
    draft, target, mask, lm_head = tensors()
    objective = Objective(ce_weight=0.1, feature_weight=1.0, smooth_l1_beta=1.0, chunk_tokens=4)
    sums = objective(draft, target, torch.zeros_like(mask), lm_head)
    sums.loss.backward()
    assert sums.loss == 0 and sums.count == 0
    assert draft.grad is not None and not draft.grad.any()


def test_unsupervised_positions_change_nothing() -> None:
    draft, target, mask, lm_head = tensors()
    objective = Objective(ce_weight=0.1, feature_weight=1.0, smooth_l1_beta=1.0, chunk_tokens=4)
    before = objective(draft, target, mask, lm_head).loss
    spoilt = torch.where(mask[..., None], target, torch.full_like(target, 1e6))
    assert objective(draft, spoilt, mask, lm_head).loss == before


def test_agreement_and_acceptance_are_those_of_the_laws() -> None:
    draft, target, mask, lm_head = tensors()
    objective = Objective(ce_weight=0.1, feature_weight=1.0, smooth_l1_beta=1.0, chunk_tokens=4)
    sums = objective(draft, target, mask, lm_head)
    p, q = ((x[mask] @ lm_head.T).softmax(-1) for x in (target, draft))
    assert sums.agreement == (p.argmax(-1) == q.argmax(-1)).sum()
    torch.testing.assert_close(sums.acceptance, torch.minimum(p, q).sum())
    assert objective(target, target, mask, lm_head).agreement == mask.sum()


def test_pairs_of_five_tokens_are_those_of_the_table() -> None:
    ids = torch.arange(5.0)[None, :, None]
    pairs = make_pairs(embeds=ids + 10, features=ids, position_ids=ids[..., 0], loss_mask=torch.tensor([[0, 0, 0, 1, 1]]))
    assert pairs.features.flatten().tolist() == [0, 1, 2]
    assert pairs.embeds_next.flatten().tolist() == [11, 12, 13]
    assert pairs.wanted.flatten().tolist() == [1, 2, 3]
    assert pairs.position_ids.tolist() == [[0, 1, 2]]
    assert pairs.mask.tolist() == [[False, True, True]]
    assert count_supervised(torch.tensor([[0, 0, 0, 1, 1], [1, 1, 1, 0, 0]])) == 3  # the first two tokens have no pair


def test_three_axis_positions_are_cut_along_tokens() -> None:
    positions = torch.arange(30).reshape(3, 2, 5)
    embeds = torch.zeros(2, 5, 4)
    pairs = make_pairs(embeds, embeds, positions, torch.ones(2, 5))
    assert torch.equal(pairs.position_ids, positions[:, :, :3])
