"""Operators of the visual compressor: each reduces spans of pair states to fewer rows.

A pair state is the concatenation of the embedding and the feature of a pair, so C = 2D. Prune, pool and conv divide a span into
windows of `ratio` consecutive pairs (the last one may be shorter) and return one row per window, so that their rows can also be
mixed. A row has the rope position of a token it replaces: the kept token, or the middle token of its window.

Ref: SpecVLM, arXiv 2509.11815, section 3 (the operators; their parametrization is not specified there).

Shapes: S spans, L longest span, N windows or rows, R ratio, C channels, D hidden, H heads, d head size, Q queries.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from sage.drafts.compressor.spans import Spans

# Fields states, offset and valid of `Rows`; a plain tuple, because the hooks of ZeRO-3 look for tensors in tuples.
OperatorOutput = tuple[Tensor, Tensor, Tensor]


class Windows:
    """Spans with `states` [S, L, C] (zeros after the end of a span), divided into windows of R = `ratio` pairs."""

    def __init__(self, states: Tensor, spans: Spans, ratio: int) -> None:
        count, length, channels = states.shape
        self.num = math.ceil(length / ratio)
        padding = self.num * ratio - length
        self.states = nn.functional.pad(states, (0, 0, 0, padding)).view(count, self.num, ratio, channels)
        self.start = torch.arange(self.num, device=states.device) * ratio
        self.size = (spans.length[:, None] - self.start).clamp(0, ratio)

    @property
    def valid(self) -> Tensor:
        """BoolTensor [S, N]."""
        return self.size > 0

    @property
    def middle(self) -> Tensor:
        """LongTensor [S, N], the pair in the middle of each window, the earlier one of two."""
        return self.start + (self.size - 1).clamp(min=0) // 2

    def mean(self, weight_CR: Tensor | None = None) -> Tensor:
        """Returns [S, N, C]: sum over a window's n pairs of weight * state * R / n; None for weights 1 / R."""
        if weight_CR is None:
            return self.states.sum(2) / self.size.clamp(min=1)[..., None]
        total = torch.einsum("snrc,cr->snc", self.states, weight_CR)
        return total * (self.states.shape[2] / self.size.clamp(min=1))[..., None].to(total.dtype)


class WindowOperator(nn.Module):
    """An operator with one row per window."""

    def __init__(self, ratio: int) -> None:
        super().__init__()
        self.ratio = ratio

    def num_rows(self, length: int) -> int:
        """Returns the number of rows of a span of `length` pairs."""
        return math.ceil(length / self.ratio)


class Prune(WindowOperator):
    """Keeps one pair per window: a random one in training, a fixed one otherwise."""

    def forward(self, states: Tensor, spans: Spans, is_sampling: bool) -> OperatorOutput:
        """[S, L, C] -> one row per window. `is_sampling` draws the pair from torch's generator."""
        windows = Windows(states, spans, self.ratio)
        shape = windows.size.shape
        share = (
            torch.rand(shape, device=states.device) if is_sampling else hashed_uniform(windows.num, states.device).expand(shape)
        )
        at = windows.start + (share * windows.size).long()
        picked = states[torch.arange(len(states), device=states.device)[:, None], at.clamp(max=max(states.shape[1] - 1, 0))]
        return picked, at, windows.valid


class Pool(WindowOperator):
    """Mean of each window."""

    def forward(self, states: Tensor, spans: Spans, is_sampling: bool) -> OperatorOutput:
        """[S, L, C] -> one row per window."""
        windows = Windows(states, spans, self.ratio)
        return windows.mean(), windows.middle, windows.valid


