"""Visual spans of a batch of pair sequences, and the mapping to the compressed sequences.

Pair t is (feature of token t, embedding of token t + 1). It is visual if both tokens are; the last pair of an image, which
contains the first text token after it, is therefore kept. A span is a contiguous run of visual pairs: one image or video, or
several adjacent ones. Worked example, an image v1..v5 whose span of four pairs is replaced by two rows `a b` with `offset` 0
and 2, the pairs whose positions they have:

    tokens     t0 v1 v2 v3 v4 v5 t6 t7
    pairs      t0 v1 v2 v3 v4 v5 t6          v5 = (feature of v5, embedding of t6)
    visual     0  1  1  1  1  0  0
    place      0  1  .  .  .  3  4           row of a text pair in the compressed sequence
    compressed t0 a  b  v5 t6
    source     0  1  3  5  6                 the pair whose rope position each row has
    run_length 0  .  .  0  1                 text pairs directly before it, back to an image or the beginning

Shapes: B batch, T tokens, P pairs, Q rows of the compressed sequences, S spans of the batch, L longest span, N rows per span,
M maximum number of spans of a sequence, C channels, D hidden.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn


@dataclass
class PairMasks:
    """Masks of the pairs of a batch.

    Attributes:
        visual: BoolTensor [B, P], pairs of two visual tokens, which a compressor replaces.
        text: BoolTensor [B, P], pairs of two text tokens of one turn, which a gate reads.
        turn: LongTensor [B, P], index of the turn of token t in its sequence.
    """

    visual: Tensor
    text: Tensor
    turn: Tensor

    @staticmethod
    def of(visual_BT: Tensor, ends_BT: Tensor, answer_BT: Tensor) -> PairMasks:
        """Returns the masks of the P = T - 1 pairs of complete sequences.

        Args:
            visual_BT: BoolTensor, visual tokens.
            ends_BT: BoolTensor, tokens that end a turn.
            answer_BT: BoolTensor, tokens to predict: the answers in training, the first token of the answer in decoding.
                A pair that predicts one of them is never visual.
        """
        after_end, after_answer = (nn.functional.pad(mask, (1, -1)) for mask in (ends_BT, answer_BT))
        turn_BT = (after_end | (answer_BT & ~after_answer)).long().cumsum(1)
        is_same_turn = turn_BT[:, 1:] == turn_BT[:, :-1]
        predicts_answer = nn.functional.pad(answer_BT, (-2, 1))
        return PairMasks(
            visual=visual_BT[:, :-1] & visual_BT[:, 1:] & ~predicts_answer,
            text=~visual_BT[:, :-1] & ~visual_BT[:, 1:] & is_same_turn,
            turn=turn_BT[:, :-1],
        )

    def first(self, count: int) -> PairMasks:
        """Returns the masks of the first `count` pairs of each sequence."""
        return PairMasks(self.visual[:, :count], self.text[:, :count], self.turn[:, :count])


def ends_of_turn(input_ids: Tensor, end_ids: list[int]) -> Tensor:
    """Returns a BoolTensor like `input_ids`: tokens that end a turn, the target's EOS ids."""
    is_end = torch.zeros_like(input_ids, dtype=torch.bool)
    for end_id in end_ids:  # a tensor of them would have to be copied to the device
        is_end |= input_ids == end_id
    return is_end


class Rows(NamedTuple):
    """Rows that replace the spans. A tuple, because the hooks of ZeRO-3 look for tensors in tuples.

    Attributes:
        states: [S, N, C].
        offset: LongTensor [S, N], the pair of the span, relative to its first, whose position a row has.
        valid: BoolTensor [S, N], False for padding; spans differ in their number of rows.
        weight: [S], factor of the attention values of a span's rows, always 1 in value; it carries the gradient of a gate.
            None if there is no gate to train.
    """

    states: Tensor
    offset: Tensor
    valid: Tensor
    weight: Tensor | None = None


