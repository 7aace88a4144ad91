"""InternVL 3: tiles and a thumbnail per image, frames of videos as images of one tile, plain rope positions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

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
    ) -> tuple[Inputs, list[str]]:
        left, rates = {"image": iter(images), "video": iter(videos)}, iter(fps)
        encoded = []
        for kind in order:
            item = [next(left[kind])]
            if kind == "image":
                encoded.append(self.encode_images(image_processor, item))
            else:
                encoded.append(self.encode_videos(image_processor, item, [next(rates)]))
        pixels = torch.cat([inputs["pixel_values"] for inputs, _ in encoded])
        return {"pixel_values": pixels}, [text for _, texts in encoded for text in texts]

    def encode_images(self, image_processor: Any, images: list[Any]) -> tuple[Inputs, list[str]]:
        out = image_processor(images=images, crop_to_patches=True, return_tensors="pt")
        texts = [self._delimited(tiles) for tiles in torch.as_tensor(out["num_patches"]).tolist()]
        return {"pixel_values": out["pixel_values"]}, texts

    def encode_videos(self, image_processor: Any, videos: list[list[Any]], fps: list[float]) -> tuple[Inputs, list[str]]:
        """Numbers the frames; `fps` is not used, because neither texts nor positions carry time."""
        frames = [frame for video in videos for frame in video]
        pixels = image_processor(images=frames, crop_to_patches=False, return_tensors="pt")["pixel_values"]
        return {"pixel_values": pixels}, [self._video_text(len(video)) for video in videos]

    def image_texts(self, image_processor: Any, sizes: Sequence[Size]) -> list[str]:
        count = image_processor.get_number_of_image_patches
        return [self._delimited(count(height, width, {"crop_to_patches": True})) for width, height in sizes]

    def video_texts(self, image_processor: Any, videos: Sequence[VideoSize], fps: list[float]) -> list[str]:
        return [self._video_text(video.frames) for video in videos]

    def _video_text(self, frames: int) -> str:
        return "\n".join(f"Frame{i}: {self._delimited(1)}" for i in range(1, frames + 1))

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
