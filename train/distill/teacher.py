"""The frozen target as a teacher: features of whole conversations, in the same step that trains the draft.

Owns: what of the target's forward pass becomes the draft's input. Does not own: the loss.

Shapes: D hidden, V the target's vocabulary, U words the draft may say.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from sage import Target
from sage.drafts.compressor.spans import ends_of_turn
from train.distill.pairs import Pairs, make_pairs


class Teacher:
    """A target, whole on this rank.

    Args:
        target: frozen, on the device.
        image_inputs: `embed` gives the draft the visual embeddings, `token` those of the placeholder token.
        levels: indices k of the target's hidden_states[k] the draft reads beside the last feature.
        token_map: LongTensor [U], the words the draft may say; None = all.
    """

    def __init__(
        self, target: Target, image_inputs: str = "embed", levels: Sequence[int] = (), token_map: Tensor | None = None
    ) -> None:
        if getattr(target.lm_head, "bias", None) is not None:
            raise ValueError(f"target: {target.name} has an lm_head with a bias, which no known family has")
        self.target = target
        self.image_inputs = image_inputs
        self.levels = tuple(levels)
        weight: Tensor = target.lm_head.weight
        self._lm_head = weight if token_map is None else weight[token_map.to(weight.device)]

    @property
    def lm_head(self) -> Tensor:
        """[U, D], frozen: the rows of the words the draft may say."""
        return self._lm_head

    @torch.no_grad()
    def __call__(self, batch: dict[str, Any]) -> Pairs:
        """One micro-batch (see `data_prep.batching.loader`) -> what the draft sees and has to predict."""
        prompt = self.target.embed(batch)
        features = self.target.features(prompt, self.levels)
        embeds = prompt.embeds if self.image_inputs == "embed" else self.target.embed_tokens(prompt.input_ids)
        loss_mask = batch["loss_mask"].to(features.last.device)
        ends = ends_of_turn(prompt.input_ids, self.target.eos_token_ids)
        return make_pairs(embeds, features, prompt.position_ids, loss_mask, prompt.visual_mask, ends, batch)
