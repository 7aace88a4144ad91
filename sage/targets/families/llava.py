"""LLaVA-1.5, LLaVA-NeXT (v1.6) and LLaVA-OneVision: tiles of an image as rows of patches, plain rope positions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers.image_processing_utils import select_best_resolution

from sage.inputs.format import Inputs, pad_second
from sage.inputs.video import Size, VideoSize
from sage.targets.family import Family, Visual

PADDED_FRAME = math.nan  # pads the shorter videos of a batch; no pixel value is NaN
CLASS_TOKENS = {"clip_vision_model": 1, "siglip_vision_model": 0}  # vision tower -> tokens in front of the patches
VICUNA = (
    "{% for message in messages %}{% if message.role != 'system' %}{{ message.role.upper() + ': ' }}{% endif %}"
    "{% for part in message.content if part.type == 'image' %}{{ '<image>\\n' }}{% endfor %}"
    "{{ message.content | selectattr('type', 'equalto', 'text') | map(attribute='text') | join(' ') }}"
    "{{ eos_token if message.role == 'assistant' else ' ' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
)


class Llava(Family):
    """One tile per image, and Vicuna's chat template with the token that ends an answer.

    Ref: Improved Baselines with Visual Instruction Tuning, arXiv 2310.03744, section 3.
    """

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

    def image_texts(self, image_processor: Any, sizes: Sequence[Size]) -> list[str]:
        return [self.placeholders["image"] * self._tile_tokens] * len(sizes)

    @property
    def _side(self) -> int:
        """Patches along one side of a tile; the vision tower takes no other tiles."""
        vision = self.config.vision_config
        return int(vision.image_size // vision.patch_size)

    @property
    def _tile_tokens(self) -> int:
        """Visual tokens of a tile; the strategy "default" drops the first token of the vision tower."""
        dropped = self.config.vision_feature_select_strategy == "default"
        return self._side**2 + CLASS_TOKENS[self.config.vision_config.model_type] - dropped


class LlavaNext(Llava):
    """A base tile and unpadded tiles per image, with a newline embedding per row.

    Ref: LLaVA-NeXT, llava-vl.github.io/blog/2024-01-30-llava-next, "Dynamic High Resolution".
    """

    model_types = {"llava_next": "LlavaNextForConditionalGeneration"}
    served_by = ("vLLM",)
    needs_plugin = True
    pixel_keys: ClassVar[tuple[str, ...]] = ("pixel_values", "image_sizes")

    def image_texts(self, image_processor: Any, sizes: Sequence[Size]) -> list[str]:
        grids = [self._grid(height, width) for width, height in sizes]
        return [self.placeholders["image"] * (self._tile_tokens + rows * (columns + 1)) for rows, columns in grids]

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


class LlavaOnevision(LlavaNext):
    """Ref: LLaVA-OneVision, arXiv 2408.03326, section 3.2 (anyres tiles; one base tile per image if there are several)."""

    model_types = {"llava_onevision": "LlavaOnevisionForConditionalGeneration"}
    placeholders = {"image": "<image>", "video": "<video>"}
    pixel_keys = ("pixel_values", "image_sizes", "batch_num_images", "pixel_values_videos")

    def encode_images(self, image_processor: Any, images: list[Any]) -> Inputs:
        out = image_processor(images=[images], return_tensors="pt")
        return {key: torch.as_tensor(out[key]) for key in self.pixel_keys[:3]}

    def image_texts(self, image_processor: Any, sizes: Sequence[Size]) -> list[str]:
        count = self._side**2 + 1 if len(sizes) > 1 else self._num_tokens(sizes[0][1], sizes[0][0])
        return [self.placeholders["image"] * count] * len(sizes)

    def _num_tokens(self, height: int, width: int) -> int:
        """Visual tokens of a single image: base tile, unpadded tiles, one newline per row (arXiv 2408.03326, 3.2)."""
        rows, columns = self._grid(height, width)
        most_tiles = int(self.config.vision_aspect_ratio.removeprefix("anyres_max_"))
        ratio = math.sqrt(rows * columns / (most_tiles * self._side**2))
        if ratio > 1.1:
            rows, columns = int(rows // ratio), int(columns // ratio)
        return self._side**2 + rows * (columns + 1)

    def encode_videos(self, image_processor: Any, videos: list[list[Any]], fps: list[float]) -> Inputs:
        """Resizes each frame to one tile; `fps` is not used, because positions carry no time."""
        tiles = [image_processor(images=[[frame] for frame in frames], return_tensors="pt") for frames in videos]
        return {"pixel_values_videos": torch.stack([video["pixel_values"][:, 0] for video in tiles])}

    def video_texts(self, image_processor: Any, videos: Sequence[VideoSize], fps: list[float]) -> list[str]:
        lengths = {video.frames for video in videos}
        if len(lengths) > 1:
            raise ValueError(f"video: videos of one conversation have {sorted(lengths)} frames; sample the same number")
        pooled = math.ceil(self._side / 2) ** 2
        return [self.placeholders["video"] * (video.frames * pooled + 1) for video in videos]

    def stack(self, key: str, values: list[Tensor]) -> Tensor:
        return super().stack(key, pad_second(values, PADDED_FRAME) if key == "pixel_values_videos" else values)

    def visual_features(self, model: Any, inputs: Inputs) -> dict[int, Visual]:
        features = {}
        if inputs.get("pixel_values") is not None:
            out = model.model.get_image_features(
                inputs["pixel_values"], inputs["image_sizes"], batch_num_images=inputs.get("batch_num_images"), return_dict=True
            )
            features[self.slots["image"]] = Visual(torch.cat(tuple(out.pooler_output)))
        if inputs.get("pixel_values_videos") is not None:
            features[self.slots["video"]] = Visual(self._video_features(model, inputs["pixel_values_videos"]))
        return features

    def _video_features(self, model: Any, pixels: Tensor) -> Tensor:
        """Videos [C, F, 3, H, W], padded with `PADDED_FRAME` -> their embeddings, concatenated [tokens, D].

        The vision tower reads all frames as one video. A newline ends every video; that of transformers' output,
        which 5.17 does not have, is not read.
        """
        is_frame = ~pixels[:, :, 0, 0, 0].isnan()
        out = model.model.get_video_features(pixels[is_frame][None], return_dict=True).pooler_output[0]
        newline = model.model.image_newline[None].to(out)
        vision = self.config.vision_config
        per_frame = math.ceil(vision.image_size // vision.patch_size / 2) ** 2
        videos = out[: int(is_frame.sum()) * per_frame].split((is_frame.sum(1) * per_frame).tolist())
        return torch.cat([part for video in videos for part in (video, newline)])
