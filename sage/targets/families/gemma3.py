"""Gemma 3: sliding windows in five layers of six, attention in both directions within an image, a rope for each layer type."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from sage.inputs.format import Inputs
from sage.inputs.video import Size
from sage.targets.family import FULL, Family, Prompt
from sage.targets.rope import RopeConfig


class Gemma3Text(Family):
    """The sizes without images, 270M and 1B. Ref: Gemma 3 technical report, arXiv 2503.19786, section 2."""

    model_types = {"gemma3_text": "Gemma3ForCausalLM"}
    auto_class = AutoModelForCausalLM
    wants_text = True

    def rope(self) -> RopeConfig:
        """The rope of the layers with full attention, which draft heads have too."""
        return RopeConfig.of(self.config.get_text_config().rope_parameters[FULL])


class Gemma3(Gemma3Text):
    """Ref: Gemma 3 technical report, arXiv 2503.19786, section 2.1."""

    model_types = {"gemma3": "Gemma3ForConditionalGeneration"}
    auto_class = AutoModelForImageTextToText
    wants_text = False
    placeholders = {"image": "<start_of_image>"}
    pixel_keys = ("pixel_values",)

    @property
    def slot_texts(self) -> dict[str, str]:
        return {"image": "<image_soft_token>"}

    def image_texts(self, image_processor: Any, sizes: Sequence[Size]) -> list[str]:
        """With pan and scan, crops follow their image."""
        return [self._text(_num_crops(image_processor, size)) for size in sizes]

    def _text(self, num_crops: int) -> str:
        tokens = self.slot_texts["image"] * self.config.mm_tokens_per_image
        image = f"\n\n{self.placeholders['image']}{tokens}<end_of_image>\n\n"
        crops = f"Here is the original image {image} and here are some crops to help you see better "
        return crops + " ".join([image] * num_crops) if num_crops else image

    def token_inputs(self, input_ids: Tensor) -> Inputs:
        return {"token_type_ids": (input_ids == self.slots["image"]).long()}

    def visible(self, prompt: Prompt, past: int) -> Tensor:
        """The tokens of an image attend to one another: a run of slots, delimited by other tokens."""
        return super().visible(prompt, past) | within_images(prompt.visual_mask, past)


def within_images(is_slot: Tensor, past: int) -> Tensor:
    """Returns whether tokens are of the same image, Bool [B, T, past + T], given the slots [B, T]; none of `past` ones are."""
    begins = is_slot & ~nn.functional.pad(is_slot, (1, -1))
    image = begins.cumsum(-1)
    same = (image[:, :, None] == image[:, None]) & is_slot[:, :, None] & is_slot[:, None]
    return nn.functional.pad(same, (past, 0))


def _num_crops(image_processor: Any, size: Size) -> int:
    """Returns the crops of pan and scan, for which the image processor reads the shape of the image only."""
    if not image_processor.do_pan_and_scan:
        return 0
    width, height = size
    names = ("min_crop_size", "max_num_crops", "min_ratio_to_activate")
    settings = {f"pan_and_scan_{name}": getattr(image_processor, f"pan_and_scan_{name}") for name in names}
    return len(image_processor.pan_and_scan(np.broadcast_to(np.uint8(0), (3, height, width)), **settings))
