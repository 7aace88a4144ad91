"""The frozen target as a teacher: its features of complete conversations, computed in the step that trains the draft.

Shapes: D hidden size, U draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from sage import Target
from sage.drafts.compressor.spans import ends_of_turn
from sage.targets.family import Prompt
from train.distill.compiled_layers import CompiledLayers
from train.distill.pairs import Pairs, make_pairs


class Teacher:
    """Turns micro-batches into `Pairs`.

    Args:
        target: frozen, on the device of this rank.
        image_inputs: embedding of visual positions in the draft's input; `embed` takes the visual embedding, `token` that of
            the placeholder token.
        levels: indices k of hidden_states[k] that the draft reads beside the last feature.
        token_map: LongTensor [U], target ids of the draft vocabulary; None = the target's vocabulary.
        layers: of the target, compiled for its passes; None for none.

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
        self.target = target
        self.image_inputs = image_inputs
        self.levels = tuple(levels)
        self.layers = layers or CompiledLayers()
        weight: Tensor = target.lm_head.weight
        self.lm_head = weight if token_map is None else weight[token_map.to(weight.device)]

    def __call__(self, batch: dict[str, Any]) -> Pairs:
        """Runs the target on a micro-batch (see `data_prep.batching.loader`) and returns its pairs."""
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
        moved = prompt.inputs
        ends = ends_of_turn(prompt.input_ids, self.target.eos_token_ids)
        return make_pairs(embeds, features, prompt.position_ids, moved["loss_mask"], prompt.visual_mask, ends, moved)
