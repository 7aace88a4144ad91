"""Training of a P-EAGLE head: drafts of K tokens from random anchors of each sequence, in one pass.

An anchor is a supervised pair, as in decoding, where the target has emitted the second token of the pair. Its rows end with the
turn: a slot never predicts a token of the answer to another question.

Shapes: B batch, P pairs, A anchors, K levels, R rows, D hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Self

from torch import Tensor

from sage.drafts.options import PEagleOptions
from sage.drafts.peagle import PEagleDraft
from train.config.schema import Config
from train.distill.anchors import draw_anchors, gather_chains, within_turns
from train.distill.objective import DraftOutput, Objective
from train.distill.pairs import Pairs, with_noise
from train.distill.student import HeadStudent


class PEagleStudent(HeadStudent):
    """A P-EAGLE head; `objective.feature_noise` is added to the target's features.

    Args:
        keep: share of the anchors that are computed at each level.
    """

    def __init__(self, draft: PEagleDraft, objective: Objective, keep: Sequence[float]) -> None:
        super().__init__(draft, objective)
        self.keep = keep

    @classmethod
    def of(cls, draft: PEagleDraft, config: Config) -> Self:
        assert isinstance(config.draft, PEagleOptions)
        objective = Objective(replace(config.objective, steps=draft.num_levels))
        return cls(draft.float().train().requires_grad_(True), objective, config.draft.kept_shares(draft.num_levels))

    def predict(self, pairs: Pairs, target_lm_head: Tensor) -> DraftOutput:
        draft, dtype, config = self.draft, self.draft.dtype, self.objective.config
        fused = draft.fuse(with_noise(pairs.features, config.feature_noise)).to(dtype)
        short = draft.shorten(pairs.embeds_next.to(dtype), fused, pairs.position_ids, pairs.pair_masks)
        mask = short.move_mask(pairs.mask)
        anchors = within_turns(draw_anchors(mask, config.anchors, self.keep), mask)
        inputs = (short.embeds_next, short.features, short.position_ids)
        hidden = draft.roll_out(*inputs, anchors.root_BA, anchors.sizes, short.weight)
        hidden_ND, rows = gather_chains(hidden, mask, anchors)
        return DraftOutput(draft.to_lm_head(hidden_ND), draft.lm_head_weight(target_lm_head), rows)
