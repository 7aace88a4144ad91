"""Elastic visual compressor of a draft head: reduces each image or video to a few rows before the head's layer.

The target reads all visual tokens, so the output does not change; the compressor shortens the draft's context. The same module
is used in training (complete conversations) and in decoding (one prompt).

A pair state is the concatenation of the embedding and the feature of a pair, so C = 2D. An operator reduces a span of pair
states to fewer rows. Prune, pool and conv return one row for each window of `ratio` consecutive pairs (the last one may be
shorter), so that their rows can also be mixed. A row has the rope position of a token it replaces: the kept token, or the
middle one.

The gate of `weighted` and `select` reads the question: the mean pair state (embedding and feature, each normalized to root mean
square 1) over the text of the turn of the image. These are all pairs of two text tokens between the ends of turns (the target's
EOS ids) around the image, before the first token of the answer. The question of an image is therefore the same in training and
in decoding, in its own turn and in later ones; with a template that does not end turns with an EOS id, in the first turn only.

Ref: SpecVLM, arXiv 2509.11815, section 3 (operators, modes and their ratios; the form of gate and operators is ours).

Shapes: B batch, P pairs, S spans, L longest span, N rows per span or windows, R ratio, O operators, C = 2D channels of a pair
state, D hidden, H heads, d head size, Q queries.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from sage.drafts.registry import COMPRESSORS
from sage.drafts.spans import HeadInput, Layout, PairMasks, Rows, Spans
from sage.io.ranges import check_value

GATE_SIZE = 64


class Compressor(nn.Module):
    """Replaces each span of visual pairs by fewer rows, as specified by `config.compressor` (see `check_compressor`)."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        mode, operators = MODES[config.compressor["kind"]]
        self.mode = mode([OPERATORS[name](config.compressor, config) for name in operators], config)

    def forward(
        self, embeds_next: Tensor, features: Tensor, position_ids: Tensor, pair_masks: PairMasks, is_sampling: bool = False
    ) -> HeadInput:
        """Compresses sequences of pairs.

        Args:
            embeds_next, features: [B, P, D], the pairs.
            position_ids: [B, P] or [3, B, P].
            pair_masks: masks of these pairs.
            is_sampling: whether pruning and selection draw from torch's generator, as in training.
        """
        spans = Spans.of(pair_masks.visual)
        if not len(spans.row):
            return HeadInput(self._with_zero_gradients(embeds_next), features, position_ids)
        states = torch.cat((spans.take(embeds_next), spans.take(features)), -1)
        question = torch.cat([spans.mean_text_state(half, pair_masks) for half in (embeds_next, features)], -1)
        rows: Rows = self.mode(states, spans, question, is_sampling)
        layout = Layout(pair_masks.visual, spans, rows)
        embeds_made, features_made = rows.states.chunk(2, -1)
        return HeadInput(
            layout.shorten(embeds_next, embeds_made),
            layout.shorten(features, features_made),
            layout.positions(position_ids),
            None if rows.weight is None else layout.weights(rows.weight),
            layout,
        )

    def num_rows(self, length: int) -> int:
        """Returns the number of rows of a span of `length` pairs; the maximum if it depends on the question."""
        counts = [module.num_rows(length) for module in self.modules() if isinstance(module, Operator)]
        return max(counts) if isinstance(self.mode, Weighted) else sum(counts)

    def _with_zero_gradients(self, embeds_next: Tensor) -> Tensor:
        """Returns the input, connected to every weight with gradient zero: ranks that reduce gradients need all of them."""
        if not torch.is_grad_enabled():
            return embeds_next
        row = torch.zeros(1, dtype=torch.long, device=embeds_next.device)
        blank = embeds_next.new_zeros(1, 2 * embeds_next.shape[2])
        spans = Spans(row, row, row + 1, torch.ones_like(row, dtype=torch.bool)[None])
        rows: Rows = self.mode(blank[None], spans, blank, True)
        touched = rows.states.sum() if rows.weight is None else rows.states.sum() * rows.weight.sum()
        return embeds_next + 0 * touched


class Operator(nn.Module):
    """Base class of operators, which reduce every span to some rows."""

    def num_rows(self, length: int) -> int:
        """Returns the number of rows of a span of `length` pairs; 0 here, with which only text is left."""
        return 0

    def forward(self, states: Tensor, spans: Spans, is_sampling: bool) -> Rows:
        """Returns the rows that replace spans with `states` [S, L, C], zeros after the end of a span; here none.

        Args:
            is_sampling: whether to draw from torch's generator.
        """
        none = spans.inside[:, :0]
        return Rows(states[:, :0], none.long(), none)


