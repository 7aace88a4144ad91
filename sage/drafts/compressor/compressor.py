"""The elastic visual compressor of a draft head: each picture becomes a few rows before the head's layer reads it.

The target still sees every token, so the output is untouched; what changes is how long the draft's context is and what it
knows. The very same module serves training (whole conversations) and decoding (one prompt).

An operator by itself is a mode (prune, pool, conv, resampler, text_only). `weighted` mixes the rows of several, `concat` puts
them side by side, `select` takes those of one, picture by picture.

The gate of `weighted` and `select` reads the question: the mean pair state (embedding and feature, then each at root mean
square 1) over the text of the turn the picture is in. That is all pairs of two text tokens between the ends of turns (the
target's EOS ids) around the picture, and before the first token of an answer. So a picture's question is the same in training
and in decoding, in its own turn and in all later ones; with a template that does not end turns with an EOS id this holds for
the first turn only.

Ref: SpecVLM, arXiv 2509.11815, section 3 (operators, modes and their ratios; the form of gate and operators is ours).

Shapes: B batch, P pairs, S spans, L longest span, N rows per span, O operators, C = 2D channels of a pair state, D hidden.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from sage.drafts.compressor.operators import Conv, Pool, Prune, Resampler, TextOnly, norm_halves
from sage.drafts.compressor.spans import Layout, PairMasks, Rows, Shortened, Spans

KEYS: dict[str, tuple[str, ...]] = {  # what each kind has to be told
    "prune": ("ratio",),
    "pool": ("ratio",),
    "conv": ("ratio",),
    "resampler": ("queries",),
    "text_only": (),
    "weighted": ("ratio",),
    "concat": ("ratio", "conv_ratio", "queries"),
    "select": ("ratio", "conv_ratio", "queries", "temperature"),
}
GATE_SIZE = 64


class Compressor(nn.Module):
    """What stands for pictures in a head's sequence of pairs.

    Args:
        config: an `EagleConfig` whose `compressor` is set (see `check_compressor`).
    """

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.mode = _new_mode(config)

    def forward(
        self, embeds_next: Tensor, features: Tensor, position_ids: Tensor, pair_masks: PairMasks, is_drawing: bool = False
    ) -> Shortened:
        """The sequences with every span replaced.

        Args:
            embeds_next, features: [B, P, D], the pairs.
            position_ids: [B, P] or [3, B, P].
            pair_masks: of these pairs.
            is_drawing: whether pruning and selecting draw from torch's generator, as in training.
        """
        spans = Spans.of(pair_masks.visual)
        if not len(spans.row):
            return Shortened(self._untouched(embeds_next), features, position_ids)
        states = torch.cat((spans.take(embeds_next), spans.take(features)), -1)
        question = torch.cat([spans.question(half, pair_masks) for half in (embeds_next, features)], -1)
        rows: Rows = self.mode(states, spans, question, is_drawing)
        layout = Layout(pair_masks.visual, spans, rows)
        embeds_made, features_made = rows.states.chunk(2, -1)
        return Shortened(
            layout.shorten(embeds_next, embeds_made),
            layout.shorten(features, features_made),
            layout.positions(position_ids),
            None if rows.weight is None else layout.weights(rows.weight),
            layout,
        )

    def count(self, length: int) -> int:
        """Rows that a span of `length` pairs becomes; the most where that depends on what is asked."""
        return int(self.mode.count(length))

    def _untouched(self, embeds_next: Tensor) -> Tensor:
        """The same, with every weight's gradient a zero in training: ranks that exchange gradients need all of them."""
        if not torch.is_grad_enabled():
            return embeds_next
        row = torch.zeros(1, dtype=torch.long, device=embeds_next.device)
        blank = embeds_next.new_zeros(1, 2 * embeds_next.shape[2])
        spans = Spans(row, row, row + 1, torch.ones_like(row, dtype=torch.bool)[None])
        rows: Rows = self.mode(blank[None], spans, blank, True)
        touched = rows.states.sum() if rows.weight is None else rows.states.sum() * rows.weight.sum()
        return embeds_next + 0 * touched


