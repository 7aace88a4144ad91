"""The chunked loss against a naive autograd loss in float64, in value and gradient, for every term and combination of terms."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from train.config.schema import ObjectiveConfig
from train.distill import chunked_loss
from train.distill.chunked_loss import ChunkedDistillation, blocked_row_dot
from train.distill.objective import METRIC_NAMES, DraftOutput, LossSums, Objective
from train.distill.rows import Rows, every_pair, gather_chains

U, D, E, S, K = 37, 12, 10, 23, 3
WEIGHTS = ("ce_weight", "tv_weight", "lk_weight", "feature_weight")


def make(dtype: torch.dtype = torch.float64, spread: float = 1.0, seed: int = 0, same_head: bool = False) -> dict[str, Tensor]:
    """Hidden states of the draft at every step, its own lm_head, target features, lm_head rows of the target, valid chains."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return (spread * torch.randn(*shape, generator=generator, dtype=torch.float64)).to(dtype)

    size = E if same_head else D
    target_head = draw(U, E)
    return {
        "hidden": draw(K, S, size).requires_grad_(),
        "head": target_head if same_head else draw(U, D).requires_grad_(),
        "target_features": draw(S, E),
        "target_head": target_head,
        "is_valid": torch.rand(K, S, generator=generator) < 0.8,
        "features": draw(K, S, E).requires_grad_(),
    }


LEAVES = ("hidden", "head", "features")


def rows_of(is_valid_KS: Tensor) -> Rows:
    """The rows of the valid predictions of an unrolled pass."""
    position, step = is_valid_KS.T.nonzero(as_tuple=True)
    scale, places = torch.ones(len(step)), torch.arange(is_valid_KS.shape[1])
    count = is_valid_KS[0].sum()
    return Rows(position, step, is_valid_KS.sum(0).tolist(), position, scale, len(places), places, count, is_complete=True)


def ours(objective: Objective, x: dict[str, Tensor], cap: float | None = None) -> LossSums:
    rows = rows_of(x["is_valid"])
    hidden, features = (x[name][rows.step, rows.position] for name in ("hidden", "features"))
    output = DraftOutput(hidden, x["head"], rows, features, cap=cap)
    return objective(output, x["target_features"], x["target_head"], cap and 2 * cap)


def naive(objective: Objective, x: dict[str, Tensor], cap: float | None = None) -> Tensor:
    """All logits at once, autograd throughout, one step after the other."""
    config = objective.config
    decay = [config.step_decay**k for k in range(config.steps)]
    total = x["hidden"].new_zeros(())
    for k in range(len(x["hidden"])):
        target, draft = x["target_features"] @ x["target_head"].T, x["hidden"][k] @ x["head"].T
        if cap:
            target, draft = 2 * cap * (target / cap / 2).tanh(), cap * (draft / cap).tanh()
        p, log_q = (target / config.temperature).softmax(-1), (draft / config.temperature).log_softmax(-1)
        overlap = torch.minimum(p, log_q.exp()).sum(-1)
        gap = (x["features"][k] - x["target_features"]).abs()
        beta = config.smooth_l1_beta
        smooth = torch.where(gap < beta, gap**2 / (2 * beta), gap - beta / 2).mean(-1)
        each = (
            config.ce_weight * -(p * log_q).sum(-1)
            + config.tv_weight * (p - log_q.exp()).abs().sum(-1) / 2
            + config.lk_weight * -overlap.log()
            + config.feature_weight * smooth
        )
        total = total + decay[k] / sum(decay) * (each * x["is_valid"][k]).sum()
    return total


def gradients(total: Tensor, x: dict[str, Tensor]) -> list[Tensor]:
    leaves = [x["hidden"], x["features"], *([x["head"]] if x["head"].requires_grad else [])]
    return list(torch.autograd.grad(3 * total, leaves, allow_unused=True, materialize_grads=True))


def check_against_naive(
    objective: Objective,
    x: dict[str, Tensor],
    rtol: float = 1e-12,
    gradient_rtol: float = 1e-10,
    gradient_atol: float = 1e-12,
    cap: float | None = None,
) -> None:
    total, expected = ours(objective, x, cap).loss, naive(objective, x, cap)
    torch.testing.assert_close(total, expected, rtol=rtol, atol=0)
    torch.testing.assert_close(gradients(total, x), gradients(expected, x), rtol=gradient_rtol, atol=gradient_atol)


