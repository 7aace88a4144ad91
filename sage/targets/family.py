"""What differs between target families, behind one small interface.

Owns: placeholders, pixel inputs, the step from inputs to embeddings and rope positions. Does not own: attention, caches,
decoding.
Adding a family is one module with a subclass, one YAML under conf/target and one test.

Shapes: B batch, T tokens, D hidden, N tree nodes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

Inputs = dict[str, Any]


@dataclass
class Prompt:
    """Model inputs after embedding and vision tower, before the text layers; right-padded.

    Attributes:
        input_ids: LongTensor [B, T].
        embeds: [B, T, D], visual embeddings in place.
        position_ids: rope positions, [3, B, T] (M-RoPE) or [B, T].
        next_position: LongTensor [B], rope position of the first token after the prompt.
        attention_mask: LongTensor [B, T], 1 = real token.
        visual_mask: BoolTensor [B, T], True at picture and video positions.
        inputs: what it was made from.
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
        """The prompt without its first `known` tokens."""
        return self.at(torch.arange(known, self.input_ids.shape[1], device=self.input_ids.device)) if known else self

    def at(self, index: Tensor) -> Prompt:
        """The prompt of some of its tokens, `index` LongTensor [T']; positions stay true."""
        return replace(
            self,
            input_ids=self.input_ids[:, index],
            embeds=self.embeds[:, index],
            position_ids=self.position_ids[..., index],
            attention_mask=self.attention_mask[:, index],
            visual_mask=self.visual_mask[:, index],
            kept=None,
        )


class Family(ABC):
    """One vision-language architecture: `Qwen2.5-VL`, `LLaVA-OneVision`."""

    model_type: ClassVar[str]
    image_token: ClassVar[str]
    video_token: ClassVar[str]
    pixel_keys: ClassVar[tuple[str, ...]]

    def __init__(self, config: Any) -> None:
        self.config = config

    # -- pictures in ------------------------------------------------------------------------------------------------

    @abstractmethod
    def pictures(self, image_processor: Any, images: list[Any]) -> tuple[Inputs, list[int]]:
        """Pixel inputs of one conversation's pictures and the number of visual tokens of each."""

    @abstractmethod
    def clips(self, image_processor: Any, videos: list[list[Any]], fps: list[float]) -> tuple[Inputs, list[int]]:
        """Pixel inputs of one conversation's videos (lists of frames) and the number of visual tokens of each.

        Args:
            fps: frames per second of each video, as its frames are here.
        """

    def token_inputs(self, input_ids: Tensor) -> Inputs:
        """Per-token inputs the family needs beside `input_ids` [T]; none by default."""
        return {}

    def stack(self, key: str, values: list[Tensor]) -> Tensor:
        """Joins one pixel input of several examples along the picture axis."""
        return torch.cat(values)

    # -- model ------------------------------------------------------------------------------------------------------

    @abstractmethod
    def visual_features(self, model: nn.Module, inputs: Inputs) -> dict[int, Tensor]:
        """Placeholder id -> visual embeddings [tokens, D] in reading order, for the inputs that are present."""

    @abstractmethod
    def positions(self, model: nn.Module, inputs: Inputs, attention_mask: Tensor) -> tuple[Tensor, Tensor]:
        """Rope positions of the prompt and of the token after it, per sequence [B]."""

    @abstractmethod
    def decode_positions(self, position_N: Tensor) -> Tensor:
        """Positions [N] of generated tokens in the layout the text layers take, batch 1."""

    def embed(self, model: nn.Module, inputs: Inputs, past: Prompt | None = None) -> Prompt:
        """Runs embedding and vision tower once.

        Args:
            past: an earlier prompt of the same conversation; if no picture has come since, its visual embeddings are used.

        Raises:
            ValueError: the number of placeholders and of visual embeddings differ.
        """
        input_ids = inputs["input_ids"]
        attention_mask = inputs.get("attention_mask")
        attention_mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        embeds = model.get_input_embeddings()(input_ids)
        visual_mask = torch.zeros_like(input_ids, dtype=torch.bool)
        visual = past.visual if past and self._has_same_pictures(inputs, past.inputs) else self.visual_features(model, inputs)
        for token_id, features in visual.items():
            mask = input_ids == token_id
            if int(mask.sum()) != len(features):
                raise ValueError(
                    f"inputs: {int(mask.sum())} visual placeholders for {len(features)} visual embeddings; "
                    f"prepare text and pictures together with target.prepare(messages)"
                )
            embeds = embeds.masked_scatter(mask[..., None], features.to(embeds))
            visual_mask |= mask
        position_ids, next_position = self.positions(model, inputs, attention_mask)
        return Prompt(input_ids, embeds, position_ids, next_position, attention_mask, visual_mask, inputs, visual)

    def _has_same_pictures(self, inputs: Inputs, earlier: Inputs) -> bool:
        ours, theirs = ([i.get(key) for key in self.pixel_keys] for i in (inputs, earlier))
        return all(a is b or (a is not None and b is not None and torch.equal(a, b)) for a, b in zip(ours, theirs, strict=True))