class Gate(nn.Module):
    """Scores for the operators by the question; begins undecided."""

    def __init__(self, channels: int, operators: int, std: float) -> None:
        super().__init__()
        self.std = std
        self.inner = nn.Linear(channels, GATE_SIZE)
        self.outer = nn.Linear(GATE_SIZE, operators)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """No preference."""
        self.inner.weight.normal_(std=self.std)
        for silent in (self.inner.bias, self.outer.weight, self.outer.bias):
            silent.zero_()

    def forward(self, question_SC: Tensor) -> Tensor:
        """[S, O]."""
        return self.outer(nn.functional.silu(self.inner(norm_halves(question_SC))))


class Single(nn.Module):
    """One operator."""

    def __init__(self, operator: nn.Module) -> None:
        super().__init__()
        self.operator: Any = operator

    def count(self, length: int) -> int:
        """Rows that a span of `length` pairs becomes."""
        return int(self.operator.count(length))

    def forward(self, states: Tensor, spans: Spans, question: Tensor, is_drawing: bool) -> Rows:
        """[S, L, C], [S, C] -> the operator's rows."""
        return Rows(*self.operator(states, spans, is_drawing))


class Weighted(nn.Module):
    """The rows of several operators of one ratio, mixed by the softmax of the gate; at the middles of their windows."""

    def __init__(self, operators: Sequence[nn.Module], gate: Gate) -> None:
        super().__init__()
        self.operators, self.gate = nn.ModuleList(operators), gate

    def count(self, length: int) -> int:
        """Rows that a span of `length` pairs becomes."""
        return max(operator.count(length) for operator in self.operators)

    def forward(self, states: Tensor, spans: Spans, question: Tensor, is_drawing: bool) -> Rows:
        """[S, L, C], [S, C] -> one row per window."""
        share_SO = self.gate(question).softmax(-1)
        parts = [Rows(*operator(states, spans, is_drawing)) for operator in self.operators]
        mixed = torch.einsum("so,osnc->snc", share_SO, torch.stack([part.states for part in parts]))
        return Rows(mixed, parts[-1].at, parts[-1].valid)


class Concat(nn.Module):
    """The rows of several operators, one after the other."""

    def __init__(self, operators: Sequence[nn.Module]) -> None:
        super().__init__()
        self.operators = nn.ModuleList(operators)

    def count(self, length: int) -> int:
        """Rows that a span of `length` pairs becomes."""
        return sum(operator.count(length) for operator in self.operators)

    def forward(self, states: Tensor, spans: Spans, question: Tensor, is_drawing: bool) -> Rows:
        """[S, L, C], [S, C] -> the rows of all."""
        return Rows.join([Rows(*operator(states, spans, is_drawing)) for operator in self.operators])


