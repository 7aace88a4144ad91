"""The chunked objective against one with products for every step, and against the naive loss: memory, time, difference.

Shapes: K steps, S supervised positions, D hidden size, V vocabulary, U draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from statistics import median

import torch
from torch import Tensor
from torch.nn.functional import linear

from benchmarks.training.measuring import GIB, Samples, describe_machine, interleaved
from sage.io.dtypes import dtype_name
from sage.io.tables import text_table
from train.config.schema import ObjectiveConfig
from train.distill.chunked_loss import (
    ChunkedDistillation,
    add_product,
    blocked_row_dot,
    evaluate,
    log_softmax,
    row_dot,
    weighted_terms,
)
from train.distill.rows import Rows


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Sizes of the inputs. `draft_vocab_size` is U; None borrows the target's lm_head with its complete vocabulary."""

    tokens: int = 2048
    vocabulary: int = 152_064
    hidden: int = 3584
    steps: int = 1
    draft_vocab_size: int | None = None

    @property
    def columns(self) -> int:
        """U, or V without a draft vocabulary: logits per position."""
        return self.draft_vocab_size or self.vocabulary


@dataclass
class Inputs:
    """The tensors of `Sizes`. `lm_head_UD` is `target_lm_head_UD` itself where it is borrowed; every step of every position has
    a row, in the order of the positions.
    """

    hidden_KSD: Tensor
    lm_head_UD: Tensor
    target_hidden_SD: Tensor
    target_lm_head_UD: Tensor
    weight_KS: Tensor

    @property
    def leaves(self) -> list[Tensor]:
        """Tensors that gradients are computed for."""
        return [tensor for tensor in (self.hidden_KSD, self.lm_head_UD) if tensor.requires_grad]


def make_inputs(sizes: Sizes, dtype: torch.dtype, device: torch.device) -> Inputs:
    """Returns random hidden states of unit variance and lm_heads with logits of a few units, as in trained models."""
    generator = torch.Generator(device).manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.empty(*shape, dtype=dtype, device=device).normal_(generator=generator)

    target_lm_head = draw(sizes.columns, sizes.hidden).mul_(3 * sizes.hidden**-0.5)
    lm_head = target_lm_head if sizes.draft_vocab_size is None else target_lm_head.clone().requires_grad_()
    target_hidden = draw(sizes.tokens, sizes.hidden)
    noise_KSD = 0.5 * draw(sizes.tokens, sizes.steps, sizes.hidden).transpose(0, 1)  # rows of a position lie side by side
    hidden = (target_hidden + noise_KSD).requires_grad_()
    weights = torch.full((sizes.steps, sizes.tokens), 1 / sizes.steps, device=device)
    return Inputs(hidden, lm_head, target_hidden, target_lm_head, weights)


def chunked(x: Inputs, config: ObjectiveConfig) -> tuple[Tensor, ...]:
    """Returns the mean loss per position and its gradients."""
    rows = Rows.of(torch.ones_like(x.weight_KS, dtype=torch.bool))
    hidden_RD, weight_R = x.hidden_KSD.transpose(0, 1).flatten(0, 1), x.weight_KS.T.flatten()
    heads = (x.lm_head_UD, x.target_hidden_SD, x.target_lm_head_UD)
    loss = ChunkedDistillation.apply(hidden_RD, *heads, weight_R, rows, config)[0] / len(x.target_hidden_SD)
    return loss.detach(), *torch.autograd.grad(loss, x.leaves)


def step_by_step(x: Inputs, config: ObjectiveConfig) -> tuple[Tensor, ...]:
    """Returns the same as `chunked` from chunks of `chunk_tokens` positions, with products of its own for every step."""
    wide, scale = torch.promote_types(x.hidden_KSD.dtype, torch.float32), 1 / len(x.target_hidden_SD)
    total, grad_KSD = x.hidden_KSD.new_zeros((), dtype=wide), torch.empty_like(x.hidden_KSD)
    grad_UD = torch.zeros_like(x.lm_head_UD, dtype=wide) if x.lm_head_UD.requires_grad else None
    with torch.no_grad():
        for start in range(0, len(x.target_hidden_SD), config.chunk_tokens):
            places = slice(start, start + config.chunk_tokens)
            p_CU = log_softmax(linear(x.target_hidden_SD[places], x.target_lm_head_UD), config.temperature, wide).exp_()
            for step, (hidden_SD, weight_S) in enumerate(zip(x.hidden_KSD, x.weight_KS, strict=True)):
                weight_C1 = scale * weight_S[places, None]
                logits_CU = linear(hidden_SD[places], x.lm_head_UD)
                log_q_CU = log_softmax(logits_CU, config.temperature, wide)
                ce_C = -row_dot(p_CU, log_q_CU)
                loss_C, _ = evaluate(weighted_terms(config), p_CU, log_q_CU.exp_(), ce_C, slope_CU=logits_CU)
                total += (weight_C1[:, 0] * loss_C).sum()
                slope_CU, weight_C1 = logits_CU, (weight_C1 / config.temperature).to(x.lm_head_UD.dtype)
                grad_KSD[step, places] = (slope_CU @ x.lm_head_UD) * weight_C1
                if grad_UD is not None:
                    add_product(grad_UD, slope_CU.T, hidden_SD[places] * weight_C1)
                del log_q_CU, logits_CU, slope_CU
            del p_CU
    return total, grad_KSD, *(() if grad_UD is None else (grad_UD.to(x.lm_head_UD.dtype),))


