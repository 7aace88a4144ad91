"""Interface of a target family: visual embeddings, rope positions, and the embedded prompt.

Does not own: placeholders and pixel inputs (sage.inputs.format), attention, caches, decoding.
A new family is a module with a subclass in sage/targets/families, a YAML file in conf/target and a test.

Shapes: B batch, T tokens, D hidden, N tree nodes.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from sage.inputs.format import InputFormat, Inputs

POSITIONS, NEXT_POSITION = "position_ids", "next_position"  # keys of inputs, see `Family.with_positions`


@dataclass
class Prompt:
    """Model inputs after embedding and vision tower, before the text layers; right-padded.

    Attributes:
        input_ids: LongTensor [B, T].
        embeds: [B, T, D], visual embeddings in place.
        position_ids: rope positions, [3, B, T] (M-RoPE) or [B, T].
        next_position: LongTensor [B], rope position of the first token after the prompt.
        attention_mask: LongTensor [B, T], 1 = real token.
        visual_mask: BoolTensor [B, T], True at image and video positions.
        inputs: the model inputs it was embedded from.
        visual: placeholder id -> visual embeddings [tokens, D].
        kept: LongTensor [T'], the tokens a draft reads; None = all.
    """

    input_ids: Tensor
    embeds: Tensor
    position_ids: Tensor
    next_position: Tensor
    attention_mask: Tensor
    visual_mask: Tensor
    inputs: Inputs = field(default_factory=dict)
    visual: dict[int, Tensor] = field(default_factory=dict)
    kept: Tensor | None = None

    def after(self, known: int) -> Prompt:
        """Returns the prompt without its first `known` tokens."""
        return self.at(torch.arange(known, self.input_ids.shape[1], device=self.input_ids.device)) if known else self

    def without_embeddings(self) -> Prompt:
        """Returns ids, positions and masks alone, which is what decoding reads after the prefill."""
        return replace(self, embeds=self.embeds.new_empty(1, 0, self.embeds.shape[-1]), inputs={}, visual={})

    def at(self, index: Tensor) -> Prompt:
        """Returns the prompt reduced to some of its tokens, `index` LongTensor [T']; positions are kept."""
        return replace(
            self,
            input_ids=self.input_ids[:, index],
            embeds=self.embeds[:, index],
            position_ids=self.position_ids[..., index],
            attention_mask=self.attention_mask[:, index],
            visual_mask=self.visual_mask[:, index],
            kept=None,
        )


class Family(InputFormat):
    """One vision-language architecture, such as Qwen2.5-VL: its input format, and the step from inputs to the text layers."""

    @abstractmethod
    def visual_features(self, model: nn.Module, inputs: Inputs) -> dict[int, Tensor]:
        """Returns placeholder id -> visual embeddings [tokens, D] in reading order, for the pixel inputs that are present."""

    @abstractmethod
    def positions(self, model: nn.Module, inputs: Inputs, attention_mask: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the rope positions of the prompt, [3, B, T] or [B, T], and of the token after it, [B]."""

    @abstractmethod
    def decode_positions(self, position_N: Tensor) -> Tensor:
        """Returns positions [N] of generated tokens in the layout of the text layers, batch 1."""

    has_windows = False  # whether the vision tower attends within windows of a packed sequence

    def optimize(self, model: nn.Module) -> None:
        """Replaces slow modules of a loaded model by equivalent ones, with the same weights under the same names."""

    def with_positions(self, model: nn.Module, inputs: Inputs) -> Inputs:
        """Returns the inputs with their rope positions, for `embed`.

        `positions` reads the grids of images and videos number by number. For inputs on the CPU, this does not wait for the GPU
        that they are moved to.
        """
        if NEXT_POSITION in inputs:
            return inputs
        try:
            position_ids, next_position = self.positions(model, inputs, _attention_mask(inputs))
        except (IndexError, StopIteration):  # fewer images than the text has; `embed` names the mistake
            return inputs
        return {**inputs, POSITIONS: position_ids, NEXT_POSITION: next_position}

    def embed(self, model: nn.Module, inputs: Inputs, past: Prompt | None = None) -> Prompt:
        """Runs embedding and vision tower once.

        Args:
            past: an earlier prompt of the same conversation, whose visual embeddings are reused if the pixel inputs are equal.

        Raises:
            ValueError: the numbers of placeholders and of visual embeddings differ.
        """
        given, inputs = inputs, without_positions(inputs)
        input_ids, attention_mask = inputs["input_ids"], _attention_mask(inputs)
        embeds = model.get_input_embeddings()(input_ids)
        visual_mask = torch.zeros_like(input_ids, dtype=torch.bool)
        visual = past.visual if past and self._has_same_pixels(inputs, past.inputs) else self.visual_features(model, inputs)
        for token_id, features in visual.items():
            mask = input_ids == token_id
            if int(mask.sum()) != len(features):
                raise ValueError(
                    f"inputs: {int(mask.sum())} visual placeholders for {len(features)} visual embeddings; "
                    f"prepare text and images together with target.prepare(messages)"
                )
            embeds = embeds.masked_scatter(mask[..., None], features.to(embeds))
            visual_mask |= mask
        placed = self.with_positions(model, given)
        position_ids, next_position = placed[POSITIONS], placed[NEXT_POSITION]
        return Prompt(input_ids, embeds, position_ids, next_position, attention_mask, visual_mask, inputs, visual)

    def _has_same_pixels(self, inputs: Inputs, earlier: Inputs) -> bool:
        ours, theirs = ([i.get(key) for key in self.pixel_keys] for i in (inputs, earlier))
        return all(a is b or (a is not None and b is not None and torch.equal(a, b)) for a, b in zip(ours, theirs, strict=True))


def without_positions(inputs: Inputs) -> Inputs:
    """Returns the inputs as they were before `Family.with_positions`; another model computes its own positions."""
    return {key: value for key, value in inputs.items() if key not in (POSITIONS, NEXT_POSITION)}


def _attention_mask(inputs: Inputs) -> Tensor:
    mask = inputs.get("attention_mask")
    return torch.ones_like(inputs["input_ids"]) if mask is None else mask