class Select(nn.Module):
    """The rows of one operator per span: the gate's best, and in training a draw from its softmax by the Gumbel trick.

    The draw's gradient is that of the relaxed probability at `temperature` (straight-through), taken at what the text attends
    to: it grows or shrinks with how much the rows of the chosen operator help.

    Ref: Gumbel-softmax, arXiv 1611.01144, section 2.2.
    """

    def __init__(self, operators: Sequence[nn.Module], gate: Gate, temperature: float) -> None:
        super().__init__()
        self.operators, self.gate, self.temperature = nn.ModuleList(operators), gate, temperature

    def count(self, length: int) -> int:
        """Rows that a span of `length` pairs becomes, at most."""
        return max(operator.count(length) for operator in self.operators)

    def forward(self, states: Tensor, spans: Spans, question: Tensor, is_drawing: bool) -> Rows:
        """[S, L, C], [S, C] -> rows of the chosen operators."""
        scores_SO = self.gate(question)
        if not is_drawing:
            chosen_S = scores_SO.argmax(-1)
            wanted = set(chosen_S.tolist())
            return self._rows(states, spans, chosen_S, [number in wanted for number in range(len(self.operators))], False)
        share_SO = ((scores_SO.float() + gumbel(scores_SO)) / self.temperature).softmax(-1)
        chosen_S = share_SO.argmax(-1)
        rows = self._rows(states, spans, chosen_S, [True] * len(self.operators), True)  # all, so that all have gradients
        share_S = share_SO.gather(1, chosen_S[:, None])[:, 0]
        rows.weight = (1 + (share_S - share_S.detach())).to(states.dtype)  # exactly 1 in value
        return rows

    def _rows(self, states: Tensor, spans: Spans, chosen_S: Tensor, is_asked: Sequence[bool], is_drawing: bool) -> Rows:
        asked = [number for number, is_wanted in enumerate(is_asked) if is_wanted]
        parts = [Rows(*self.operators[number](states, spans, is_drawing)) for number in asked]
        longest = max(part.at.shape[1] for part in parts)
        parts = [part.padded(longest) for part in parts]
        number_S = torch.searchsorted(torch.tensor(asked, device=chosen_S.device), chosen_S)
        span_S = torch.arange(len(chosen_S), device=chosen_S.device)
        states_OSNC, at_OSN, valid_OSN = (
            torch.stack([getattr(part, name) for part in parts]) for name in ("states", "at", "valid")
        )
        return Rows(states_OSNC[number_S, span_S], at_OSN[number_S, span_S], valid_OSN[number_S, span_S])


def gumbel(like: Tensor) -> Tensor:
    """Standard Gumbel noise in float32, from torch's generator."""
    tiny = torch.finfo(torch.float32).tiny
    uniform = torch.rand(like.shape, device=like.device).clamp(min=tiny)
    return -(-uniform.log()).clamp(min=tiny).log()


def check_compressor(given: Mapping[str, Any]) -> None:
    """Refuses what is no compressor: a mapping of `kind` and of just what `KEYS` names for it.

    Raises:
        ValueError: names the key, the value and what is allowed.
    """
    kind = given.get("kind")
    if kind not in KEYS:
        raise ValueError(f"draft.compressor.kind: {kind!r} is unknown; choose one of {', '.join(KEYS)}")
    wrong = sorted({"kind", *KEYS[kind]} ^ set(given))
    if wrong:
        told = ", ".join(KEYS[kind]) or "nothing else"
        raise ValueError(f"draft.compressor.{wrong[0]}: {'unknown' if wrong[0] in given else 'missing'}; {kind} takes {told}")
    for key in ("ratio", "conv_ratio", "queries"):
        value = given.get(key, 1)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"draft.compressor.{key}: {value}; allowed: a whole number from 1 on")
    if not given.get("temperature", 1) > 0:
        raise ValueError(f"draft.compressor.temperature: {given['temperature']}; allowed: above 0; 1.0 is the usual value")


def _new_mode(config: Any) -> nn.Module:
    given: dict[str, Any] = dict(config.compressor)
    kind, ratio, channels = given["kind"], given.get("ratio", 1), 2 * config.hidden_size
    if kind == "text_only":
        return Single(TextOnly())
    if kind == "resampler":
        return Single(Resampler(given["queries"], config))
    if kind in ("prune", "pool", "conv"):
        return Single({"prune": Prune(ratio), "pool": Pool(ratio)}.get(kind) or Conv(ratio, channels))
    if kind == "weighted":
        same = [Prune(ratio), Conv(ratio, channels), Pool(ratio)]
        return Weighted(same, Gate(channels, len(same), config.initializer_range))
    learned = [Conv(given["conv_ratio"], channels), Resampler(given["queries"], config)]
    if kind == "concat":
        return Concat([Pool(ratio), *learned])
    choices = [Prune(ratio), Pool(ratio), *learned]
    return Select(choices, Gate(channels, len(choices), config.initializer_range), given["temperature"])