class WindowOperator(Operator):
    """Base class of operators with one row per window."""

    def __init__(self, ratio: int) -> None:
        super().__init__()
        self.ratio = ratio

    def num_rows(self, length: int) -> int:
        return math.ceil(length / self.ratio)

    def forward(self, states: Tensor, spans: Spans, is_sampling: bool) -> Rows:
        num_windows = self.num_rows(states.shape[1])
        padded = nn.functional.pad(states, (0, 0, 0, num_windows * self.ratio - states.shape[1]))
        start = torch.arange(num_windows, device=states.device) * self.ratio
        size = (spans.length[:, None] - start).clamp(0, self.ratio)
        made, offset = self.reduce(padded.unflatten(1, (num_windows, self.ratio)), size, is_sampling)
        return Rows(made, start + offset, size > 0)

    def reduce(self, windows: Tensor, size: Tensor, is_sampling: bool) -> tuple[Tensor, Tensor]:
        """Returns rows [S, N, C] of windows [S, N, R, C] with `size` [S, N] pairs, and their places in the windows [S, N]."""
        raise NotImplementedError


class Prune(WindowOperator):
    """Keeps one pair per window: a random one in training, a fixed one otherwise."""

    def reduce(self, windows: Tensor, size: Tensor, is_sampling: bool) -> tuple[Tensor, Tensor]:
        share = torch.rand(size.shape, device=size.device) if is_sampling else hashed_uniform(size.shape[1], size.device)
        kept = (share * size).long()
        index = kept[..., None, None].expand(-1, -1, 1, windows.shape[-1])
        return windows.gather(2, index)[:, :, 0], kept


class Pool(WindowOperator):
    """Mean of each window."""

    def reduce(self, windows: Tensor, size: Tensor, is_sampling: bool) -> tuple[Tensor, Tensor]:
        return windows.sum(2) / size.clamp(min=1)[..., None], middle_of(size)


class Conv(WindowOperator):
    """Depthwise convolution of width and stride `ratio`, initialized as the mean.

    The projections of the head's layer mix the channels, so that both together are a depthwise separable convolution. In a
    shorter last window the weights are scaled up for the missing pairs.
    """

    def __init__(self, ratio: int, channels: int) -> None:
        super().__init__(ratio)
        self.weight = nn.Parameter(torch.full((channels, ratio), 1 / ratio))

    def reduce(self, windows: Tensor, size: Tensor, is_sampling: bool) -> tuple[Tensor, Tensor]:
        total = torch.einsum("snrc,cr->snc", windows, self.weight)
        return total * (self.ratio / size.clamp(min=1))[..., None].to(total.dtype), middle_of(size)