def objective_of(*names: str, **options: Any) -> Objective:
    weights = dict.fromkeys(WEIGHTS, 0.0) | {name: 0.3 + 0.4 * i for i, name in enumerate(names)}
    return Objective(ObjectiveConfig(**{"steps": K, "step_decay": 0.8, "chunk_tokens": 5, **weights, **options}))


MIXTURES = [*((name,) for name in WEIGHTS), ("tv_weight", "lk_weight"), WEIGHTS]


@pytest.mark.parametrize("names", MIXTURES, ids=["+".join(n.removesuffix("_weight") for n in names) for names in MIXTURES])
@pytest.mark.parametrize(("temperature", "cap"), [(1.0, None), (2.5, None), (2.5, 3.0)])
def test_value_and_gradients_equal_the_naive_loss(names: tuple[str, ...], temperature: float, cap: float | None) -> None:
    objective, x = objective_of(*names, temperature=temperature), make()
    check_against_naive(objective, x, cap=cap)


@pytest.mark.parametrize("chunk", [1, 7, 1000])
@pytest.mark.parametrize("same_head", [True, False])
def test_chunk_size_and_a_borrowed_head_change_nothing(chunk: int, same_head: bool) -> None:
    objective, x = objective_of(*WEIGHTS, chunk_tokens=chunk, smooth_l1_beta=0.3), make(same_head=same_head)
    check_against_naive(objective, x)


@pytest.mark.slow
def test_float32_is_accurate_to_float32_rounding() -> None:
    objective = objective_of(*WEIGHTS)
    small, wide = make(torch.float32), {k: v.double() if v.is_floating_point() else v for k, v in make(torch.float32).items()}
    wide = {k: v.detach().requires_grad_() if k in LEAVES else v for k, v in wide.items()}
    total, expected = ours(objective, small).loss, naive(objective, wide)
    torch.testing.assert_close(total.double(), expected, rtol=1e-5, atol=0)  # logits of ~10 rounded to 1e-7 relative
    for mine, theirs in zip(gradients(total, small), gradients(expected, wide), strict=True):
        assert float((mine.double() - theirs).abs().max()) < 1e-5 * float(theirs.abs().max())


@pytest.mark.parametrize(("steps", "chunk"), [(1, 2048), (7, 16), (7, 256)])
def test_the_head_gradient_in_bf16_does_not_depend_on_the_chunks(chunk: int, steps: int) -> None:
    """The reference takes the same logits, rounded to bf16."""
    generator = torch.Generator().manual_seed(0)
    positions, vocabulary, size = 2048, 200, 32
    draw = partial(torch.randn, generator=generator)
    features = draw(positions, size).bfloat16()
    head = (0.5 * draw(vocabulary, size)).bfloat16()
    hidden = (features.float() + 0.5 * draw(steps, positions, size)).bfloat16()
    weight = torch.full((steps, positions), 1 / steps)
    rows = rows_of(torch.ones(steps, positions, dtype=torch.bool))
    config = ObjectiveConfig(ce_weight=1.0, feature_weight=0.0, chunk_tokens=chunk)
    trained = head.clone().requires_grad_()
    states, weights = hidden[rows.step, rows.position], weight[rows.step, rows.position]
    loss = ChunkedDistillation.apply(states, trained, features, head, weights, rows, config, (None, None))[0]
    [found] = torch.autograd.grad(loss, trained)
    expected = torch.zeros(vocabulary, size, dtype=torch.float64)
    for states, weights in zip(hidden, weight, strict=True):
        p, q = ((rows @ head.T).double().softmax(-1) for rows in (features, states))
        expected += ((q - p) * weights.double()[:, None]).T @ states.double()
    assert found.dtype == torch.bfloat16
    assert float((found.double() - expected).norm() / expected.norm()) < 0.004


class Products(TorchDispatchMode):
    """Counts matrix products, and their multiplications."""

    num_calls = num_multiplications = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm_):
            self.num_calls += 1
            self.num_multiplications += args[-2].shape[0] * args[-1].numel()
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("chunk", [1000, 9])
def test_a_chunk_takes_one_product_of_each_kind_for_all_steps_and_no_row_too_many(chunk, monkeypatch):
    """Logits of both sides and the gradients of hidden states and lm_head."""
    monkeypatch.setitem(chunked_loss.BLOCK_LOGITS, "cpu", 4 * U)  # several blocks per chunk
    objective, x = objective_of("ce_weight", chunk_tokens=chunk), make()
    rows = rows_of(x["is_valid"])
    with Products() as products:
        ours(objective, x)
    assert products.num_multiplications == U * (S * E + 3 * len(rows.position) * D) < U * S * (E + 3 * K * D)
    assert products.num_calls == 4 * len(list(rows.parts(chunk)))
    check_against_naive(objective, x)


