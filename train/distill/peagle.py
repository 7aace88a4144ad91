"""Training of a P-EAGLE head: drafts of K tokens from random anchors of each sequence, in one pass.

An anchor is a supervised pair, as in decoding, where the target has emitted the second token of the pair. Its rows end with the
turn: a slot never predicts a token of the answer to another question.

Shapes: B batch, P pairs, A anchors, K levels, R rows, D hidden.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Self

import torch
from torch import Tensor

from sage.drafts.options import PEagleOptions
from sage.drafts.peagle import PEagleDraft
from train.config.schema import Config
from train.distill.anchors import Anchors, draw_anchors, gather_chains
from train.distill.objective import DraftOutput, Objective
from train.distill.pairs import Pairs, with_noise
from train.distill.student import HeadStudent


class PEagleStudent(HeadStudent):
    """A P-EAGLE head; `objective.feature_noise` is added to the target's features.

    Attributes:
        keep: share of the anchors that are computed at each level.
    """

    def __init__(self, draft: PEagleDraft, objective: Objective, ratio: float = 1.0, minimum: float = 1.0) -> None:
        super().__init__(draft, objective)
        self.keep = [max(ratio**level, min(1.0, minimum)) for level in range(draft.num_levels)]

    @classmethod
    def of(cls, draft: PEagleDraft, config: Config) -> Self:
        assert isinstance(config.draft, PEagleOptions)
        objective = Objective(replace(config.objective, steps=draft.num_levels))
        ratio, minimum = config.draft.down_sample_ratio, config.draft.down_sample_ratio_min
        return cls(draft.float().train().requires_grad_(True), objective, ratio, minimum)

    def predict(self, pairs: Pairs, target_lm_head: Tensor) -> DraftOutput:
        draft, dtype, config = self.draft, self.draft.dtype, self.objective.config
        fused = draft.fuse(with_noise(pairs.features, config.feature_noise)).to(dtype)
        short = draft.shorten(pairs.embeds_next.to(dtype), fused, pairs.position_ids, pairs.pair_masks)
        mask = short.move_mask(pairs.mask)
        anchors = within_turns(draw_anchors(mask, config.anchors, self.keep), mask)
        inputs = (short.embeds_next, short.features, short.position_ids)
        hidden = draft.roll_out(*inputs, anchors.root_BA, anchors.sizes, short.weight)
        hidden_1ND, rows = gather_chains(hidden, mask, anchors)
        is_valid = torch.ones_like(rows.step_N, dtype=torch.bool)[None]
        return DraftOutput(draft.to_lm_head(hidden_1ND), draft.lm_head_weight(target_lm_head), is_valid, chains=rows)


def within_turns(anchors: Anchors, mask_BP: Tensor) -> Anchors:
    """Returns the anchors with a factor of 0 for rows beyond the supervised run of their root.

    Worked example, K = 3, roots 2 and 4:

        supervised   . . 1 1 1 . 1      two answers
        root 2           k k k          rows of levels 0 1 2
        root 4               k          the turn ends, although pair 6 is supervised again
    """
    (root_BR,) = anchors.per_row(anchors.root_BA)
    place_P = torch.arange(mask_BP.shape[1], device=mask_BP.device)
    gap_BP = torch.where(mask_BP, mask_BP.shape[1], place_P)  # places of unsupervised pairs
    end_BP = gap_BP.flip(1).cummin(1).values.flip(1)  # the first one from each pair on
    is_turn_BR = root_BR + anchors.step_R < end_BP.gather(1, root_BR)
    return replace(anchors, scale_BR=anchors.scale_BR * is_turn_BR)
