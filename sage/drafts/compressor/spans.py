"""What the pairs of a batch are, where its pictures lie among them, and the way from there to shorter sequences.

A pair t is (feature of token t, embedding of token t + 1). It is visual if both tokens are; so the last pair of a picture,
which brings in the first word after it, is text and stays. A span is a contiguous run of visual pairs: one picture or clip, or
some that touch. Worked example, a picture v1..v5 whose span of four pairs two rows `a b` stand for (their `at`, the pairs whose
positions they take, is 0 and 2):

    tokens     t0 v1 v2 v3 v4 v5 t6 t7
    pairs      t0 v1 v2 v3 v4 v5 t6          v5 = (feature of v5, embedding of t6)
    visual     0  1  1  1  1  0  0
    place      0  1  .  .  .  3  4           where a pair of text goes
    shorter    t0 a  b  v5 t6
    source     0  1  3  5  6                 the pair whose rope position each row keeps
    run        0  .  .  0  1                 pairs of text right before it, back to a picture or the beginning

Shapes: B batch, T tokens, P pairs, Q rows of the shorter sequences, S spans of the whole batch, L longest span, N rows per
span, M most spans of a sequence, C channels, D hidden.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass
class PairMasks:
    """What the pairs of a batch are.

    Attributes:
        visual: BoolTensor [B, P], pairs of two visual tokens: what a compressor shortens.
        text: BoolTensor [B, P], pairs of two text tokens of one turn: what a gate may read.
        turn: LongTensor [B, P], the turn token t is in, counted along the sequence.
    """

    visual: Tensor
    text: Tensor
    turn: Tensor

    @staticmethod
    def of(visual_BT: Tensor, ends_BT: Tensor, answer_BT: Tensor) -> PairMasks:
        """PairMasks of the P = T - 1 pairs of whole sequences.

        Args:
            visual_BT: BoolTensor, visual tokens.
            ends_BT: BoolTensor, tokens that end a turn.
            answer_BT: BoolTensor, tokens to be predicted: in training those of the answers, in decoding the first token of one.
                A pair that predicts one is never visual.
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
        """Those of each sequence's first `count` pairs."""
        return PairMasks(self.visual[:, :count], self.text[:, :count], self.turn[:, :count])


def ends_of_turn(input_ids: Tensor, end_ids: list[int]) -> Tensor:
    """BoolTensor like `input_ids`: tokens that end a turn, those an answer may end with."""
    return torch.isin(input_ids, torch.tensor(end_ids, device=input_ids.device, dtype=input_ids.dtype))


@dataclass
class Rows:
    """What stands for the spans.

    Attributes:
        states: [S, N, C].
        at: LongTensor [S, N], the pair of the span, counted from its first, whose position a row takes.
        valid: BoolTensor [S, N], rows that exist; spans differ in length.
        weight: [S], how much a span's rows count when they are attended to, always 1 in value: a gate's gradient comes
            through it. None where no gate is trained.
    """

    states: Tensor
    at: Tensor
    valid: Tensor
    weight: Tensor | None = None

    @staticmethod
    def join(parts: list[Rows]) -> Rows:
        """All rows of all parts, in that order."""
        return Rows(
            torch.cat([part.states for part in parts], 1),
            torch.cat([part.at for part in parts], 1),
            torch.cat([part.valid for part in parts], 1),
        )

    def padded(self, count: int) -> Rows:
        """With `count` rows per span, the additional ones invalid."""
        more = count - self.at.shape[1]
        pad = nn.functional.pad
        return Rows(pad(self.states, (0, 0, 0, more)), pad(self.at, (0, more)), pad(self.valid, (0, more)), self.weight)


