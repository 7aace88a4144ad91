"""Training of a head with slots: drafts of K tokens from random anchors of each sequence, in one pass.

An anchor is a supervised pair, as in decoding, where the target has emitted the second token of the pair. Anchor pair t is
(feature of token t, embedding of token t + 1); level k of its block predicts token t + 2 + k, the label of pair t + k. Rows end
with the turn: a slot never predicts a token of the answer to another question. Worked example for one sequence, K = 3:

    pair         0 1 2 3 4 5 6
    supervised   . . 1 1 1 . 1      two answers
    anchor 2         k k k          rows of levels 0 1 2 at pairs 2 3 4
    anchor 4             k          the turn ends: no rows of levels 1 and 2, although pair 6 is supervised again

Shapes: B batch, P pairs, A anchors, K levels, R rows of all levels, N rows, D hidden, r rank of the conditional.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Self

import torch
from torch import Tensor

from sage.drafts.options import BlockOptions, PEagleOptions
from sage.drafts.slots import SlotHead
from sage.drafts.unroll import at_rows
from train.config.schema import Config
from train.distill.anchors import Anchors, draw_anchors, gather_chains, within_turns
from train.distill.objective import DraftOutput, Objective
from train.distill.pairs import Pairs, with_noise
from train.distill.student import HeadStudent


class SlotStudent(HeadStudent):
    """A head with slots; `objective.feature_noise` is added to the target's features.

    Args:
        keep: share of the anchors whose blocks have each level.
    """

    def __init__(self, draft: SlotHead, objective: Objective, keep: Sequence[float]) -> None:
        super().__init__(draft, objective)
        self.keep = keep

    @classmethod
    def of(cls, draft: SlotHead, config: Config) -> Self:
        assert isinstance(config.draft, BlockOptions | PEagleOptions)
        objective = Objective(replace(config.objective, steps=draft.num_levels))
        return cls(draft.float().train().requires_grad_(True), objective, config.draft.kept_shares(draft.num_levels))

    def predict(self, pairs: Pairs, target_lm_head: Tensor) -> DraftOutput:
        draft, dtype, config = self.draft, self.draft.dtype, self.objective.config
        fused = draft.fuse(with_noise(pairs.features, config.feature_noise)).to(dtype)
        short = draft.shorten(pairs.embeds_next.to(dtype), fused, pairs.position_ids, pairs.pair_masks)
        mask = short.move_mask(pairs.mask)
        anchors = within_turns(draw_anchors(mask, config.anchors, self.keep), mask)
        inputs = (short.embeds_next, short.features, short.position_ids)
        hidden_BRD = draft.roll_out(*inputs, anchors.root_BA, anchors.sizes, short.weight)
        state_BRX = hidden_BRD[..., :0]
        if draft.markov_head is not None:
            state_BRX = draft.markov_head(last_tokens(pairs.inputs["input_ids"], anchors))
        if draft.path_head is not None:
            state_BRX = draft.path_head(*last_embeds(pairs.embeds_next.to(dtype), anchors), hidden_BRD)
            hidden_BRD = hidden_BRD + draft.path_head.out(state_BRX)
        both_NX, rows = gather_chains(torch.cat((hidden_BRD, state_BRX), -1), mask, anchors)
        hidden_ND, state_NX = both_NX.split((hidden_BRD.shape[-1], state_BRX.shape[-1]), -1)
        correction = None if draft.markov_head is None else (state_NX, draft.markov_head.markov_w2.weight)
        confidence = None if draft.confidence_head is None else draft.confidence_head(both_NX.detach())
        weight = draft.lm_head_weight(target_lm_head)
        return DraftOutput(draft.to_lm_head(hidden_ND), weight, rows, correction=correction, confidence=confidence)


def last_tokens(input_ids: Tensor, anchors: Anchors) -> Tensor:
    """Returns the token before the predicted one of every row, LongTensor [B, R]."""
    (root_BR,) = anchors.per_row(anchors.root_BA)
    return input_ids.gather(1, (root_BR + anchors.step_R + 1).clamp(max=input_ids.shape[1] - 1))


def last_embeds(embeds_next: Tensor, anchors: Anchors) -> tuple[Tensor, Tensor]:
    """Returns the embeddings of the token before the predicted one, and of the one before that, of every row, [B, R, D] each.

    The first token of a sequence has no embedding among the pairs; the second one stands for it.
    """
    (root_BR,) = anchors.per_row(anchors.root_BA)
    last_BR = (root_BR + anchors.step_R).clamp(max=embeds_next.shape[1] - 1)
    return at_rows(embeds_next, last_BR, 1), at_rows(embeds_next, (last_BR - 1).clamp(min=0), 1)
