"""Elastic visual compressor of a draft head: reduces each image or video to a few rows before the head's layer.

The target reads all visual tokens, so the output does not change; the compressor shortens the draft's context. The same module
is used in training (complete conversations) and in decoding (one prompt).

A single operator is a mode (prune, pool, conv, resampler, text_only). `weighted` mixes the rows of several operators, `concat`
concatenates them, `select` takes the rows of one operator per image.

The gate of `weighted` and `select` reads the question: the mean pair state (embedding and feature, each normalized to root mean
square 1) over the text of the turn of the image. These are all pairs of two text tokens between the ends of turns (the target's
EOS ids) around the image, before the first token of the answer. The question of an image is therefore the same in training and
in decoding, in its own turn and in later ones; with a template that does not end turns with an EOS id, in the first turn only.

Ref: SpecVLM, arXiv 2509.11815, section 3 (operators, modes and their ratios; the form of gate and operators is ours).

Shapes: B batch, P pairs, S spans, L longest span, N rows per span, O operators, C = 2D channels of a pair state, D hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from sage.drafts.compressor.operators import Conv, Pool, Prune, Resampler, TextOnly, norm_halves
from sage.drafts.compressor.spans import HeadInput, Layout, PairMasks, Rows, Spans

GATE_SIZE = 64


class Compressor(nn.Module):
    """Replaces each span of visual pairs by fewer rows, as specified by `config.compressor` (see `check_compressor`)."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        mode, operators, _ = MODES[config.compressor["kind"]]
        made = [OPERATORS[name](config.compressor, config) for name in operators]
        self.mode = mode(made, config.compressor, config)

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
        return int(self.mode.num_rows(length))

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

    def __init__(self, operators: Sequence[nn.Module], given: Mapping[str, Any], config: Any) -> None:
        super().__init__()
        self.operator: Any = operators[0]

    def num_rows(self, length: int) -> int:
        """Returns the number of rows of a span of `length` pairs."""
        return int(self.operator.num_rows(length))

    def forward(self, states: Tensor, spans: Spans, question: Tensor, is_sampling: bool) -> Rows:
        """Returns the rows that replace the spans.

        Args:
            states: [S, L, C].
            question: [S, C].
            is_sampling: whether to draw from torch's generator.
        """
        return Rows(*self.operator(states, spans, is_sampling))


class Several(nn.Module):
    """Base class of modes with several operators; `forward` as of `Single`."""

    def __init__(self, operators: Sequence[nn.Module], given: Mapping[str, Any], config: Any) -> None:
        super().__init__()
        self.operators = nn.ModuleList(operators)

    def num_rows(self, length: int) -> int:
        """Returns the number of rows of a span of `length` pairs, at most."""
        return max(operator.num_rows(length) for operator in self.operators)


class Concat(Several):
    """Concatenated rows of the operators."""

    def num_rows(self, length: int) -> int:
        return sum(operator.num_rows(length) for operator in self.operators)

    def forward(self, states: Tensor, spans: Spans, question: Tensor, is_sampling: bool) -> Rows:
        return Rows.concat([Rows(*operator(states, spans, is_sampling)) for operator in self.operators])


class Weighted(Several):
    """Rows of operators of equal ratio, mixed by the softmax of the gate, at the middles of the windows."""

    def __init__(self, operators: Sequence[nn.Module], given: Mapping[str, Any], config: Any) -> None:
        super().__init__(operators, given, config)
        self.gate = Gate(2 * config.hidden_size, len(operators), config.initializer_range)

    def forward(self, states: Tensor, spans: Spans, question: Tensor, is_sampling: bool) -> Rows:
        share_SO = self.gate(question).softmax(-1)
        parts = [Rows(*operator(states, spans, is_sampling)) for operator in self.operators]
        mixed = torch.einsum("so,osnc->snc", share_SO, torch.stack([part.states for part in parts]))
        return Rows(mixed, parts[-1].offset, parts[-1].valid)


