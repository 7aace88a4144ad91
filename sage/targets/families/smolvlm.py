"""Idefics3 and SmolVLM: an image is cut into tiles, whose rows and columns are in the text; Llama text layers, plain rope."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from sage.inputs.format import Inputs, pad_second
from sage.inputs.video import Size, VideoSize
from sage.targets.family import Family

MAX_SIDE = 4096  # pixels, of a resized image
AROUND, COMPLETE = "<fake_token_around_image>", "<global-img>"  # before every tile and at the end; the image in one tile


class Idefics3(Family):
    """Ref: Building and better understanding vision-language models, arXiv 2408.12637, section 3.1."""

    model_types = {"idefics3": "Idefics3ForConditionalGeneration"}
    placeholders = {"image": "<image>"}
    served_by = ("vLLM",)
    needs_plugin = True
    pixel_keys = ("pixel_values", "pixel_attention_mask")

    def encode_images(self, image_processor: Any, images: list[Any]) -> Inputs:
        return super().encode_images(image_processor, [images])

    def image_texts(self, image_processor: Any, sizes: Sequence[Size]) -> list[str]:
        return [self._text(*_rows_and_columns(image_processor, size)) for size in sizes]

    def _text(self, rows: int, columns: int) -> str:
        """Returns the text of an image of rows x columns tiles and the complete image; with 0 x 0 tiles, of the latter only."""
        lines = []
        for row in range(1, rows + 1):
            lines.append("".join(self._tile(f"<row_{row}_col_{column}>") for column in range(1, columns + 1)) + "\n")
        return "".join(lines) + "\n" * (rows > 0) + self._tile(COMPLETE) + AROUND

    def _tile(self, name: str) -> str:
        vision = self.config.vision_config
        tokens = (vision.image_size // vision.patch_size) ** 2 // self.config.scale_factor**2
        return AROUND + name + self.placeholders["image"] * tokens

    def stack(self, key: str, values: list[Tensor]) -> Tensor:
        """Pads with tiles of zeros, which the model drops."""
        return super().stack(key, pad_second(values))


def _rows_and_columns(image_processor: Any, size: Size) -> tuple[int, int]:
    """Returns the rows and columns of tiles that an image is cut into; 0 x 0 if it is not cut.

    The longer side becomes `longest_edge`, at most `MAX_SIDE`, and then a multiple of the tile; the shorter one follows. (The
    image processor's `get_number_of_image_patches` lets the shorter side follow earlier, which may give another number.)
    """
    if not image_processor.do_image_splitting:
        return 0, 0
    tile, given = image_processor.max_image_size["longest_edge"], image_processor.size
    if image_processor.do_resize and given.get("longest_edge"):
        width, height = _scaled(size, given["longest_edge"])
        size = (width, height + height % 2) if size[0] >= size[1] else (width + width % 2, height)
        size = _scaled(size, MAX_SIDE) if max(size) > MAX_SIDE else size
    elif image_processor.do_resize:
        size = given["width"], given["height"]
    width, height = _scaled(size, math.ceil(max(size) / tile) * tile)
    rows, columns = math.ceil(height / tile), math.ceil(width / tile)
    return (rows, columns) if rows * columns > 1 else (0, 0)


def _scaled(size: Size, longest: int) -> Size:
    """Returns width and height with a longer side of `longest`, the shorter one rounded down."""
    width, height = size
    ratio = width / height
    return (longest, max(1, int(longest / ratio))) if width >= height else (max(1, int(longest * ratio)), longest)


class SmolVLM(Idefics3):
    """Ref: SmolVLM, arXiv 2504.05299, section 2."""

    model_types = {"smolvlm": "SmolVLMForConditionalGeneration"}

    def video_texts(self, image_processor: Any, videos: Sequence[VideoSize], fps: list[float]) -> list[str]:
        raise ValueError(
            f"video: {self.model_type} takes no videos here, because its video processor in transformers needs torchvision; "
            f"give the frames as images"
        )
