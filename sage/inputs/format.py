"""The input format of a target family: placeholders in the text and pixel inputs.

Does not own: the model side of a family (sage.targets.family, a subclass).

Shapes: T tokens.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

import torch
from torch import Tensor

Inputs = dict[str, Any]


class InputFormat(ABC):
    """Text and pixel inputs of one vision-language architecture.

    Args:
        config: the target's configuration.

    Attributes:
        model_type: `model_type` of the configuration.
        placeholders: "image", and "video" if the family takes videos -> the token that the chat template writes for one.
        pixel_keys: names of the pixel inputs.
    """

    model_type: ClassVar[str]
    placeholders: ClassVar[dict[str, str]]
    pixel_keys: ClassVar[tuple[str, ...]]

    def __init__(self, config: Any) -> None:
        self.config = config

    @property
    def placeholder_ids(self) -> dict[str, int]:
        """ "image" and "video" -> id of the token that visual embeddings replace."""
        return {kind: int(getattr(self.config, f"{kind}_token_id")) for kind in self.placeholders}

    def visual_mask(self, input_ids: Tensor) -> Tensor:
        """BoolTensor like `input_ids`, True at placeholders."""
        ids = list(self.placeholder_ids.values())
        return torch.isin(input_ids, torch.tensor(ids, device=input_ids.device, dtype=input_ids.dtype))

    @abstractmethod
    def encode_images(self, image_processor: Any, images: list[Any]) -> tuple[Inputs, list[int]]:
        """Returns the pixel inputs of one conversation's images and the number of visual tokens of each."""

    def encode_videos(self, image_processor: Any, videos: list[list[Any]], fps: list[float]) -> tuple[Inputs, list[int]]:
        """Returns the pixel inputs of one conversation's videos and the number of visual tokens of each.

        Args:
            videos: frames of each video.
            fps: frames per second of each video, as sampled.

        Raises:
            ValueError: the family takes no videos.
        """
        raise ValueError(f"video: {self.model_type} takes no videos; give the frames as images")

    def token_inputs(self, input_ids: Tensor) -> Inputs:
        """Returns per-token inputs in addition to `input_ids` [T]; none by default."""
        return {}

    def stack(self, key: str, values: list[Tensor]) -> Tensor:
        """Concatenates one pixel input of several examples along the image axis."""
        return torch.cat(values)
