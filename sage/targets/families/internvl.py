"""InternVL 3: tiles and a thumbnail per image, frames of videos as images of one tile, plain rope positions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from sage.inputs.format import Inputs
from sage.inputs.video import Size, VideoSize
from sage.targets.family import Family
from sage.targets.rope import RopeConfig

DYNAMIC, UNSCALED = "dynamic", "default"  # values of `rope_type`


class InternVL(Family):
    """Ref: InternVL3, arXiv 2504.10479, section 2.1; tiles: InternVL 1.5, arXiv 2404.16821 ("Dynamic High-Resolution").

    Images and videos share one pixel input in reading order, and one slot.
    """

    model_types = {"internvl": "InternVLForConditionalGeneration"}
    placeholders = {"image": "<IMG_CONTEXT>", "video": "<video>"}
    served_by = ("vLLM",)
    needs_plugin = True
    pixel_keys = ("pixel_values",)

    def encode_media(
        self, image_processor: Any, order: Sequence[str], images: list[Any], videos: list[list[Any]], fps: list[float]
    ) -> Inputs:
        left = {"image": ([image] for image in images), "video": iter(videos)}
        tiles = [self._tiles(image_processor, next(left[kind]), kind == "image") for kind in order]
        return {"pixel_values": torch.cat(tiles)}

    def encode_images(self, image_processor: Any, images: list[Any]) -> Inputs:
        return {"pixel_values": self._tiles(image_processor, images, True)}

    def _tiles(self, image_processor: Any, images: list[Any], is_cut: bool) -> Tensor:
        """Returns the tiles of images, of those that are not cut (frames) one each."""
        return torch.as_tensor(image_processor(images=images, crop_to_patches=is_cut, return_tensors="pt")["pixel_values"])

    def image_texts(self, image_processor: Any, sizes: Sequence[Size]) -> list[str]:
        count = image_processor.get_number_of_image_patches
        return [self._delimited(count(height, width, {"crop_to_patches": True})) for width, height in sizes]

    def video_texts(self, image_processor: Any, videos: Sequence[VideoSize], fps: list[float]) -> list[str]:
        """Numbers the frames; `fps` is not used, because neither texts nor positions carry time."""
        return ["\n".join(f"Frame{i + 1}: {self._delimited(1)}" for i in range(video.frames)) for video in videos]

    def _delimited(self, tiles: int) -> str:
        return f"<img>{self.placeholders['image'] * self.config.image_seq_length * tiles}</img>"

    def optimize(self, model: Any) -> None:
        """Switches off the dynamic scaling of the published rope, which has no effect up to `max_position_embeddings`.

        Decoding ends there. The scaling waits for the GPU in every pass, which cannot be captured then.
        """
        rotary = self.text_model(model).rotary_emb
        if getattr(rotary, "rope_type", None) == DYNAMIC:
            rotary.rope_type = UNSCALED

    def rope(self) -> RopeConfig:
        rope = self.config.get_text_config().rope_parameters
        return RopeConfig.of({**rope, "rope_type": UNSCALED} if rope.get("rope_type") == DYNAMIC else rope)

    @property
    def vision_sizes(self) -> tuple[int, int, int]:
        vision = self.config.vision_config
        height, width = vision.patch_size
        return vision.hidden_size, vision.intermediate_size, 3 * height * width
