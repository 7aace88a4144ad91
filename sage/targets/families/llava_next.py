"""LLaVA-NeXT (v1.6): a base tile and unpadded tiles per image, with a newline embedding per row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers.image_processing_utils import select_best_resolution

from sage.inputs.format import Inputs, pad_second
from sage.inputs.video import Size
from sage.targets.families.llava import Llava, tile_size


class LlavaNext(Llava):
    """Ref: LLaVA-NeXT, llava-vl.github.io/blog/2024-01-30-llava-next, "Dynamic High Resolution"."""

    model_types = {"llava_next": "LlavaNextForConditionalGeneration"}
    served_by = ("vLLM",)
    needs_plugin = True
    pixel_keys: ClassVar[tuple[str, ...]] = ("pixel_values", "image_sizes")

    def encode_images(self, image_processor: Any, images: list[Any]) -> tuple[Inputs, list[str]]:
        out = image_processor(images=images, return_tensors="pt")
        inputs = {key: torch.as_tensor(out[key]) for key in self.pixel_keys}
        sizes = [(width, height) for height, width in inputs["image_sizes"].tolist()]
        return inputs, self._texts(self._tile_tokens(*inputs["pixel_values"].shape[-2:]), sizes)

    def image_texts(self, image_processor: Any, sizes: Sequence[Size]) -> list[str] | None:
        tile = tile_size(image_processor)
        return None if tile is None else self._texts(self._tile_tokens(*tile), sizes)

    def _texts(self, base: int, sizes: Sequence[Size]) -> list[str]:
        """Texts of images, given the visual tokens of a base tile and the size of each image."""
        grids = [self._grid(height, width) for width, height in sizes]
        return [self.placeholders["image"] * (base + rows * (columns + 1)) for rows, columns in grids]

    @property
    def _side(self) -> int:
        """Patches along one side of a tile."""
        vision = self.config.vision_config
        return int(vision.image_size // vision.patch_size)

    def _grid(self, height: int, width: int) -> tuple[int, int]:
        """Rows and columns of the patches of an image's tiles, without those that only cover padding."""
        tile = self.config.vision_config.image_size
        best_height, best_width = select_best_resolution([height, width], self.config.image_grid_pinpoints)
        rows, columns = self._side * (best_height // tile), self._side * (best_width // tile)
        if width / height > columns / rows:
            rows -= (rows - int(round(height * (columns / width), 7))) // 2 * 2
        else:
            columns -= (columns - int(round(width * (rows / height), 7))) // 2 * 2
        return rows, columns

    def stack(self, key: str, values: list[Tensor]) -> Tensor:
        """Pads the tiles of images [images, tiles, 3, H, W] to the most of the batch; the model cuts them by `image_sizes`."""
        return super().stack(key, pad_second(values) if key == "pixel_values" else values)
