"""Small copies of the images and videos of messages, for pages.

Pictures are decoded, scaled and encoded again as JPEG in data URLs. Nothing of the original file is copied: no metadata, no
bytes that a browser could read as something else.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from PIL import Image

from sage.inputs.media import open_image, open_video_part, source_of
from sage.inputs.messages import parts_of

IMAGE_SIDE = 448  # pixels
FRAME_SIDE = 128
MAX_FRAMES = 64  # shown of a video, evenly spaced
JPEG_QUALITY = 85


@dataclass(frozen=True)
class Thumbnail:
    """A picture of `width` x `height` pixels; `url` is a data URL."""

    width: int
    height: int
    url: str


@dataclass(frozen=True)
class Media:
    """An image, with one thumbnail, or a video with one per frame shown; `num_frames`: frames that the target reads."""

    kind: str
    frames: list[Thumbnail]
    num_frames: int


def thumbnail(source: Any, side: int = IMAGE_SIDE, allow_urls: bool = False) -> Thumbnail:
    """Returns a copy of an image at most `side` pixels high and twice as wide; arguments and errors as for `open_image`."""
    small = open_image(source, allow_urls).copy()
    small.thumbnail((2 * side, side), Image.Resampling.LANCZOS)
    small.info = {}  # such as a comment, which would be copied
    stream = io.BytesIO()
    small.save(stream, "JPEG", quality=JPEG_QUALITY)
    return Thumbnail(small.width, small.height, f"data:image/jpeg;base64,{base64.b64encode(stream.getvalue()).decode()}")


def media_thumbnails(
    messages: Iterable[Mapping[str, Any]],
    image_side: int = IMAGE_SIDE,
    frame_side: int = FRAME_SIDE,
    max_frames: int = MAX_FRAMES,
    num_frames: int | None = None,
) -> Iterator[Media]:
    """Yields the images and videos of chat messages in reading order; ValueError, which names it, for one that cannot be read.

    Args:
        image_side, frame_side: pixels, as for `thumbnail`.
        max_frames: frames shown of a video.
        num_frames: frames read of a video, as for `open_video_part`.
    """
    for message in messages:
        for part in parts_of(message, "image", "video"):
            if part["type"] == "image":
                yield Media("image", [thumbnail(source_of(part, "image"), image_side, allow_urls=True)], 1)
            else:
                frames = open_video_part(part, num_frames).frames
                shown = frames[:: -(-len(frames) // max_frames)]
                yield Media("video", [thumbnail(frame, frame_side) for frame in shown], len(frames))
