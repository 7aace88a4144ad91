"""What a draft is trained on: whole sequences shifted into pairs.

Owns: which input goes with which wanted feature, which positions are supervised. Does not own: where features come from (the
teacher), the loss.

Index shift, by a sequence of five tokens x0..x4 of which x3 and x4 are the answer (loss_mask 0 0 0 1 1), features f0..f4:

    pair t           predicts   whose lm_head is the law of   supervised
    0 = (f0, e1)     f1         x2                            loss_mask[2] = 0, no
    1 = (f1, e2)     f2         x3                            loss_mask[3] = 1, yes
    2 = (f2, e3)     f3         x4                            loss_mask[4] = 1, yes
    3 = (f3, e4)     f4         x5, not in the sequence       not computed

So T tokens give T - 2 pairs: features[:, :T-2] and embeds[:, 1:T-1] in, features[:, 1:T-1] to match, loss_mask[:, 2:].

Shapes: B batch, T tokens, P = T - 2 pairs, D hidden.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from sage.drafts.compressor.spans import Marks
from sage.targets.target import Features


@dataclass
class Pairs:
    """A micro-batch as a draft sees it, and the features to match.

    Attributes:
        embeds_next: [B, P, D], embedding of token t + 1.
        features: the target's of token t, [B, P, D] each: the last, and the levels the draft asked for.
        position_ids: [B, P] or [3, B, P], rope positions of token t.
        wanted: [B, P, D], the target's last feature of token t + 1.
        mask: BoolTensor [B, P], whether token t + 2 is supervised.
        marks: which pairs are visual, and of which turn: what a compressor goes by.
        inputs: the batch it was made from, for a draft that reads for itself.
    """

    embeds_next: Tensor
    features: Features
    position_ids: Tensor
    wanted: Tensor
    mask: Tensor
    marks: Marks
    inputs: dict[str, Any] = field(default_factory=dict)


def make_pairs(
    embeds: Tensor,
    features: Features,
    position_ids: Tensor,
    loss_mask: Tensor,
    visual_mask: Tensor,
    ends: Tensor,
    inputs: dict[str, Any] | None = None,
) -> Pairs:
    """Shifts whole sequences into pairs (see the table above).

    Args:
        embeds: [B, T, D]; features: of all T tokens; position_ids: [B, T] or [3, B, T]; loss_mask, visual_mask: [B, T].
        ends: BoolTensor [B, T], tokens that end a turn.
    """
    return Pairs(
        embeds_next=embeds[:, 1:-1],
        features=Features(features.last[:, :-2], tuple(level[:, :-2] for level in features.levels)),
        position_ids=position_ids[..., :-2],
        wanted=features.last[:, 1:-1],
        mask=loss_mask[:, 2:].bool(),
        marks=Marks.of(visual_mask, ends, loss_mask.bool()).first(embeds.shape[1] - 2),
        inputs=inputs or {},
    )


def count_supervised(loss_mask: Tensor) -> Tensor:
    """The number of positions `make_pairs` supervises: tokens of the answer that have two tokens before them."""
    return loss_mask[:, 2:].sum()


def with_noise(features: Features, half_width: float) -> Features:
    """Uniform noise in [-half_width, half_width] on the draft's input, against its own errors piling up when drafting.

    Ref: EAGLE, arXiv 2401.15077, section 4.2 (0.1). Draws from torch's generator, so a resumed run draws the same.
    """
    if not half_width:
        return features

    def noisy(states: Tensor) -> Tensor:
        return states + half_width * (2 * torch.rand_like(states) - 1)

    return Features(noisy(features.last), tuple(map(noisy, features.levels)))
