"""LLaVA-OneVision: SigLIP tiles with a newline embedding per row, plain rope positions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from sage.inputs.format import Inputs, pad_second
from sage.inputs.video import Size, VideoSize
from sage.targets.families.llava_next import LlavaNext
from sage.targets.family import Visual

PADDED_FRAME = math.nan  # pads the shorter videos of a batch; no pixel value is NaN


class LlavaOnevision(LlavaNext):
    """Ref: LLaVA-OneVision, arXiv 2408.03326, section 3.2 (anyres tiles; one base tile per image if there are several)."""

    model_types = {"llava_onevision": "LlavaOnevisionForConditionalGeneration"}
    placeholders = {"image": "<image>", "video": "<video>"}
    pixel_keys = ("pixel_values", "image_sizes", "batch_num_images", "pixel_values_videos")

    def encode_images(self, image_processor: Any, images: list[Any]) -> tuple[Inputs, list[str]]:
        out = image_processor(images=[images], return_tensors="pt")
        inputs = {key: torch.as_tensor(out[key]) for key in ("pixel_values", "image_sizes", "batch_num_images")}
        return inputs, self.image_texts(image_processor, [image.size for image in images])

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

    def encode_videos(self, image_processor: Any, videos: list[list[Any]], fps: list[float]) -> tuple[Inputs, list[str]]:
        """Resizes each frame to one tile; `fps` is not used, because positions carry no time."""
        texts = self.video_texts(image_processor, [VideoSize(len(frames), *frames[0].size) for frames in videos], fps)
        pixels = []
        for frames in videos:
            tiles = image_processor(images=[[frame] for frame in frames], return_tensors="pt")["pixel_values"]
            pixels.append(tiles[:, 0])
        return {"pixel_values_videos": torch.stack(pixels)}, texts

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
