"""Images of a request: data URLs -> RGB images. Sizes are checked before pixels are decoded.

A client names no file and no host: neither a path nor another URL is opened.
"""

from __future__ import annotations

import io
from typing import Any

from PIL import Image

from sage.inputs.media import decode_data_url, open_image
from sage.inputs.video import no_size_warning
from sage.serving.settings import ServerLimits

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP")  # of PIL; others run external programs or rarely used decoders


class MediaReader:
    """Opens the images of one request within the limits."""

    def __init__(self, limits: ServerLimits) -> None:
        self._limits, self._num_left, self._pixels_left = limits, limits.max_images, limits.max_pixels

    def open(self, url: Any) -> Image.Image:
        """Returns the image at a URL; ValueError if it cannot be read or exceeds a limit."""
        if not isinstance(url, str) or url[:5].lower() != "data:":
            raise ValueError("image: give a data URL, data:image/png;base64,...")
        self._num_left -= 1
        if self._num_left < 0:
            raise ValueError(f"more images and frames than allowed: at most {self._limits.max_images}")
        limit = f"allowed in a request: {self._limits.max_pixels}"
        try:
            with no_size_warning(), Image.open(io.BytesIO(decode_data_url(url)), formats=FORMATS) as image:
                self._pixels_left -= image.width * image.height
                if self._pixels_left < 0:
                    raise ValueError(f"{image.width}x{image.height} pixels, {limit}")
                return open_image(image)
        except ValueError as error:
            raise ValueError(f"image: {str(error).removeprefix('image ')}") from error
        except Image.DecompressionBombError as error:
            raise ValueError(f"image: too many pixels, {limit}") from error
        except Exception as error:  # whatever PIL's decoders raise on corrupt bytes is the client's mistake
            raise ValueError(f"image: not an image in one of the formats {', '.join(FORMATS)}") from error
