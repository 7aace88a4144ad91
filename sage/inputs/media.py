"""Images and videos from files, bytes, URLs, message parts or memory -> RGB images, within limits on size."""

from __future__ import annotations

import base64
import io
import math
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from PIL import ExifTags, Image, ImageOps, UnidentifiedImageError

from sage.inputs.messages import Messages, parts_of
from sage.inputs.video import (
    DECODING_ERRORS,
    MAX_PIXELS,
    TOO_MANY_PIXELS,
    Segment,
    Size,
    Video,
    VideoSize,
    measure_video,
    no_size_warning,
    read_video,
    sample_frames,
    video_times,
)

LIMIT_KEYS = ("min_pixels", "max_pixels")  # of a message part: number of pixels of the image that the target reads
TURNED = range(5, 9)  # orientations of EXIF that exchange width and height
# keys of a part in Qwen's utilities that are not supported
OF_QWEN = ("resized_height", "resized_width", "video_start", "video_end", "nframes", "min_frames", "max_frames", "total_pixels")
URLS = ("http://", "https://")
FILE_URL = "file://"
NO_IMAGE = "not an image in a known format"
OTHER_FORMATS = {b"<svg": "an SVG drawing", b"ftyphe": "an HEIC photo", b"ftypmif1": "an HEIC photo", b"%PDF": "a PDF"}
MIN_SIDE = 2  # pixels; with one, image processors cannot infer the channel axis
MAX_ASPECT = 200  # limit of Qwen2.5-VL
DEFAULT_FRAMES = 16
DEFAULT_FPS = 2.0  # default of Qwen2.5-VL, for frames without a rate
WIDE_GRAY_MODES = ("I;16", "I;16L", "I;16B", "I;16N", "I", "F")

Result = TypeVar("Result")
OpenedMedia = tuple[list[Image.Image], list[list[Image.Image]], list[float]]  # images, frames of videos, their rates


def open_image(source: Any, allow_urls: bool = False) -> Image.Image:
    """Opens a path, bytes, a data URI, a PIL image or, with `allow_urls`, a URL as RGB; ValueError, which names the image, for
    one that is missing, unreadable, truncated, or of a size out of limits.

    EXIF rotation is applied, transparency is composited over white, gray of 16 bits or of floats is scaled to 8 bits; of an
    animation the first frame is taken.
    """
    return _read(source, _normalized, allow_urls)


def image_size(source: Any) -> Size:
    """Returns width and height of `open_image`'s result from the header of the file, without decoding pixels.

    Raises ValueError as `open_image`, except for files whose pixels are corrupt.
    """
    return _read(source, _upright_size)


def _read(source: Any, use: Callable[[Image.Image], Result], allow_urls: bool = False) -> Result:
    """Returns `use` of the opened image, whose pixels may not be decoded yet; errors are those of `open_image`."""
    name = _name(source)
    try:
        with no_size_warning():
            if allow_urls and str(source).startswith(URLS):
                source = _download(str(source))
            if isinstance(source, Image.Image):
                return use(source)
            with Image.open(_stream(source)) as image:
                return use(image)
    except UnidentifiedImageError as error:
        raise ValueError(f"image {name}: {_unknown_format(source)}") from error
    except ValueError as error:
        raise ValueError(f"image {name}: {error}") from error
    except Image.DecompressionBombError as error:
        raise ValueError(f"image {name}: {TOO_MANY_PIXELS}") from error
    except DECODING_ERRORS as error:
        reason = getattr(error, "strerror", None) or f"corrupt or truncated ({error})"  # of the system, as a missing permission
        raise ValueError(f"image {name}: {reason}") from error


def _upright_size(image: Image.Image) -> Size:
    """Returns the size after the rotation of EXIF, which that of a TIFF contains.

    (A PNG's own `getexif` decodes it to find a chunk after the pixels.)
    """
    _check_size(image.size)
    width, height = image.size
    is_turned = image.format != "TIFF" and Image.Image.getexif(image).get(ExifTags.Base.Orientation, 1) in TURNED
    return (height, width) if is_turned else (width, height)


def limited_size(size: Size, part: dict[str, Any]) -> Size:
    """Returns the size of an image within `min_pixels` and `max_pixels` of its message part, with the same aspect ratio."""
    check_part_keys(part, "image")
    area = size[0] * size[1]
    wanted = min(max(area, part.get("min_pixels") or 0), part.get("max_pixels") or math.inf)
    scale = math.sqrt(wanted / area)
    rounded = math.ceil if scale > 1 else math.floor
    return size if scale == 1 else (max(MIN_SIDE, rounded(size[0] * scale)), max(MIN_SIDE, rounded(size[1] * scale)))


def open_image_part(part: dict[str, Any], allow_urls: bool = False) -> Image.Image:
    """Opens the image of a message part within its limits, with the errors of `open_image`."""
    image = open_image(source_of(part, "image"), allow_urls)
    size = limited_size(image.size, part)
    return image if size == image.size else image.resize(size, Image.Resampling.BICUBIC)


