"""LLaVA-1.5: one tile per image, plain rope positions, and Vicuna's chat template with the token that ends an answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from sage.inputs.format import Inputs
from sage.inputs.video import Size
from sage.targets.family import Family

CLASS_TOKENS = {"clip_vision_model": 1, "siglip_vision_model": 0}  # vision tower -> tokens in front of the patches
VICUNA = (
    "{% for message in messages %}{% if message.role != 'system' %}{{ message.role.upper() + ': ' }}{% endif %}"
    "{% for part in message.content if part.type == 'image' %}{{ '<image>\\n' }}{% endfor %}"
    "{{ message.content | selectattr('type', 'equalto', 'text') | map(attribute='text') | join(' ') }}"
    "{{ eos_token if message.role == 'assistant' else ' ' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
)


class Llava(Family):
    """Ref: Improved Baselines with Visual Instruction Tuning, arXiv 2310.03744, section 3."""

    model_types = {"llava": "LlavaForConditionalGeneration"}
    placeholders = {"image": "<image>"}
    served_by: ClassVar[tuple[str, ...]] = ("vLLM",)
    pixel_keys: ClassVar[tuple[str, ...]] = ("pixel_values",)
    vision_types = tuple(CLASS_TOKENS)

    def chat_template(self, stock: str | None) -> str | None:
        """Returns `VICUNA` in place of the published template of Vicuna, in which nothing ends an answer."""
        if stock is None or "ASSISTANT:" not in stock or "eos_token" in stock or "</s>" in stock:
            return stock
        return VICUNA

    def encode_images(self, image_processor: Any, images: list[Any]) -> tuple[Inputs, list[str]]:
        pixels = image_processor(images=images, return_tensors="pt")["pixel_values"]
        count = self._tile_tokens(*pixels.shape[-2:])
        return {"pixel_values": pixels}, [self.placeholders["image"] * count] * len(images)

    def image_texts(self, image_processor: Any, sizes: Sequence[Size]) -> list[str] | None:
        tile = tile_size(image_processor)
        return None if tile is None else [self.placeholders["image"] * self._tile_tokens(*tile)] * len(sizes)

    def _tile_tokens(self, height: int, width: int) -> int:
        """Visual tokens of a tile in pixels; the strategy "default" drops the first token of the vision tower."""
        vision = self.config.vision_config
        dropped = self.config.vision_feature_select_strategy == "default"
        return (height // vision.patch_size) * (width // vision.patch_size) + CLASS_TOKENS[vision.model_type] - dropped


def tile_size(image_processor: Any) -> tuple[int, int] | None:
    """Returns height and width in pixels of every tile that an image processor yields; None if they depend on the image."""
    if image_processor.do_center_crop:
        size = image_processor.crop_size
    elif image_processor.do_resize:
        size = image_processor.size
    else:
        return None
    height, width = size.get("height"), size.get("width")
    return (int(height), int(width)) if height and width else None
