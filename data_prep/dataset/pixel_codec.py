"""Lossless 8-bit storage of pixel inputs.

Image processors turn 8-bit pixels into normalized floats, 256 values per channel. The codec stores the 8-bit levels and a
table of these values, verifies every image, and stores values that are not in the table unchanged.

Shapes: P patches (or images), C colour channels.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from PIL import Image

from sage.inputs.processing import Processor

LEVELS = 256
PROBE_SIDE = 56
# Encodings, part of the stored field names.
STILL = "still"  # levels of one frame: a Qwen patch of an image repeats it along its temporal axis
LEVEL = "level"  # levels
RAW = ""  # unchanged


class PixelTable:
    """The value of each 8-bit level in each channel, float32 [C, 256]; `frames` per patch along the temporal axis."""

    def __init__(self, values: np.ndarray, frames: int) -> None:
        self.values, self.frames = values, frames

    @classmethod
    def measure(cls, processor: Processor) -> PixelTable:
        """Runs the image processor on grey images, so that no formula of its normalization is assumed; empty without one."""
        if processor.image_processor is None:
            return cls(np.zeros((0, LEVELS), dtype=np.float32), 1)
        channels = len(processor.image_processor.image_mean)
        frames = int(getattr(processor.image_processor, "temporal_patch_size", 1))
        columns = []
        for level in range(LEVELS):
            grey = Image.new("RGB", (PROBE_SIDE, PROBE_SIDE), (level,) * 3)
            pixels, _ = processor.family.encode_images(processor.image_processor, [grey])
            columns.append(_by_channel(pixels["pixel_values"].numpy(), channels)[0, :, 0])
        return cls(np.stack(columns, axis=1), frames)

    def pack(self, pixels: np.ndarray) -> tuple[str, np.ndarray]:
        """Returns (encoding, array): levels if the table restores every value exactly, else the pixels."""
        by_channel = _by_channel(pixels, len(self.values))
        low, high = self.values[:, :1], self.values[:, -1:]
        levels = np.rint((by_channel - low) * ((LEVELS - 1) / (high - low))).clip(0, LEVELS - 1).astype(np.uint8)
        if not np.array_equal(self._look_up(levels), by_channel):
            return RAW, pixels
        if pixels.ndim == 2 and self.frames > 1:
            frames = levels.reshape(len(pixels), len(self.values), self.frames, -1)
            if (frames == frames[:, :, :1]).all():
                return STILL, frames[:, :, 0].reshape(len(pixels), -1)
        return LEVEL, levels.reshape(pixels.shape)

    def unpack(self, encoding: str, stored: np.ndarray) -> np.ndarray:
        """Restores the argument of `pack`."""
        if encoding == RAW:
            return stored
        channels = len(self.values)
        if encoding == STILL:
            frames = stored.reshape(len(stored), channels, 1, -1).repeat(self.frames, axis=2)
            return self._look_up(frames.reshape(len(stored), channels, -1)).reshape(len(stored), -1)
        return self._look_up(_by_channel(stored, channels)).reshape(stored.shape)

    def _look_up(self, levels: np.ndarray) -> np.ndarray:
        offsets = (np.arange(len(self.values), dtype=np.int32) * LEVELS)[None, :, None]
        return self.values.reshape(-1)[levels + offsets]


def _by_channel(pixels: np.ndarray, channels: int) -> np.ndarray:
    """[P, C * rest] (Qwen patches) or [..., C, H, W] (LLaVA images) -> [P, C, rest]."""
    height_width: Any = pixels.shape[-2] * pixels.shape[-1] if pixels.ndim > 2 else pixels.shape[-1] // channels
    return pixels.reshape(-1, channels, height_width)
