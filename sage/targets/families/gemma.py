"""Gemma 3: sliding windows in five layers of six, attention in both directions within an image, a rope for each layer type.

Gemma 4: heads of two sizes, keys shared between layers, inputs of every layer that are looked up by token, a soft cap of the
logits; images and the frames of videos keep their proportions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from sage.inputs.format import Inputs
from sage.inputs.video import Size, VideoSize
from sage.targets.family import FULL, Family, Prompt, Visual
from sage.targets.rope import RopeConfig

FRAME_TOKENS = 70  # at most, of a frame: the default of transformers' video processor, which needs torchvision


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


class Gemma4Text(Family):
    """Checkpoints of the text model alone. Ref: transformers, models/gemma4."""

    model_types = {"gemma4_text": "Gemma4ForCausalLM"}
    auto_class = AutoModelForCausalLM
    wants_text = True
    template_arguments = {"enable_thinking": False}

    def rope(self) -> RopeConfig:
        """That of layers with full attention, which rotate the first frequencies of a head; draft heads rotate all."""
        return RopeConfig(float(self.config.get_text_config().rope_parameters[FULL]["rope_theta"]))

    def text_ids(self, input_ids: Tensor) -> Tensor:
        """Slots have the embeddings of padding, those of single layers as well."""
        padding = self.config.get_text_config().pad_token_id
        return input_ids.masked_fill(self.visual_mask(input_ids), padding) if self.slots else input_ids

    def inputs_of_tokens(self, text_model: Any, input_ids: Tensor) -> Inputs:
        if not self.config.get_text_config().hidden_size_per_layer_input:
            return {}
        return {"per_layer_inputs": text_model.get_per_layer_inputs(self.text_ids(input_ids), None)}

    @property
    def experts_per_token(self) -> int:
        return self.config.get_text_config().top_k_experts or 0

    def active_parameters(self, model: Any) -> int:
        """Without the table of single layers' inputs, of which a token reads one row."""
        table = getattr(self.text_model(model), "embed_tokens_per_layer", None)
        return super().active_parameters(model) - (0 if table is None else int(table.weight.numel()))

    @property
    def mlp_width(self) -> int:
        """Experts are beside an MLP."""
        text = self.config.get_text_config()
        return int(text.intermediate_size + self.experts_per_token * (text.moe_intermediate_size or 0))


class Gemma4(Gemma4Text):
    """With a vision tower; audio is not read."""

    model_types = {"gemma4": "Gemma4ForConditionalGeneration"}
    auto_class = AutoModelForImageTextToText
    wants_text = False
    placeholders = {"image": "<|image|>", "video": "<|video|>"}
    pixel_keys = ("pixel_values", "image_position_ids", "pixel_values_videos", "video_position_ids", "num_frames_per_video")

    def encode_images(self, image_processor: Any, images: list[Any]) -> Inputs:
        out = image_processor(images=images, return_tensors="pt")
        return {key: out[key] for key in self.pixel_keys[:2]}

    def encode_videos(self, image_processor: Any, videos: list[list[Any]], fps: list[float]) -> Inputs:
        frames = [frame for video in videos for frame in video]
        out = image_processor(images=frames, max_soft_tokens=_frame_tokens(image_processor), return_tensors="pt")
        counts = torch.tensor([len(video) for video in videos])
        values = (out["pixel_values"], out["image_position_ids"], counts)
        return dict(zip(self.pixel_keys[2:], values, strict=True))

    def image_texts(self, image_processor: Any, sizes: Sequence[Size]) -> list[str]:
        most = image_processor.max_soft_tokens
        return [self._text("image", _num_tokens(image_processor, size, most)) for size in sizes]

    def video_texts(self, image_processor: Any, videos: Sequence[VideoSize], fps: list[float]) -> list[str]:
        """Each frame has its own delimiters, after minutes and seconds."""
        texts, most = [], _frame_tokens(image_processor)
        for (frames, *size), rate in zip(videos, fps, strict=True):
            frame = self._text("video", _num_tokens(image_processor, (size[0], size[1]), most))
            seconds = [int(number / rate) for number in range(frames)]
            texts.append(" ".join(f"{second // 60:02d}:{second % 60:02d} {frame}" for second in seconds))
        return texts

    def _text(self, kind: str, count: int) -> str:
        return f"<|image>{self.placeholders[kind] * count}<image|>"

    def token_inputs(self, input_ids: Tensor) -> Inputs:
        kinds = torch.zeros_like(input_ids)
        for number, slot in enumerate(self.slots.values(), 1):
            kinds = kinds.masked_fill(input_ids == slot, number)
        return {"mm_token_type_ids": kinds}

    def visual_features(self, model: Any, inputs: Inputs) -> dict[int, Visual]:
        """The same tower takes images and frames; its output has no padding."""
        features = {}
        for kind, first in (("image", 0), ("video", 2)):
            pixels, places = (inputs.get(key) for key in self.pixel_keys[first : first + 2])
            if pixels is not None and places is not None:  # before transformers 5.20, videos have a dimension of their own
                pixels, places = pixels.flatten(0, -3), places.flatten(0, -3)
                tower = model.model.vision_tower(pixel_values=pixels, pixel_position_ids=places, return_dict=True)
                features[self.slots[kind]] = Visual(model.model.embed_vision(inputs_embeds=tower.last_hidden_state))
        return features

    def visible_in_windows(self, prompt: Prompt, past: int) -> Tensor:
        """Of some sizes, the tokens of an image attend to one another, in these layers alone."""
        visible = self.visible(prompt, past)
        if self.config.get_text_config().use_bidirectional_attention != "vision":
            return visible
        return visible | within_images(prompt.visual_mask, past)


def _frame_tokens(image_processor: Any) -> int:
    return min(FRAME_TOKENS, int(image_processor.max_soft_tokens))


def _num_tokens(image_processor: Any, size: Size, most: int) -> int:
    """Returns the tokens of an image of this size, at most `most`."""
    from transformers.models.gemma4.image_processing_pil_gemma4 import get_aspect_ratio_preserving_size as scaled

    patch, kernel = image_processor.patch_size, image_processor.pooling_kernel_size
    height, width = scaled(size[1], size[0], patch, most * kernel**2, kernel)
    return int(height * width // (patch * kernel) ** 2)