class Select(Several):
    """Rows of one operator per span: the highest score of the gate, or in training a Gumbel-softmax sample of it.

    The gradient of the sample is that of the relaxed probability at `temperature` (straight-through), applied to the attention
    values of the selected rows.

    Ref: Gumbel-softmax, arXiv 1611.01144, section 2.2.
    """

    def __init__(self, operators: Sequence[nn.Module], given: Mapping[str, Any], config: Any) -> None:
        super().__init__(operators, given, config)
        self.gate = Gate(2 * config.hidden_size, len(operators), config.initializer_range)
        self.temperature = given["temperature"]

    def forward(self, states: Tensor, spans: Spans, question: Tensor, is_sampling: bool) -> Rows:
        scores_SO = self.gate(question)
        if not is_sampling:
            chosen_S = scores_SO.argmax(-1)
            return self._rows(states, spans, chosen_S, sorted(set(chosen_S.tolist())), False)
        share_SO = ((scores_SO.float() + gumbel(scores_SO)) / self.temperature).softmax(-1)
        chosen_S = share_SO.argmax(-1)
        rows = self._rows(states, spans, chosen_S, range(len(self.operators)), True)  # all of them have gradients
        share_S = share_SO.gather(1, chosen_S[:, None])[:, 0]
        rows.weight = (1 + (share_S - share_S.detach())).to(states.dtype)  # exactly 1 in value
        return rows

    def _rows(self, states: Tensor, spans: Spans, chosen_S: Tensor, needed: Sequence[int], is_sampling: bool) -> Rows:
        """Returns the rows of the operator chosen for each span, computed by those that are needed, in increasing order."""
        parts = [Rows(*self.operators[number](states, spans, is_sampling)) for number in needed]
        longest = max(part.offset.shape[1] for part in parts)
        parts = [part.padded(longest) for part in parts]
        number_S = torch.searchsorted(torch.tensor(needed, device=chosen_S.device), chosen_S)
        span_S = torch.arange(len(chosen_S), device=chosen_S.device)
        states_OSNC, offset_OSN, valid_OSN = (
            torch.stack([getattr(part, name) for part in parts]) for name in ("states", "offset", "valid")
        )
        return Rows(states_OSNC[number_S, span_S], offset_OSN[number_S, span_S], valid_OSN[number_S, span_S])


# Operators by name, made from the compressor's keys and the head's sizes.
OPERATORS: dict[str, Callable[[Mapping[str, Any], Any], nn.Module]] = {
    "prune": lambda given, config: Prune(given["ratio"]),
    "pool": lambda given, config: Pool(given["ratio"]),
    "conv": lambda given, config: Conv(given.get("conv_ratio", given.get("ratio")), 2 * config.hidden_size),
    "resampler": lambda given, config: Resampler(given["queries"], config),
    "text_only": lambda given, config: TextOnly(),
}
# Of each kind: the mode, its operators, and the required keys.
MODES: dict[str, tuple[Callable[..., Any], tuple[str, ...], tuple[str, ...]]] = {
    "prune": (Single, ("prune",), ("ratio",)),
    "pool": (Single, ("pool",), ("ratio",)),
    "conv": (Single, ("conv",), ("ratio",)),
    "resampler": (Single, ("resampler",), ("queries",)),
    "text_only": (Single, ("text_only",), ()),
    "weighted": (Weighted, ("prune", "conv", "pool"), ("ratio",)),
    "concat": (Concat, ("pool", "conv", "resampler"), ("ratio", "conv_ratio", "queries")),
    "select": (Select, ("prune", "pool", "conv", "resampler"), ("ratio", "conv_ratio", "queries", "temperature")),
}


def gumbel(like: Tensor) -> Tensor:
    """Returns standard Gumbel noise in float32, from torch's generator."""
    tiny = torch.finfo(torch.float32).tiny
    uniform = torch.rand(like.shape, device=like.device).clamp(min=tiny)
    return -(-uniform.log()).clamp(min=tiny).log()


def check_compressor(given: Mapping[str, Any]) -> None:
    """Raises ValueError unless `given` has a known `kind`, exactly its keys in `MODES`, and allowed values."""
    kind = given.get("kind")
    if kind not in MODES:
        raise ValueError(f"draft.compressor.kind: {kind!r} is unknown; choose one of {', '.join(MODES)}")
    *_, keys = MODES[kind]
    wrong = sorted({"kind", *keys} ^ set(given))
    if wrong:
        is_given = "unknown" if wrong[0] in given else "missing"
        raise ValueError(f"draft.compressor.{wrong[0]}: {is_given}; {kind} takes {', '.join(keys) or 'no keys'}")
    for key in ("ratio", "conv_ratio", "queries"):
        value = given.get(key, 1)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"draft.compressor.{key}: {value}; allowed: a whole number of at least 1")
    if not given.get("temperature", 1) > 0:
        raise ValueError(f"draft.compressor.temperature: {given['temperature']}; allowed: above 0; 1.0 is the usual value")
