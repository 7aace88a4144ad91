"""The frozen target as a teacher: features of whole conversations, in the same step that trains the draft.

Owns: what of the target's forward pass becomes the draft's input. Does not own: the loss.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sage import Target
from train.objective import Pairs, make_pairs


class Teacher:
    """A target, whole on this rank.

    Args:
        target: frozen, on the device.
        image_inputs: `embed` gives the draft the visual embeddings, `token` those of the placeholder token.
    """

    def __init__(self, target: Target, image_inputs: str) -> None:
        if getattr(target.lm_head, "bias", None) is not None:
            raise ValueError(f"target: {target.name} has an lm_head with a bias, which no known family has")
        self.target = target
        self.image_inputs = image_inputs

    @property
    def lm_head(self) -> Tensor:
        """[V, D], frozen."""
        weight: Tensor = self.target.lm_head.weight
        return weight

    @torch.no_grad()
    def __call__(self, batch: dict[str, Any]) -> Pairs:
        """One micro-batch (see `data_prep.loader`) -> what the draft sees and has to predict."""
        prompt = self.target.embed(batch)
        features = self.target.features(prompt).last
        embeds = prompt.embeds if self.image_inputs == "embed" else self.target.embed_tokens(prompt.input_ids)
        return make_pairs(embeds, features, prompt.position_ids, batch["loss_mask"].to(features.device))
