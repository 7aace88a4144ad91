"""The frozen target as a teacher: micro-batches staged in the loader's thread, and the pairs it makes of them.

A draft is trained on (feature, next token) pairs of complete sequences. Index shift for a sequence of five tokens x0..x4, of
which x3 and x4 are the answer (loss_mask 0 0 0 1 1), with features f0..f4:

    pair t           predicts   lm_head gives the distribution of   supervised
    0 = (f0, e1)     f1         x2                                  loss_mask[2] = 0, no
    1 = (f1, e2)     f2         x3                                  loss_mask[3] = 1, yes
    2 = (f2, e3)     f3         x4                                  loss_mask[4] = 1, yes
    3 = (f3, e4)     f4         x5, not in the sequence             not computed

T tokens give T - 2 pairs: inputs features[:, :T-2] and embeds[:, 1:T-1], targets features[:, 1:T-1], mask loss_mask[:, 2:].

Shapes: B batch, T tokens, P = T - 2 pairs, D hidden size, U draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from sage import Target
from sage.drafts.spans import PairMasks, ends_of_turn
from sage.targets.family import Prompt
from sage.targets.target import Features
from train.distill.compiled_layers import CompiledLayers


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
        logit_cap: soft cap of the target's logits; drafts with its lm_head learn the capped distribution without one.
    """

    embeds_next: Tensor
    features: Features
    position_ids: Tensor
    features_next: Tensor
    mask: Tensor
    pair_masks: PairMasks
    inputs: dict[str, Any] = field(default_factory=dict)
    logit_cap: float | None = None


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

    Ref: EAGLE, arXiv 2401.15077, section 4.2 (0.1).
    """
    if not half_width:
        return features

    def noisy(states: Tensor) -> Tensor:
        return states + half_width * (2 * torch.rand_like(states) - 1)

    return Features(noisy(features.last), tuple(map(noisy, features.levels)))


PIXELS = "pixel_values"  # prefix of the inputs that hold pixels; others, such as the seconds per grid, keep their dtype


@dataclass(frozen=True)
class Staging:
    """Adds rope positions, converts pixels to `dtype`, and for a GPU copies all tensors to pinned memory.

    Models convert pixels to their own dtype first, so that nothing is lost as long as `dtype` is not narrower than theirs. The
    host does not wait for a copy from pinned memory.

    `dtype` is the wider one of target and draft.
    """

    target: Target
    device: torch.device
    dtype: torch.dtype

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        placed = self.target.family.with_positions(self.target.model, batch)
        staged = {key: value.to(self.dtype) if key.startswith(PIXELS) else value for key, value in placed.items()}
        if self.device.type == "cpu":
            return staged
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)  # of this thread; pinning would create a context on another GPU
        return {key: value.pin_memory() if isinstance(value, Tensor) else value for key, value in staged.items()}


class Teacher:
    """Turns micro-batches into `Pairs`.

    Args:
        target: frozen, on the device of this rank.
        image_inputs: as of `HeadOptions`.
        levels, token_map: as of a `Draft`.
        layers: of the target, compiled for its passes.

    Attributes:
        lm_head: [U, D], frozen lm_head rows of the draft vocabulary.

    Raises:
        ValueError: the lm_head of the target has a bias.
    """

    def __init__(
        self,
        target: Target,
        image_inputs: str = "embed",
        levels: Sequence[int] = (),
        token_map: Tensor | None = None,
        layers: CompiledLayers | None = None,
    ) -> None:
        if getattr(target.lm_head, "bias", None) is not None:
            raise ValueError(f"target: {target.name} has an lm_head with a bias, which is not supported")
        self.target, self.image_inputs, self.levels = target, image_inputs, tuple(levels)
        self.layers = layers or CompiledLayers()
        weight: Tensor = target.lm_head_weight
        self.lm_head = weight if token_map is None else weight[token_map.to(weight.device)]

    def __call__(self, batch: dict[str, Any]) -> Pairs:
        """Runs the target on a micro-batch (see `data_prep.loader`) and returns its pairs."""
        return self.pairs(self.embed(batch))

    def embed(self, batch: dict[str, Any]) -> Prompt:
        """Runs embedding and vision tower on a micro-batch."""
        with self.layers.installed():
            return self.target.embed(batch)

    @torch.no_grad()
    def pairs(self, prompt: Prompt) -> Pairs:
        """Runs the text layers on an embedded micro-batch and returns its pairs."""
        with self.layers.installed():
            features = self.target.features(prompt, self.levels)
        embeds = prompt.embeds if self.image_inputs == "embed" else self.target.embed_tokens(prompt.input_ids)
        ends, loss_mask = ends_of_turn(prompt.input_ids, self.target.eos_token_ids), prompt.inputs["loss_mask"]
        pairs = make_pairs(embeds, features, prompt.position_ids, loss_mask, prompt.visual_mask, ends, prompt.inputs)
        return replace(pairs, logit_cap=self.target.logit_cap)