def test_the_dot_products_of_both_kinds_of_devices_agree() -> None:
    left, right = torch.randn(2, 5, 10_000, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for found in (blocked_row_dot(left, right), torch.linalg.vecdot(left, right)):
        torch.testing.assert_close(found, (left * right).sum(-1), rtol=1e-12, atol=1e-12)


@pytest.mark.slow
def test_distributions_with_almost_no_overlap_have_a_finite_and_exact_gradient() -> None:
    """Spread 6 gives logits of some hundreds, so that a is 1e-20 or less, and underflows in float32."""
    objective, x = objective_of("lk_weight"), make(spread=6.0)
    check_against_naive(objective, x, rtol=1e-10, gradient_rtol=1e-6, gradient_atol=1e-9)
    small = {k: v.detach().float() if v.is_floating_point() else v for k, v in x.items()}
    small = {k: v.requires_grad_() if k in LEAVES else v for k, v in small.items()}
    for gradient in gradients(ours(objective, small).loss, small):
        assert bool(gradient.isfinite().all())


@pytest.mark.parametrize(("terms", "steps"), [(("tv_weight", "lk_weight"), 1), (("ce_weight",), K)])
def test_equal_distributions_have_no_loss_and_no_gradient(terms: tuple[str, ...], steps: int) -> None:
    """To the bit where both sides have one row per position; else their products may round differently, and tv and lk have no
    derivative where p and q cross.
    """
    x = make(same_head=True)
    x["hidden"] = x["target_features"].expand(K, -1, -1).clone().requires_grad_()
    x["is_valid"] = torch.arange(K)[:, None].expand(K, S) < steps
    sums = ours(objective_of(*terms), x)
    loss, ce, _, agreement, acceptance, kl, _ = sums.sums.tolist()
    lowest = ce * 0.3 if terms == ("ce_weight",) else 0.0  # weight of the term; the entropy of the target
    assert (loss, kl) == pytest.approx((lowest, 0), abs=1e-12) and (acceptance, agreement) == (pytest.approx(S), S)
    assert float(gradients(sums.loss, x)[0].abs().max()) < 1e-12


def test_no_position_gives_zero_and_a_gradient_of_zero() -> None:
    x = make()
    empty = {k: v if "head" in k else v[:, :0] if v.shape[0] == K else v[:0] for k, v in x.items()}
    sums = ours(objective_of(*WEIGHTS), empty)
    assert not sums.sums.any()
    assert not torch.autograd.grad(sums.loss, x["head"])[0].any()


def test_metrics_are_those_of_the_first_step() -> None:
    x = make()
    sums = ours(objective_of("ce_weight", "feature_weight"), x)
    valid = x["is_valid"][0]
    sides = ((x["target_features"], x["target_head"]), (x["hidden"][0], x["head"]))
    p, q = ((hidden @ head.T).softmax(-1)[valid] for hidden, head in sides)
    named = dict(zip((*METRIC_NAMES, "count"), sums.sums, strict=True))
    expected = {
        "loss_ce": -(p * q.log()).sum(),
        "agreement": (p.argmax(-1) == q.argmax(-1)).sum(),
        "acceptance": torch.minimum(p, q).sum(),
        "kl": (p * (p / q).log()).sum(),
        "count": valid.sum(),
    }
    for name, value in expected.items():
        torch.testing.assert_close(named[name], value.double())


def test_rows_of_an_unrolled_pass_belong_to_the_same_token() -> None:
    """Row s of step i is pair s + i; the value encodes pair and step."""
    steps = [(torch.arange(6 - i)[None, :, None] + i + 100 * i).double() for i in range(3)]
    mask = torch.tensor([[False, True, False, False, True, True]])
    hidden, rows = gather_chains(torch.cat(steps, 1), mask, every_pair(mask, 3))
    assert hidden[:, 0].tolist() == [1, 101, 4, 104, 204, 5, 105, 205]
    assert (rows.position.tolist(), rows.step.tolist()) == ([0, 0, 1, 1, 1, 2, 2, 2], [0, 1, 0, 1, 2, 0, 1, 2])
    assert rows.counts == [2, 3, 3]