@dataclass
class Spans:
    """The spans of a batch, in reading order.

    Attributes:
        row: LongTensor [S], the sequence a span lies in.
        start: LongTensor [S], its first pair.
        length: LongTensor [S], its pairs.
        inside: BoolTensor [S, L], which of L pairs from its start on are its own.
    """

    row: Tensor
    start: Tensor
    length: Tensor
    inside: Tensor

    @staticmethod
    def of(visual_BP: Tensor) -> Spans:
        """Those of a mask."""
        edges = nn.functional.pad(visual_BP, (1, 1))
        row, start = (visual_BP & ~edges[:, :-2]).nonzero(as_tuple=True)
        _, end = (visual_BP & ~edges[:, 2:]).nonzero(as_tuple=True)
        length = end + 1 - start
        longest = int(length.max()) if len(length) else 0
        return Spans(row, start, length, torch.arange(longest, device=row.device) < length[:, None])

    def take(self, states_BPC: Tensor) -> Tensor:
        """[S, L, C], the spans' own states, zeros behind a span's end."""
        last = states_BPC.shape[1] - 1
        index_SL = (self.start[:, None] + torch.arange(self.inside.shape[1], device=self.row.device)).clamp(max=last)
        return states_BPC[self.row[:, None], index_SL].masked_fill(~self.inside[..., None], 0)

    def question(self, states_BPC: Tensor, pair_masks: PairMasks) -> Tensor:
        """[S, C], the mean state of the text of the turn each span is in; zeros where there is none."""
        asked_SP = pair_masks.text[self.row] & (pair_masks.turn[self.row] == pair_masks.turn[self.row, self.start][:, None])
        per_row_B = torch.bincount(self.row, minlength=len(states_BPC))
        rank_S = torch.arange(len(self.row), device=self.row.device) - (per_row_B.cumsum(0) - per_row_B)[self.row]
        asked_BMP = states_BPC.new_zeros(len(states_BPC), int(per_row_B.max()), states_BPC.shape[1])
        asked_BMP[self.row, rank_S] = asked_SP.to(states_BPC.dtype)
        return (asked_BMP @ states_BPC)[self.row, rank_S] / asked_SP.sum(1, keepdim=True).clamp(min=1)


class Layout:
    """Where every pair of text, and every row that stands for a span, is in the shorter sequences.

    Args:
        visual: BoolTensor [B, P].
        spans: of it.
        rows: what stands for them.
    """

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
        self.source[self._batch, self._slot] = spans.start[self._made_span] + rows.at[self._made_span, self._made_row]
        number = torch.arange(visual.shape[1], device=visual.device)
        behind_BP = torch.where(visual, number + 1, 0).cummax(1).values
        self.run = (number - behind_BP).gather(1, self.source)

    def shorten(self, states_BPD: Tensor, made_SND: Tensor) -> Tensor:
        """[B, Q, D]: text as it was, `made_SND` in place of the spans; right-padded with copies of a first pair."""
        batch = torch.arange(len(states_BPD), device=states_BPD.device)[:, None]
        values = made_SND[self._made_span, self._made_row]
        return states_BPD[batch, self.source].index_put((self._batch, self._slot), values)

    def positions(self, position_ids: Tensor) -> Tensor:
        """[B, Q] or [3, B, Q] from [B, P] or [3, B, P]; every one is a true position of a token of the prompt."""
        return position_ids.gather(-1, self.source.expand(*position_ids.shape[:-1], -1))

    def weights(self, weight_S: Tensor) -> Tensor:
        """[B, Q]: each span's weight at its rows, 1 elsewhere."""
        return weight_S.new_ones(self.source.shape).index_put((self._batch, self._slot), weight_S[self._made_span])

    def move(self, mask_BP: Tensor) -> Tensor:
        """BoolTensor [B, Q]: a mask of pairs of text where they have gone, in the same order."""
        batch, pair = mask_BP.nonzero(as_tuple=True)
        moved = mask_BP.new_zeros(self.source.shape)
        moved[batch, self.place[batch, pair]] = True
        return moved


@dataclass
class Shortened:
    """What a head reads of a batch of pair sequences.

    Attributes:
        embeds_next, features: [B, Q, D].
        position_ids: [B, Q] or [3, B, Q].
        weight: [B, Q], see `Rows.weight`; None for none.
        layout: where everything went; None if nothing moved (Q = P).
    """

    embeds_next: Tensor
    features: Tensor
    position_ids: Tensor
    weight: Tensor | None = None
    layout: Layout | None = None

    def move(self, mask_BP: Tensor) -> Tensor:
        """[B, Q], a mask of pairs of text."""
        return mask_BP if self.layout is None else self.layout.move(mask_BP)

    @property
    def run(self) -> Tensor | None:
        """LongTensor [B, Q], how many pairs of text lie right before; None if nothing moved."""
        return None if self.layout is None else self.layout.run