@dataclass
class Spans:
    """The spans of a batch, in reading order.

    Attributes:
        row: LongTensor [S], sequence of the span.
        start: LongTensor [S], first pair.
        length: LongTensor [S], number of pairs.
        inside: BoolTensor [S, L], which of the L pairs from `start` on belong to the span.
    """

    row: Tensor
    start: Tensor
    length: Tensor
    inside: Tensor

    @staticmethod
    def of(visual_BP: Tensor) -> Spans:
        """Returns the spans of a mask of visual pairs."""
        edges = nn.functional.pad(visual_BP, (1, 1))
        row, start = (visual_BP & ~edges[:, :-2]).nonzero(as_tuple=True)
        _, end = (visual_BP & ~edges[:, 2:]).nonzero(as_tuple=True)
        length = end + 1 - start
        longest = int(length.max()) if len(length) else 0
        return Spans(row, start, length, torch.arange(longest, device=row.device) < length[:, None])

    def take(self, states_BPC: Tensor) -> Tensor:
        """Returns the states of the spans [S, L, C], zeros after the end of a span."""
        last = states_BPC.shape[1] - 1
        index_SL = (self.start[:, None] + torch.arange(self.inside.shape[1], device=self.row.device)).clamp(max=last)
        return states_BPC[self.row[:, None], index_SL].masked_fill(~self.inside[..., None], 0)

    def mean_text_state(self, states_BPC: Tensor, pair_masks: PairMasks) -> Tensor:
        """Returns the mean state [S, C] of the text in the turn of each span; zeros if there is none."""
        text_SP = pair_masks.text[self.row] & (pair_masks.turn[self.row] == pair_masks.turn[self.row, self.start][:, None])
        per_row_B = torch.bincount(self.row, minlength=len(states_BPC))
        rank_S = torch.arange(len(self.row), device=self.row.device) - (per_row_B.cumsum(0) - per_row_B)[self.row]
        text_BMP = states_BPC.new_zeros(len(states_BPC), int(per_row_B.max()), states_BPC.shape[1])
        text_BMP[self.row, rank_S] = text_SP.to(states_BPC.dtype)
        return (text_BMP @ states_BPC)[self.row, rank_S] / text_SP.sum(1, keepdim=True).clamp(min=1)


class Layout:
    """Places of the text pairs, and of the `rows` that replace the `spans` of `visual` [B, P], in the compressed sequences."""

    def __init__(self, visual: Tensor, spans: Spans, rows: Rows) -> None:
        count_BP = (~visual).long()
        count_BP[spans.row, spans.start] = rows.valid.sum(1)
        end_BP = count_BP.cumsum(1)
        self.place = end_BP - count_BP
        length = int(end_BP[:, -1].max())
        self._made_span, self._made_row = rows.valid.nonzero(as_tuple=True)
        first_S, nth_SN = self.place[spans.row, spans.start], rows.valid.cumsum(1) - 1
        self._batch = spans.row[self._made_span]
        self._slot = first_S[self._made_span] + nth_SN[self._made_span, self._made_row]
        batch, pair = (~visual).nonzero(as_tuple=True)
        self.source = self.place.new_zeros(len(visual), length)
        self.source[batch, self.place[batch, pair]] = pair
        self.source[self._batch, self._slot] = spans.start[self._made_span] + rows.offset[self._made_span, self._made_row]
        number = torch.arange(visual.shape[1], device=visual.device)
        behind_BP = torch.where(visual, number + 1, 0).cummax(1).values
        self.run_length = (number - behind_BP).gather(1, self.source)

    def shorten(self, states_BPD: Tensor, made_SND: Tensor) -> Tensor:
        """Returns [B, Q, D]: text pairs unchanged, `made_SND` in place of the spans; right-padded with copies of pair 0."""
        batch = torch.arange(len(states_BPD), device=states_BPD.device)[:, None]
        values = made_SND[self._made_span, self._made_row]
        return states_BPD[batch, self.source].index_put((self._batch, self._slot), values)

    def positions(self, position_ids: Tensor) -> Tensor:
        """Returns [B, Q] or [3, B, Q] from [B, P] or [3, B, P]; each is the position of a token of the sequence."""
        return position_ids.gather(-1, self.source.expand(*position_ids.shape[:-1], -1))

    def weights(self, weight_S: Tensor) -> Tensor:
        """Returns [B, Q]: the weight of each span at its rows, 1 elsewhere."""
        return weight_S.new_ones(self.source.shape).index_put((self._batch, self._slot), weight_S[self._made_span])

    def move_mask(self, mask_BP: Tensor) -> Tensor:
        """Maps a mask of text pairs to the compressed sequences, BoolTensor [B, Q]."""
        batch, pair = mask_BP.nonzero(as_tuple=True)
        moved = mask_BP.new_zeros(self.source.shape)
        moved[batch, self.place[batch, pair]] = True
        return moved


@dataclass
class HeadInput:
    """Input of a head's layer for a batch of pair sequences, compressed or not.

    Attributes:
        embeds_next, features: [B, Q, D].
        position_ids: [B, Q] or [3, B, Q].
        weight: [B, Q], see `Rows.weight`.
        layout: mapping from the P pairs; None if nothing was compressed (Q = P).
    """

    embeds_next: Tensor
    features: Tensor
    position_ids: Tensor
    weight: Tensor | None = None
    layout: Layout | None = None

    def move_mask(self, mask_BP: Tensor) -> Tensor:
        """Maps a mask of text pairs to the Q rows, BoolTensor [B, Q]."""
        return mask_BP if self.layout is None else self.layout.move_mask(mask_BP)

    @property
    def run_length(self) -> Tensor | None:
        """LongTensor [B, Q], number of text pairs directly before each row; None if nothing was compressed."""
        return None if self.layout is None else self.layout.run_length