class Resampler(Operator):
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
        return min(len(self.queries), length)

    def forward(self, states: Tensor, spans: Spans, is_sampling: bool) -> Rows:
        number = torch.arange(len(self.queries), device=states.device)
        parts = spans.length.clamp(max=len(number))[:, None]
        start, end = (edge * spans.length[:, None] // parts for edge in (number, number + 1))
        pair = torch.arange(states.shape[1], device=states.device)
        belongs = (pair >= start[..., None]) & (pair < end[..., None]) & (number < parts)[..., None]
        mean = belongs.to(states.dtype) @ states / belongs.sum(-1, keepdim=True).clamp(min=1)
        return Rows(mean + self.attend(states, spans.inside), (start + end - 1) // 2, number < parts)

    def attend(self, states: Tensor, inside: Tensor) -> Tensor:
        """Returns the cross-attention of the queries to every span, [S, Q, C]."""
        normed = norm_halves(states)
        keys, values = (proj(normed).unflatten(-1, (self.heads, -1)) for proj in (self.k_proj, self.v_proj))
        queries = self.queries.unflatten(-1, (self.heads, -1))
        scores = torch.einsum("qhd,slhd->shql", queries, keys) * queries.shape[-1] ** -0.5
        weights = scores.masked_fill(~inside[:, None, None], -torch.inf).softmax(-1)
        return self.o_proj(torch.einsum("shql,slhd->sqhd", weights, values).flatten(-2))


class Gate(nn.Module):
    """Scores the operators by the question; initially all scores are 0."""

    def __init__(self, channels: int, operators: int, std: float) -> None:
        super().__init__()
        self.std = std
        self.inner = nn.Linear(channels, GATE_SIZE)
        self.outer = nn.Linear(GATE_SIZE, operators)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Sets initial weights that score all operators 0."""
        self.inner.weight.normal_(std=self.std)
        for zero in (self.inner.bias, self.outer.weight, self.outer.bias):
            zero.zero_()

    def forward(self, question_SC: Tensor) -> Tensor:
        """[S, C] -> scores [S, O]."""
        return self.outer(nn.functional.silu(self.inner(norm_halves(question_SC))))


class Single(nn.Module):
    """Rows of one operator."""

    def __init__(self, operators: Sequence[Operator], config: Any) -> None:
        super().__init__()
        [self.operator] = operators

    def forward(self, states: Tensor, spans: Spans, question: Tensor, is_sampling: bool) -> Rows:
        """Returns the rows that replace the spans, from `states` [S, L, C] and `question` [S, C]."""
        rows: Rows = self.operator(states, spans, is_sampling)
        return rows


class Concat(nn.Module):
    """Concatenated rows of the operators; `forward` as of `Single`."""

    def __init__(self, operators: Sequence[Operator], config: Any) -> None:
        super().__init__()
        self.operators = nn.ModuleList(operators)

    def forward(self, states: Tensor, spans: Spans, question: Tensor, is_sampling: bool) -> Rows:
        made = [operator(states, spans, is_sampling)[:3] for operator in self.operators]
        return Rows(*(torch.cat(each, 1) for each in zip(*made, strict=True)))


class Weighted(Concat):
    """Rows of operators of equal ratio, mixed by the softmax of the gate, at the middles of the windows."""

    def __init__(self, operators: Sequence[Operator], config: Any) -> None:
        super().__init__(operators, config)
        self.gate = Gate(2 * config.hidden_size, len(operators), config.initializer_range)

    def forward(self, states: Tensor, spans: Spans, question: Tensor, is_sampling: bool) -> Rows:
        share_SO = self.gate(question).softmax(-1)
        *others, last = [operator(states, spans, is_sampling) for operator in self.operators]
        states_OSNC = torch.stack([rows.states for rows in (*others, last)])
        return Rows(torch.einsum("so,osnc->snc", share_SO, states_OSNC), last.offset, last.valid)


class Select(Weighted):
    """Rows of one operator per span: the highest score of the gate, or in training a Gumbel-softmax sample of it.

    The gradient of the sample is that of the relaxed probability at `temperature` (straight-through), applied to the attention
    values of the selected rows.

    Ref: Gumbel-softmax, arXiv 1611.01144, section 2.2.
    """

    def __init__(self, operators: Sequence[Operator], config: Any) -> None:
        super().__init__(operators, config)
        self.temperature = config.compressor["temperature"]

    def forward(self, states: Tensor, spans: Spans, question: Tensor, is_sampling: bool) -> Rows:
        score_SO = self.gate(question)
        if is_sampling:
            score_SO = ((score_SO.float() + gumbel(score_SO)) / self.temperature).softmax(-1)
        chosen_S = score_SO.argmax(-1)
        span_S = torch.arange(len(chosen_S), device=chosen_S.device)
        made = [operator(states, spans, is_sampling)[:3] for operator in self.operators]
        stacked = (torch.stack(_of_equal_length(each)) for each in zip(*made, strict=True))
        rows = Rows(*(each[chosen_S, span_S] for each in stacked))
        if not is_sampling:
            return rows
        share_S = score_SO.gather(1, chosen_S[:, None])[:, 0]
        return rows._replace(weight=(1 + (share_S - share_S.detach())).to(states.dtype))  # exactly 1 in value


def _of_equal_length(values: Sequence[Tensor]) -> list[Tensor]:
    """Pads tensors [S, N, ..] to the largest N."""
    longest = max(each.shape[1] for each in values)
    return [nn.functional.pad(each, (*[0, 0] * (each.dim() - 2), 0, longest - each.shape[1])) for each in values]


# Operators by name, made from the compressor's keys and the head's sizes.
OPERATORS: dict[str, Callable[[Mapping[str, Any], Any], Operator]] = {
    "prune": lambda given, config: Prune(given["ratio"]),
    "pool": lambda given, config: Pool(given["ratio"]),
    "conv": lambda given, config: Conv(given.get("conv_ratio", given.get("ratio")), 2 * config.hidden_size),
    "resampler": lambda given, config: Resampler(given["queries"], config),
    "text_only": lambda given, config: Operator(),
}
# Of each kind: the mode and its operators.
MODES: dict[str, tuple[Callable[..., Any], tuple[str, ...]]] = {
    **{name: (Single, (name,)) for name in OPERATORS},
    "weighted": (Weighted, ("prune", "conv", "pool")),
    "concat": (Concat, ("pool", "conv", "resampler")),
    "select": (Select, ("prune", "pool", "conv", "resampler")),
}


def middle_of(size: Tensor) -> Tensor:
    """Returns the place of the middle pair of windows of `size` pairs, the earlier one of two."""
    return (size - 1).clamp(min=0) // 2


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


def gumbel(like: Tensor) -> Tensor:
    """Returns standard Gumbel noise in float32, from torch's generator."""
    tiny = torch.finfo(torch.float32).tiny
    uniform = torch.rand(like.shape, device=like.device).clamp(min=tiny)
    return -(-uniform.log()).clamp(min=tiny).log()


def check_compressor(given: Mapping[str, Any]) -> None:
    """Raises ValueError unless `given` has a known `kind`, exactly its keys in `COMPRESSORS`, and allowed values."""
    kind = given.get("kind")
    if kind not in COMPRESSORS:
        raise ValueError(f"draft.compressor.kind: {kind!r} is unknown; choose one of {', '.join(COMPRESSORS)}")
    keys = COMPRESSORS[kind]
    wrong = sorted({"kind", *keys} ^ set(given))
    if wrong:
        is_given = "unknown" if wrong[0] in given else "missing"
        raise ValueError(f"draft.compressor.{wrong[0]}: {is_given}; {kind} takes {', '.join(keys) or 'no keys'}")
    for key, hint in keys.items():
        check_value(f"draft.compressor.{key}", given[key], hint)