def naive(x: Inputs, config: ObjectiveConfig) -> tuple[Tensor, ...]:
    """Returns the same as `chunked`, from all logits at once with autograd."""
    p_SU = ((x.target_hidden_SD @ x.target_lm_head_UD.T).float() / config.temperature).softmax(-1)
    loss = torch.zeros((), device=p_SU.device)
    for hidden_SD, weight_S in zip(x.hidden_KSD, x.weight_KS, strict=True):
        log_q_SU = ((hidden_SD @ x.lm_head_UD.T).float() / config.temperature).log_softmax(-1)
        each_S = config.ce_weight * -(p_SU * log_q_SU).sum(-1)
        if config.tv_weight or config.lk_weight:
            overlap_S = torch.minimum(p_SU, log_q_SU.exp()).sum(-1)
            each_S = each_S + config.tv_weight * (1 - overlap_S) - config.lk_weight * overlap_S.log()
        loss = loss + (weight_S * each_S).sum() / len(p_SU)
    return loss.detach(), *torch.autograd.grad(loss, x.leaves)


def measure(sizes: Sizes, config: ObjectiveConfig, repeats: int, dtype: torch.dtype, device: torch.device) -> str:
    """Measures all losses in interleaved runs; returns the text to print."""
    x = make_inputs(sizes, dtype, device)
    difference = _difference(x, config)
    works: dict[str, Callable[[], object]] = {one.__name__: partial(one, x, config) for one in (chunked, step_by_step, naive)}
    samples = interleaved(works, repeats, device)
    dots = _row_dots(sizes, config, repeats, device)
    names = {name: name.replace("_", " ") for name in works}
    rows = [(names[name], f"{one.peak / GIB:.3f} GiB", one.text()) for name, one in samples.items()]
    table = text_table(("loss", "peak additional", "median time (range)"), rows, "<>>", ruled=False)
    ratios = [_ratio(samples["chunked"], samples[name], names[name]) for name in list(works)[1:]]
    return "\n".join((*_floor(sizes, config, dtype), "", table, *ratios, difference, dots, describe_machine(device)))


def _ratio(ours: Samples, theirs: Samples, name: str) -> str:
    memory, seconds = ours.peak / max(theirs.peak, 1), ours.median_s / theirs.median_s
    return f"chunked / {name}: memory {memory:.3f} (1/{1 / max(memory, 1e-9):.1f}), time {seconds:.3f}"


def _row_dots(sizes: Sizes, config: ObjectiveConfig, repeats: int, device: torch.device) -> str:
    """Compares the two dot products of the rows of a chunk; which one is used depends on the device."""
    rows = min(config.chunk_tokens, sizes.tokens)
    left_CU, right_CU = (torch.empty(rows, sizes.columns, device=device).normal_() for _ in range(2))
    works = {"blocked": lambda: blocked_row_dot(left_CU, right_CU), "vecdot": lambda: torch.linalg.vecdot(left_CU, right_CU)}
    samples = interleaved(works, max(repeats, 5), device)
    ratios = sorted(a / b for a, b in zip(samples["blocked"].seconds, samples["vecdot"].seconds, strict=True))
    memory = " and ".join(f"{sample.peak / GIB:.2f}" for sample in samples.values())
    time = f"{median(ratios):.2f} ({ratios[0]:.2f}-{ratios[-1]:.2f})"
    return f"row dot product of {rows} rows, blocked / vecdot: time {time}, peak additional {memory} GiB"


def _difference(x: Inputs, config: ObjectiveConfig) -> str:
    """Compares both losses on a few positions, cheap in comparison with the measurement."""
    few = min(64, len(x.target_hidden_SD))
    hidden_KSD = x.hidden_KSD[:, :few].detach().requires_grad_()
    small = replace(x, hidden_KSD=hidden_KSD, target_hidden_SD=x.target_hidden_SD[:few], weight_KS=x.weight_KS[:, :few])
    pairs = list(zip(chunked(small, config), naive(small, config), strict=True))
    worst = max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs)
    return f"largest difference of loss and gradients on {few} positions, relative to the largest entry: {worst:.1e}"


def _floor(sizes: Sizes, config: ObjectiveConfig, dtype: torch.dtype) -> list[str]:
    """The minimum of any exact computation: logits of both sides and the gradient back through the lm_head."""
    product = 2 * sizes.tokens * sizes.columns * sizes.hidden
    products = 1 + sizes.steps * (2 if sizes.draft_vocab_size is None else 3)
    chunk = min(config.chunk_tokens, sizes.tokens * sizes.steps)
    logits = sizes.tokens * sizes.columns * torch.float32.itemsize / GIB
    chunk_logits = (chunk + chunk / sizes.steps) * sizes.columns * dtype.itemsize / GIB
    return [
        f"S = {sizes.tokens}, U = {sizes.columns}, D = {sizes.hidden}, K = {sizes.steps}, {dtype_name(dtype)}",
        f"floor: {products} products of {product / 1e12:.3g} TFLOP; naive keeps float32 logits of {logits:.2f} GiB each, "
        f"chunked those of {chunk} rows and their positions: {chunk_logits:.2f} GiB",
    ]
