"""The input format of a target family: what its chat template needs, placeholders in the text, and pixel inputs.

The model side of a family is its subclass in sage.targets. Shapes: T tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from sage.inputs.video import Size, VideoSize

Inputs = dict[str, Any]


class InputFormat:
    """Text and pixel inputs of one architecture, given the target's configuration.

    Three things are kept apart: the placeholder that the chat template writes for an image or video, the text that replaces it
    (with a token per visual embedding, and in some families more: timestamps, rows, delimiters), and the slot, the id of the
    tokens whose embeddings become visual ones.

    Attributes:
        placeholders: "image" and "video", those that the family takes -> the text that the chat template writes for one.
        pixel_keys: names of the pixel inputs.
        wants_text: whether the chat template takes the content of a message as a string, not as a list of parts.
        template_arguments: further arguments of the chat template.
        slots: "image" and "video", those that have one -> id of the token that visual embeddings replace.
        published_pixels: the fewest and the most pixels of an image in published checkpoints; None: images have fixed sizes.
    """

    placeholders: ClassVar[dict[str, str]] = {}
    pixel_keys: ClassVar[tuple[str, ...]] = ()
    wants_text: ClassVar[bool] = False
    template_arguments: ClassVar[dict[str, Any]] = {}
    published_pixels: ClassVar[Size | None] = None

    def __init__(self, config: Any) -> None:
        self.config, self.model_type = config, str(config.model_type)
        ids = {kind: getattr(config, f"{kind}_token_id", None) for kind in self.placeholders}
        self.slots = {kind: int(token_id) for kind, token_id in ids.items() if token_id is not None}

    @property
    def slot_texts(self) -> dict[str, str]:
        """The text of each slot's token; by default the placeholder."""
        return {kind: self.placeholders[kind] for kind in self.slots}

    def visual_mask(self, input_ids: Tensor) -> Tensor:
        """BoolTensor like `input_ids`, True at slots."""
        ids = list(self.slots.values())
        return torch.isin(input_ids, torch.tensor(ids, device=input_ids.device, dtype=input_ids.dtype))

    def pixel_limits(self, image_processor: Any = None) -> Size | None:
        """Returns the fewest and the most pixels of an image that is not scaled: of a processor, or as published."""
        if self.published_pixels is None or image_processor is None:
            return self.published_pixels
        return image_processor.size["shortest_edge"], image_processor.size["longest_edge"]

    def chat_template(self, stock: str | None) -> str | None:
        """Returns the chat template to use, given that of the target's files, which cannot be trained on in some families."""
        return stock

    def image_texts(self, image_processor: Any, sizes: Sequence[Size]) -> list[str]:
        """Returns the text that replaces the placeholder of each image of one conversation, given their sizes.

        By default, raises ValueError: the family takes none.
        """
        raise ValueError(f"image: {self.model_type} takes no images; choose a vision-language target")

    def video_texts(self, image_processor: Any, videos: Sequence[VideoSize], fps: list[float]) -> list[str]:
        """As `image_texts`, of videos with so many frames per second, as sampled."""
        raise ValueError(f"video: {self.model_type} takes no videos; give the frames as images")

    def media_texts(
        self, image_processor: Any, order: Sequence[str], images: Sequence[Size], videos: Sequence[VideoSize], fps: list[float]
    ) -> list[str]:
        """Returns the texts of the images and videos of one conversation in reading order (`order`: "image" or "video")."""
        image_texts = self.image_texts(image_processor, images) if images else []
        video_texts = self.video_texts(image_processor, videos, fps) if videos else []
        readers = {"image": iter(image_texts), "video": iter(video_texts)}
        return [next(readers[kind]) for kind in order]

    def encode_images(self, image_processor: Any, images: list[Any]) -> Inputs:
        """Returns the pixel inputs of one conversation's images; by default the image processor's `pixel_keys`."""
        out = image_processor(images=images, return_tensors="pt")
        return {key: torch.as_tensor(out[key]) for key in self.pixel_keys}

    def encode_videos(self, image_processor: Any, videos: list[list[Any]], fps: list[float]) -> Inputs:
        """As `encode_images`, of the frames of each video. Only called for a family with `video_texts`."""
        raise NotImplementedError

    def encode_media(
        self, image_processor: Any, order: Sequence[str], images: list[Any], videos: list[list[Any]], fps: list[float]
    ) -> Inputs:
        """Returns the pixel inputs of one conversation.

        By default images and videos are encoded separately. A family whose frames are images overrides it, because its pixel
        inputs are then in reading order.
        """
        pixels = self.encode_images(image_processor, images) if images else {}
        return pixels | (self.encode_videos(image_processor, videos, fps) if videos else {})

    def token_inputs(self, input_ids: Tensor) -> Inputs:
        """Returns per-token inputs in addition to `input_ids` [T]; none by default."""
        return {}

    def stack(self, key: str, values: list[Tensor]) -> Tensor:
        """Concatenates one pixel input of several examples along the image axis."""
        return torch.cat(values)


def pad_second(values: list[Tensor], fill: float = 0.0) -> list[Tensor]:
    """Pads tensors [images, tiles, ...] to the most tiles of the batch."""
    most = max(value.shape[1] for value in values)
    return [nn.functional.pad(v, (0, 0) * (v.dim() - 2) + (0, most - v.shape[1]), value=fill) for v in values]
