"""The chunked objective against the loss anybody would write first: peak extra memory, time, and that they agree.

Shapes: K steps, S supervised positions, D hidden, V vocabulary, U words the draft may say.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from benchmarks.training.measuring import Samples, describe_machine, interleaved
from train.distill.chunked_loss import Distillation, Terms

GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What the objective is given. `words` = U; None borrows the target's lm_head with its whole vocabulary."""

    tokens: int = 2048
    vocabulary: int = 152_064
    hidden: int = 3584
    steps: int = 1
    words: int | None = None


@dataclass
class Inputs:
    """The tensors of `Sizes`. `head` is `target_head` itself where it is borrowed."""

    states_KSD: Tensor
    head_UD: Tensor
    wanted_SD: Tensor
    target_head_UD: Tensor
    weight_KS: Tensor

    @property
    def leaves(self) -> list[Tensor]:
        return [tensor for tensor in (self.states_KSD, self.head_UD) if tensor.requires_grad]


def make_inputs(sizes: Sizes, dtype: torch.dtype, device: torch.device) -> Inputs:
    """Random states of unit size and heads that make logits of a few units, as trained ones do."""
    generator = torch.Generator(device).manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.empty(*shape, dtype=dtype, device=device).normal_(generator=generator)

    words = sizes.words or sizes.vocabulary
    target_head = draw(words, sizes.hidden).mul_(3 * sizes.hidden**-0.5)
    head = target_head if sizes.words is None else target_head.clone().requires_grad_()
    wanted = draw(sizes.tokens, sizes.hidden)
    states = (wanted + 0.5 * draw(sizes.steps, sizes.tokens, sizes.hidden)).requires_grad_()
    weights = torch.full((sizes.steps, sizes.tokens), 1 / sizes.steps, device=device)
    return Inputs(states, head, wanted, target_head, weights)


def ours(x: Inputs, terms: Terms) -> tuple[Tensor, ...]:
    """The loss per position, and its gradients."""
    total = Distillation.apply(x.states_KSD, x.head_UD, x.wanted_SD, x.target_head_UD, x.weight_KS, terms)[0]
    loss = total / len(x.wanted_SD)
    return loss.detach(), *torch.autograd.grad(loss, x.leaves)


def naive(x: Inputs, terms: Terms) -> tuple[Tensor, ...]:
    """The same with all logits at once and autograd."""
    p_SU = ((x.wanted_SD @ x.target_head_UD.T).float() / terms.temperature).softmax(-1)
    loss = torch.zeros((), device=p_SU.device)
    for states_SD, weight_S in zip(x.states_KSD, x.weight_KS, strict=True):
        log_q_SU = ((states_SD @ x.head_UD.T).float() / terms.temperature).log_softmax(-1)
        each_S = terms.ce * -(p_SU * log_q_SU).sum(-1)
        if terms.has_overlap:
            overlap_S = torch.minimum(p_SU, log_q_SU.exp()).sum(-1)
            each_S = each_S + terms.tv * (1 - overlap_S) - terms.lk * overlap_S.log()
        loss = loss + (weight_S * each_S).sum() / len(p_SU)
    return loss.detach(), *torch.autograd.grad(loss, x.leaves)


def measure(sizes: Sizes, terms: Terms, repeats: int, dtype: torch.dtype, device: torch.device) -> str:
    """Both losses in turn, as the text to print."""
    x = make_inputs(sizes, dtype, device)
    difference = _difference(x, terms)
    works: dict[str, Callable[[], object]] = {"chunked": lambda: ours(x, terms), "naive": lambda: naive(x, terms)}
    samples = interleaved(works, repeats, device)
    return "\n".join((*_floor(sizes, terms, dtype), "", *_table(samples), difference, describe_machine(device)))


def _difference(x: Inputs, terms: Terms) -> str:
    """On a few positions, so that it costs little beside the measurement."""
    few = min(64, len(x.wanted_SD))
    small = replace(x, states_KSD=x.states_KSD[:, :few].detach().requires_grad_(), wanted_SD=x.wanted_SD[:few])
    small = replace(small, weight_KS=x.weight_KS[:, :few])
    pairs = list(zip(ours(small, terms), naive(small, terms), strict=True))
    worst = max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs)
    return f"largest difference of loss and gradients on {few} positions, relative to the largest entry: {worst:.1e}"


def _floor(sizes: Sizes, terms: Terms, dtype: torch.dtype) -> list[str]:
    """What any exact computation has to do: logits of both sides and the gradient back through the lm_head."""
    words = sizes.words or sizes.vocabulary
    product = 2 * sizes.tokens * words * sizes.hidden
    products = 1 + sizes.steps * (2 if sizes.words is None else 3)
    logits = sizes.tokens * words * torch.float32.itemsize
    chunk = min(terms.chunk_tokens, sizes.tokens)
    return [
        f"S = {sizes.tokens}, U = {words}, D = {sizes.hidden}, K = {sizes.steps}, {str(dtype).removeprefix('torch.')}",
        f"floor: {products} products of {product / 1e12:.3g} TFLOP; naive keeps float32 logits of {logits / GIB:.2f} GiB each, "
        f"ours of {chunk} positions at a time: {chunk * words * torch.float32.itemsize / GIB:.2f} GiB",
    ]


def _table(samples: dict[str, Samples]) -> list[str]:
    ours_, naive_ = samples["chunked"], samples["naive"]
    rows = [f"{name:<8}  peak extra {s.peak / GIB:7.3f} GiB   {s.spread()}" for name, s in samples.items()]
    memory, seconds = ours_.peak / max(naive_.peak, 1), ours_.median_s / naive_.median_s
    return [*rows, f"chunked / naive: memory {memory:.3f} (1/{1 / max(memory, 1e-9):.1f}), time {seconds:.3f}"]
