"""Idefics3 and SmolVLM: an image is cut into tiles, whose rows and columns are in the text; Llama text layers, plain rope."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from sage.inputs.format import Inputs, pad_second
from sage.targets.family import Family

AROUND, COMPLETE = "<fake_token_around_image>", "<global-img>"  # before every tile and at the end; the image in one tile


class Idefics3(Family):
    """Ref: Building and better understanding vision-language models, arXiv 2408.12637, section 3.1."""

    model_types = {"idefics3": "Idefics3ForConditionalGeneration"}
    placeholders = {"image": "<image>"}
    pixel_keys = ("pixel_values", "pixel_attention_mask")

    def encode_images(self, image_processor: Any, images: list[Any]) -> tuple[Inputs, list[str]]:
        out = image_processor(images=[images], return_row_col_info=True, return_tensors="pt")
        texts = [self._text(rows, columns) for rows, columns in zip(out["rows"][0], out["cols"][0], strict=True)]
        return {key: out[key] for key in self.pixel_keys}, texts

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


class SmolVLM(Idefics3):
    """Ref: SmolVLM, arXiv 2504.05299, section 2."""

    model_types = {"smolvlm": "SmolVLMForConditionalGeneration"}

    def encode_videos(self, image_processor: Any, videos: list[list[Any]], fps: list[float]) -> tuple[Inputs, list[str]]:
        raise ValueError(
            f"video: {self.model_type} takes no videos here, because its video processor in transformers needs torchvision; "
            f"give the frames as images"
        )