def check_media(source: Any, kind: str = "image") -> None:
    """Raises ValueError if the file of an image or of a video is missing or empty; reads nothing."""
    if isinstance(source, (str, Path)) and not str(source).startswith("data:"):
        _check_path(source, f"{kind} {_name(source)}: ")


def check_part_keys(part: dict[str, Any], name: str) -> None:
    """Raises ValueError for limits of pixels that are none, and for keys of a part that others use to resize or sample."""
    limits = {key: part[key] for key in LIMIT_KEYS if part.get(key) is not None}
    for key, pixels in limits.items():
        if not isinstance(pixels, int) or isinstance(pixels, bool) or pixels <= 0:
            raise ValueError(f"{name}: {key} {pixels!r}, allowed: a number of pixels above 0")
    if len(limits) == 2 and limits["min_pixels"] > limits["max_pixels"]:
        raise ValueError(f"{name}: min_pixels {limits['min_pixels']}, allowed: at most max_pixels {limits['max_pixels']}")
    if limits and part.get("type") == "video":
        raise ValueError(f"{name}: {next(iter(limits))} of a video; it limits images; remove it")
    for key in OF_QWEN:
        if part.get(key) is not None:
            raise ValueError(f"{name}: {key} is not supported; allowed: min_pixels, max_pixels, of a video fps, start, end")


def source_of(part: dict[str, Any], kind: str) -> Any:
    """Returns the source that a message part of this kind ("image" or "video") names; ValueError if it has no known key."""
    check_part_keys(part, kind)
    for key in (kind, "url", "path", "base64"):
        if part.get(key) is not None:
            return part[key].removeprefix(FILE_URL) if isinstance(part[key], str) else part[key]
    raise ValueError(f"{kind}: a message part of this type names no {kind}; add the key {kind!r}")


def open_video_part(part: dict[str, Any], num_frames: int | None = None) -> Video:
    """Opens the video of a message part from `start` to `end`, with the errors of `open_video` and of `video_times`."""
    source = source_of(part, "video")
    segment, fps = video_times(part, f"video {_name(source)}")
    return open_video(source, num_frames, segment, DEFAULT_FPS if fps is None else fps)


def open_media(messages: Messages, num_frames: int | None = None, allow_urls: bool = True) -> OpenedMedia:
    """Opens every image and video of the messages in reading order; arguments and errors as for `open_video` and `open_image`.

    Returns images (RGB), frames of each video, and frames per second of each video.
    """
    parts = [part for message in messages for part in parts_of(message, "image", "video")]
    images = [open_image_part(part, allow_urls) for part in parts if part["type"] == "image"]
    videos = [open_video_part(part, num_frames) for part in parts if part["type"] == "video"]
    return images, [video.frames for video in videos], [video.fps for video in videos]


def video_size(part: dict[str, Any], num_frames: int | None = None) -> tuple[VideoSize, float]:
    """Returns the frames and the size of `open_video_part`'s result and its frames per second, without decoding pixels.

    Raises ValueError as `open_video_part`, except for corrupt pixels and frames of different sizes.
    """
    source = source_of(part, "video")
    segment, fps = video_times(part, f"video {_name(source)}")
    rate = DEFAULT_FPS if fps is None else fps
    frames, rate = _sampled(source, num_frames, segment, rate, measure_video)
    return frames if isinstance(frames, VideoSize) else VideoSize(len(frames), *image_size(frames[0])), rate


def open_video(source: Any, num_frames: int | None = None, segment: Segment = None, frames_per_s: float = DEFAULT_FPS) -> Video:
    """Opens at most `num_frames` evenly spaced RGB frames of a list of frames, a folder of frames, or a video file.

    ValueError, which names the video, if it is missing or unreadable, or has frames of different sizes.

    Args:
        num_frames: None = all frames of a list, `DEFAULT_FRAMES` of a folder or file.
        segment: (start, end) in seconds; None = the complete video.
        frames_per_s: rate of a list or folder of frames before sampling; a video file has its own.
    """
    frames, fps = _sampled(source, num_frames, segment, frames_per_s, read_video)
    try:
        images = [open_image(frame) for frame in frames]
    except ValueError as error:
        raise ValueError(f"video {_name(source)}: {error}") from error
    if len({image.size for image in images}) > 1:
        raise ValueError(f"video {_name(source)}: frames of different sizes")
    return Video(images, fps)


