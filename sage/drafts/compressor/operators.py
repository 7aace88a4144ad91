"""Operators that make a picture shorter for a draft: each turns spans of pair states into fewer rows.

A pair state is the embedding and the feature of a pair side by side, so C = 2D. Prune, pool and conv cut a span into windows of
`ratio` consecutive pairs (the last one may be shorter) and make one row of each, so their rows can also be mixed. A row takes
the rope position of a token it stands for: the kept one, or the middle one of its window.

Ref: SpecVLM, arXiv 2509.11815, section 3 (the operators; it leaves their inner form open).

Shapes: S spans, L longest span, N windows or rows, R ratio, C channels, D hidden, H heads, d head size, Q queries.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from sage.drafts.compressor.spans import Spans

OperatorOutput = tuple[
    Tensor, Tensor, Tensor
]  # states, at and valid of `Rows`; a plain tuple, in which ZeRO-3 finds tensors to hook


class Windows:
    """Spans cut into windows.

    Args:
        states: [S, L, C], zeros behind a span's end.
        spans: theirs.
        ratio: R, pairs per window.
    """

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
        """[S, N, C]: sum over a window's pairs of weight * state * R / (pairs it has); None weighs each 1 / R."""
        if weight_CR is None:
            return self.states.sum(2) / self.size.clamp(min=1)[..., None]
        total = torch.einsum("snrc,cr->snc", self.states, weight_CR)
        return total * (self.states.shape[2] / self.size.clamp(min=1))[..., None].to(total.dtype)


class Windowed(nn.Module):
    """An operator that makes one row of every window."""

    def __init__(self, ratio: int) -> None:
        super().__init__()
        self.ratio = ratio

    def count(self, length: int) -> int:
        """Rows that a span of `length` pairs becomes."""
        return math.ceil(length / self.ratio)


class Prune(Windowed):
    """Keeps one pair of every window: another one each time while training, always the same one otherwise."""

    def forward(self, states: Tensor, spans: Spans, is_drawing: bool) -> OperatorOutput:
        """[S, L, C] -> one row per window.

        Args:
            is_drawing: whether to draw from torch's generator.
        """
        windows = Windows(states, spans, self.ratio)
        shape = windows.size.shape
        share = torch.rand(shape, device=states.device) if is_drawing else scattered(windows.num, states.device).expand(shape)
        at = windows.start + (share * windows.size).long()
        picked = states[torch.arange(len(states), device=states.device)[:, None], at.clamp(max=max(states.shape[1] - 1, 0))]
        return picked, at, windows.valid


class Pool(Windowed):
    """The mean of every window."""

    def forward(self, states: Tensor, spans: Spans, is_drawing: bool) -> OperatorOutput:
        """[S, L, C] -> one row per window."""
        windows = Windows(states, spans, self.ratio)
        return windows.mean(), windows.middle, windows.valid


class Conv(Windowed):
    """A convolution of width and stride `ratio`, one learned kernel per channel; begins as the mean.

    The head's own projections mix the channels next, so this is the first half of a depthwise separable convolution.
    """

    def __init__(self, ratio: int, channels: int) -> None:
        super().__init__(ratio)
        self.weight = nn.Parameter(torch.empty(channels, ratio))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """The mean."""
        self.weight.fill_(1 / self.ratio)

    def forward(self, states: Tensor, spans: Spans, is_drawing: bool) -> OperatorOutput:
        """[S, L, C] -> one row per window; taps a shorter last window lacks are made up for by the others."""
        windows = Windows(states, spans, self.ratio)
        return windows.mean(self.weight), windows.middle, windows.valid


class Resampler(nn.Module):
    """One cross-attention layer whose learned queries read the whole span.

    Query i of Q also stands for the i-th of Q equal parts of the span: it adds to that part's mean, where it begins, and takes
    the position of that part's middle. A span of fewer than Q pairs gets one row per pair.

    Args:
        queries: Q.
        config: an `EagleConfig`, for the sizes of its attention.
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
        """Queries of unit size, silent output."""
        self.queries.normal_()
        self.k_proj.weight.normal_(std=self.std)
        self.v_proj.weight.normal_(std=self.std)
        self.o_proj.weight.zero_()

    def count(self, length: int) -> int:
        """Rows that a span of `length` pairs becomes."""
        return min(len(self.queries), length)

    def forward(self, states: Tensor, spans: Spans, is_drawing: bool) -> OperatorOutput:
        """[S, L, C] -> min(Q, length) rows per span."""
        number = torch.arange(len(self.queries), device=states.device)
        parts = spans.length.clamp(max=len(number))[:, None]
        start, end = (edge * spans.length[:, None] // parts for edge in (number, number + 1))
        pair = torch.arange(states.shape[1], device=states.device)
        belongs = (pair >= start[..., None]) & (pair < end[..., None]) & (number < parts)[..., None]
        mean = belongs.to(states.dtype) @ states / belongs.sum(-1, keepdim=True).clamp(min=1)
        return mean + self._attend(states, spans), (start + end - 1) // 2, number < parts

    def _attend(self, states: Tensor, spans: Spans) -> Tensor:
        """[S, Q, C], the cross-attention."""
        normed = norm_halves(states)
        keys, values = (proj(normed).unflatten(-1, (self.heads, -1)) for proj in (self.k_proj, self.v_proj))
        queries = self.queries.unflatten(-1, (self.heads, -1))
        scores = torch.einsum("qhd,slhd->shql", queries, keys) * queries.shape[-1] ** -0.5
        weights = scores.masked_fill(~spans.inside[:, None, None], -torch.inf).softmax(-1)
        return self.o_proj(torch.einsum("shql,slhd->sqhd", weights, values).flatten(-2))


class TextOnly(nn.Module):
    """Nothing is left of a picture; the features of the text behind it have seen it all the same."""

    def count(self, length: int) -> int:
        """Rows that a span of `length` pairs becomes."""
        return 0

    def forward(self, states: Tensor, spans: Spans, is_drawing: bool) -> OperatorOutput:
        """[S, L, C] -> no rows."""
        none = spans.inside[:, :0]
        return states[:, :0], none.long(), none


def norm_halves(states: Tensor) -> Tensor:
    """Both halves [.., C] of the last axis at root mean square 1, as embeddings and features differ in size."""
    halves = states.unflatten(-1, (2, -1))
    return nn.functional.rms_norm(halves, halves.shape[-1:]).flatten(-2)


def scattered(count: int, device: torch.device) -> Tensor:
    """`count` fixed numbers in [0, 1) without a pattern; the first ones of a longer row are the same."""
    mixed = torch.arange(1, count + 1, device=device)
    for factor in (0x9E3779B1, 0x85EBCA6B):  # multiply and fold, as integer hashes do
        mixed = mixed * factor % 2**32
        mixed = mixed ^ (mixed >> 15)
    return mixed.double() / 2**32