class Conv(WindowOperator):
    """Depthwise convolution of width and stride `ratio`, initialized as the mean.

    The projections of the head's layer mix the channels, so that both together are a depthwise separable convolution.
    """

    def __init__(self, ratio: int, channels: int) -> None:
        super().__init__(ratio)
        self.weight = nn.Parameter(torch.empty(channels, ratio))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Sets the weights of the mean."""
        self.weight.fill_(1 / self.ratio)

    def forward(self, states: Tensor, spans: Spans, is_sampling: bool) -> OperatorOutput:
        """[S, L, C] -> one row per window; in a shorter last window the weights are scaled up for the missing pairs."""
        windows = Windows(states, spans, self.ratio)
        return windows.mean(self.weight), windows.middle, windows.valid


class Resampler(nn.Module):
    """One cross-attention layer with learned queries over the complete span.

    Query i of Q belongs to the i-th of Q equal parts of the span: its output is added to the mean of that part, and its row has
    the position of the part's middle. A span of fewer than Q pairs has one row per pair.
    """

    def __init__(self, queries: int, config: Any) -> None:
        super().__init__()
        self.heads, inner = config.num_attention_heads, config.num_attention_heads * config.head_dim
        self.std, channels = config.initializer_range, 2 * config.hidden_size
        self.queries = nn.Parameter(torch.empty(queries, inner))
        self.k_proj = nn.Linear(channels, inner, bias=False)
        self.v_proj = nn.Linear(channels, inner, bias=False)
        self.o_proj = nn.Linear(inner, channels, bias=False)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draws fresh weights: queries of unit variance, an output of zero."""
        self.queries.normal_()
        self.k_proj.weight.normal_(std=self.std)
        self.v_proj.weight.normal_(std=self.std)
        self.o_proj.weight.zero_()

    def num_rows(self, length: int) -> int:
        """Returns the number of rows of a span of `length` pairs."""
        return min(len(self.queries), length)

    def forward(self, states: Tensor, spans: Spans, is_sampling: bool) -> OperatorOutput:
        """[S, L, C] -> min(Q, length) rows per span."""
        number = torch.arange(len(self.queries), device=states.device)
        parts = spans.length.clamp(max=len(number))[:, None]
        start, end = (edge * spans.length[:, None] // parts for edge in (number, number + 1))
        pair = torch.arange(states.shape[1], device=states.device)
        belongs = (pair >= start[..., None]) & (pair < end[..., None]) & (number < parts)[..., None]
        mean = belongs.to(states.dtype) @ states / belongs.sum(-1, keepdim=True).clamp(min=1)
        return mean + self._attend(states, spans), (start + end - 1) // 2, number < parts

    def _attend(self, states: Tensor, spans: Spans) -> Tensor:
        """Returns the cross-attention, [S, Q, C]."""
        normed = norm_halves(states)
        keys, values = (proj(normed).unflatten(-1, (self.heads, -1)) for proj in (self.k_proj, self.v_proj))
        queries = self.queries.unflatten(-1, (self.heads, -1))
        scores = torch.einsum("qhd,slhd->shql", queries, keys) * queries.shape[-1] ** -0.5
        weights = scores.masked_fill(~spans.inside[:, None, None], -torch.inf).softmax(-1)
        return self.o_proj(torch.einsum("shql,slhd->sqhd", weights, values).flatten(-2))


class TextOnly(nn.Module):
    """Removes the visual rows; the features of later text tokens still depend on the image."""

    def num_rows(self, length: int) -> int:
        """Returns the number of rows of a span of `length` pairs."""
        return 0

    def forward(self, states: Tensor, spans: Spans, is_sampling: bool) -> OperatorOutput:
        """[S, L, C] -> no rows."""
        none = spans.inside[:, :0]
        return states[:, :0], none.long(), none


def norm_halves(states: Tensor) -> Tensor:
    """Normalizes both halves of the last axis [.., C] to root mean square 1, as embeddings and features differ in scale."""
    halves = states.unflatten(-1, (2, -1))
    return nn.functional.rms_norm(halves, halves.shape[-1:]).flatten(-2)


def hashed_uniform(count: int, device: torch.device) -> Tensor:
    """Returns `count` fixed, evenly distributed numbers in [0, 1), hashes of 1, 2, ...; float64."""
    mixed = torch.arange(1, count + 1, device=device)
    for factor in (0x9E3779B1, 0x85EBCA6B):  # an integer hash
        mixed = mixed * factor % 2**32
        mixed = mixed ^ (mixed >> 15)
    return mixed.double() / 2**32