def _sampled(
    source: Any, num_frames: int | None, segment: Segment, frames_per_s: float, read_file: Callable[..., Any]
) -> tuple[Any, float]:
    """Returns the sampled frames of a list or folder, or what `read_file` returns for a file, and their number per second."""
    name = f"video {_name(source)}"
    if isinstance(source, (str, Path)):
        num_frames = DEFAULT_FRAMES if num_frames is None else num_frames
        _check_path(source, f"{name}: ")
        if not Path(source).is_dir():
            return read_file(Path(source), num_frames, segment)
        source = frame_files(Path(source))
    wanted, fps = sample_frames(len(source), frames_per_s, segment, len(source) if num_frames is None else num_frames)
    if not wanted:
        raise ValueError(f"{name}: no frames")
    return [source[i] for i in wanted], fps


def frame_files(folder: Path) -> list[Path]:
    """Returns the image files of a folder in natural order (frame2 before frame10)."""
    known = Image.registered_extensions()
    files = [path for path in folder.iterdir() if path.suffix.lower() in known]
    return sorted(files, key=lambda path: [int(s) if s.isdigit() else s for s in re.split(r"(\d+)", path.name)])


def _download(url: str) -> Image.Image:
    from transformers.image_utils import load_image  # imports torch

    try:
        return load_image(url)
    except (UnidentifiedImageError, Image.DecompressionBombError):
        raise
    except Exception as error:  # transformers downloads with one of several clients, each with its own errors
        raise ValueError(f"could not be fetched ({error})") from error


def _stream(source: Any) -> Any:
    if isinstance(source, bytes):
        return io.BytesIO(source)
    if str(source).startswith("data:"):
        return io.BytesIO(decode_data_url(str(source)))
    _check_path(source)
    return source


def decode_data_url(url: str) -> bytes:
    """Returns the bytes of a data URL in base64, with or without padding; ValueError if it is none."""
    header, comma, data = url.partition(",")
    if not comma or not header.endswith(";base64"):
        raise ValueError("not a data URL in base64; give data:image/png;base64,...")
    data = "".join(data.split())
    try:
        return base64.b64decode(data + "=" * (-len(data) % 4), validate=True)
    except ValueError as error:
        raise ValueError("not valid base64") from error


def _check_path(source: Any, prefix: str = "") -> None:
    if str(source).startswith(URLS):
        raise ValueError(f"{prefix}a URL; download it and give the file")
    if not str(source).strip():  # Path would read it as the current folder
        raise ValueError(f"{prefix}an empty path; name a file")
    if not os.path.exists(source):  # unlike Path.exists, False for an invalid file name
        raise ValueError(f"{prefix}no such file")
    if os.path.isfile(source) and os.path.getsize(source) == 0:
        raise ValueError(f"{prefix}an empty file; copy it again")


def _check_size(size: tuple[int, int]) -> None:
    width, height = size
    if min(size) < MIN_SIDE:
        raise ValueError(f"{width}x{height} pixels, allowed: at least {MIN_SIDE} a side")
    if max(size) > MAX_ASPECT * min(size):
        raise ValueError(f"{width}x{height} pixels, allowed: sides within a factor of {MAX_ASPECT}")
    if width * height > MAX_PIXELS:
        raise ValueError(f"{width}x{height} pixels, allowed: at most {MAX_PIXELS}")


def _normalized(image: Image.Image) -> Image.Image:
    _check_size(image.size)
    image = ImageOps.exif_transpose(image)
    if image.mode in WIDE_GRAY_MODES:
        return _from_wide_gray(image)
    if image.has_transparency_data:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, "white")
        return Image.alpha_composite(white, image).convert("RGB")
    return image.convert("RGB")


def _from_wide_gray(image: Image.Image) -> Image.Image:
    """Scales gray of more than 8 bits, of floats those from 0 to 1 too, to 8 bits; PIL's conversion clips at 255."""
    values = np.asarray(image, dtype=np.float64)
    low, high = values.min(), values.max()
    if not (np.isfinite(low) and np.isfinite(high)):
        raise ValueError("has pixels that are no numbers (NaN or infinite)")
    if low >= 0:
        ranges = (1.0, 255.0, 65535.0) if image.mode == "F" else (255.0, 65535.0)
        low, high = 0.0, next((limit for limit in ranges if high <= limit), high)
    scaled = (values - low) * (255.0 / max(high - low, 1e-12))
    return Image.fromarray(np.clip(scaled, 0, 255).round().astype(np.uint8)).convert("RGB")


def _unknown_format(source: Any) -> str:
    """Returns why a file, or what a URL leads to, is no image that can be opened; names formats that others can open."""
    if isinstance(source, str) and source.startswith(URLS):
        return NO_IMAGE
    stream = _stream(source)
    with stream if isinstance(stream, io.BytesIO) else open(stream, "rb") as file:
        head = file.read(512)
    for mark, name in OTHER_FORMATS.items():
        if mark in head:
            return f"{name}, which is not supported; convert it to PNG or JPEG"
    return NO_IMAGE


def _name(source: Any) -> str:
    if isinstance(source, (str, Path)):
        return str(source)[:200] if str(source).strip() else repr(source)
    return f"({len(source)} bytes)" if isinstance(source, bytes) else f"({type(source).__name__})"
