"""Images of a request: data URLs, or downloads from allowed hosts -> RGB images. Sizes are checked before pixels are decoded.

A client names no file: neither a path nor a file:// URL is opened.
"""

from __future__ import annotations

import base64
import binascii
import io
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from PIL import Image

from sage.inputs.media import open_image
from sage.inputs.video import no_size_warning
from sage.serving.chat_request import ImagePart, Message, Part, TextPart, VideoPart
from sage.serving.errors import invalid
from sage.serving.remote import RemoteMedia
from sage.serving.settings import ServerLimits

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP")  # of PIL; others run external programs or rarely used decoders
ENCODING = ";base64"


@dataclass
class MediaReader:
    """Opens the images of one request within the limits.

    Attributes:
        remaining_pixels: of `limits.max_pixels`.
    """

    limits: ServerLimits
    remote: RemoteMedia = RemoteMedia()
    remaining_pixels: int = field(init=False)

    def __post_init__(self) -> None:
        self.remaining_pixels = self.limits.max_pixels

    def open_messages(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        """Returns the messages for `Target.prepare`; ApiError for an image that cannot be read or exceeds a limit."""
        parts = [part for message in messages for part in message.content]
        count = sum(len(part.video) if isinstance(part, VideoPart) else isinstance(part, ImagePart) for part in parts)
        if count > self.limits.max_images:
            raise invalid(f"messages: {count} images and frames, allowed: at most {self.limits.max_images}", "messages")
        return [self._open_message(message, f"messages[{number}]") for number, message in enumerate(messages)]

    def _open_message(self, message: Message, where: str) -> dict[str, Any]:
        content = [self._open_part(part, f"{where}.content[{number}]") for number, part in enumerate(message.content)]
        return {"role": "system" if message.role == "developer" else message.role, "content": content}

    def _open_part(self, part: Part, where: str) -> dict[str, Any]:
        if isinstance(part, TextPart):
            return {"type": "text", "text": part.text}
        if isinstance(part, ImagePart):
            return {"type": "image", "image": self._open(part.image_url, where)}
        frames = [self._open(url, f"{where}, frame {number}") for number, url in enumerate(part.video)]
        if len({frame.size for frame in frames}) > 1:
            raise invalid(f"{where}: frames of different sizes", where)
        return {"type": "video", "video": frames} | ({} if part.fps is None else {"fps": part.fps})

    def _open(self, url: str, where: str) -> Image.Image:
        try:
            return self._decoded(decode_data_url(url) if url.startswith("data:") else self.remote.fetch(url))
        except ValueError as error:
            raise invalid(f"{where}: image: {str(error).removeprefix('image ')}", where) from error

    def _decoded(self, data: bytes) -> Image.Image:
        try:
            with no_size_warning(), Image.open(io.BytesIO(data), formats=FORMATS) as image:
                pixels = image.width * image.height
                if pixels > self.remaining_pixels:
                    raise ValueError(f"{image.width}x{image.height} pixels, allowed in a request: {self.limits.max_pixels}")
                self.remaining_pixels -= pixels
                return open_image(image)
        except ValueError:
            raise
        except Image.DecompressionBombError as error:
            raise ValueError(f"too many pixels, allowed in a request: {self.limits.max_pixels}") from error
        except Exception as error:  # whatever PIL's decoders raise on corrupt bytes is the client's mistake
            raise ValueError(f"not an image in one of the formats {', '.join(FORMATS)}") from error


def decode_data_url(url: str) -> bytes:
    """Returns the bytes of a data URL in base64; ValueError if it is none, or empty."""
    header, comma, data = url.partition(",")
    if not comma or not header.endswith(ENCODING):
        raise ValueError("not a data URL in base64; give data:image/png;base64,...")
    try:
        found = base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError) as error:
        raise ValueError("not valid base64") from error
    if not found:
        raise ValueError("empty")
    return found
