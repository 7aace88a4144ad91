"""Training examples of a draft: (feature, next token) pairs of complete sequences, and the features to predict.

Index shift for a sequence of five tokens x0..x4 of which x3 and x4 are the answer (loss_mask 0 0 0 1 1), features f0..f4:

    pair t           predicts   lm_head gives the distribution of   supervised
    0 = (f0, e1)     f1         x2                                  loss_mask[2] = 0, no
    1 = (f1, e2)     f2         x3                                  loss_mask[3] = 1, yes
    2 = (f2, e3)     f3         x4                                  loss_mask[4] = 1, yes
    3 = (f3, e4)     f4         x5, not in the sequence             not computed

T tokens give T - 2 pairs: inputs features[:, :T-2] and embeds[:, 1:T-1], targets features[:, 1:T-1], mask loss_mask[:, 2:].

Shapes: B batch, T tokens, P = T - 2 pairs, D hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from sage.drafts.compressor.spans import PairMasks
from sage.targets.target import Features


@dataclass
class Pairs:
    """A micro-batch of draft inputs, and the features to predict.

    Attributes:
        embeds_next: [B, P, D], embedding of token t + 1.
        features: target features of token t, [B, P, D] each: the last one, and the levels that the draft reads.
        position_ids: [B, P] or [3, B, P], rope positions of token t.
        features_next: [B, P, D], last target feature of token t + 1, to be predicted.
        mask: BoolTensor [B, P], whether token t + 2 is supervised.
        pair_masks: visual pairs and turns, for a visual compressor.
        inputs: the micro-batch itself on the device, for a draft that embeds its own inputs.
    """

    embeds_next: Tensor
    features: Features
    position_ids: Tensor
    features_next: Tensor
    mask: Tensor
    pair_masks: PairMasks
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
    """Shifts complete sequences into pairs (see the table above).

    Args:
        embeds: [B, T, D]; `features` of all T tokens; `position_ids` [B, T] or [3, B, T].
        loss_mask, visual_mask, ends: [B, T], supervised tokens, placeholders of images and videos, tokens that end a turn.
    """
    return Pairs(
        embeds_next=embeds[:, 1:-1],
        features=Features(features.last[:, :-2], tuple(level[:, :-2] for level in features.levels)),
        position_ids=position_ids[..., :-2],
        features_next=features.last[:, 1:-1],
        mask=loss_mask[:, 2:].bool(),
        pair_masks=PairMasks.of(visual_mask, ends, loss_mask.bool()).first(embeds.shape[1] - 2),
        inputs=inputs or {},
    )


def count_supervised(loss_mask: Tensor) -> Tensor:
    """Returns the number of supervised pairs: answer tokens with at least two tokens before them."""
    return loss_mask[:, 2:].sum()


def with_noise(features: Features, half_width: float) -> Features:
    """Adds uniform noise in [-half_width, half_width] to the input features, against error accumulation when drafting.

    Draws from torch's global generator, whose state is part of a checkpoint.

    Ref: EAGLE, arXiv 2401.15077, section 4.2 (0.1).
    """
    if not half_width:
        return features

    def noisy(states: Tensor) -> Tensor:
        return states + half_width * (2 * torch.rand_like(states) - 1)

    return Features(noisy(features.last), tuple(map(noisy, features.levels)))
