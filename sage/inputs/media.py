"""Pictures and clips of any sort -> RGB pictures a vision tower can trust.

Owns: opening and normalising, what message parts name included; limits on size. Does not own: reading video files and which
frames are taken (sage.inputs.video), resizing and patches (the target's own image processor does that).
"""

from __future__ import annotations

import base64
import binascii
import io
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError
from transformers.image_utils import load_image

from sage.inputs.video import BROKEN, MAX_PIXELS, TOO_MANY_PIXELS, Clip, Segment, clip_times, read_video, sample, unwarned

MIN_SIDE = 2  # a picture of one pixel shows nothing, and a target cannot tell its channels from its rows
MAX_ASPECT = 200  # Qwen2.5-VL's own limit; beyond it patches are slivers
DEFAULT_FRAMES = 16
DEFAULT_FPS = 2.0  # of frames that come without; Qwen2.5-VL's own
SIXTEEN_BIT = ("I;16", "I;16L", "I;16B", "I;16N", "I", "F")


def open_picture(source: Any, allow_urls: bool = False) -> Image.Image:
    """A path, bytes, data URI or PIL picture, and a URL if allowed -> RGB picture.

    EXIF rotation is applied, alpha is laid over white, CMYK and palettes are converted, 16-bit grey is scaled to 8
    bits, an animation gives its first frame.

    Raises:
        ValueError: missing, unreadable, truncated, or of an extreme size; names the picture.
    """
    name = _name(source)
    try:
        with unwarned():
            if allow_urls and str(source).startswith(("http://", "https://")):
                source = _download(str(source))
            if isinstance(source, Image.Image):
                return _normalised(source)
            with Image.open(_stream(source)) as picture:
                return _normalised(picture)
    except ValueError as error:
        raise ValueError(f"image {name}: {error}") from error
    except (*BROKEN, Image.DecompressionBombError) as error:
        raise ValueError(f"image {name}: {_why(error)}") from error


def check_picture(source: Any) -> None:
    """Raises ValueError where a picture's file is absent; reads nothing."""
    if isinstance(source, (str, Path)) and not str(source).startswith("data:"):
        _check_path(source, f"image {_name(source)}: ")


def source_of(part: dict[str, Any], kind: str) -> Any:
    """What a message part of this kind ("image" or "video") shows.

    Raises:
        ValueError: it names nothing.
    """
    for key in (kind, "url", "path", "base64"):
        if part.get(key) is not None:
            return part[key]
    raise ValueError(f"{kind}: a message part of this type names no {kind}; add the key {kind!r}")


def open_clip_part(part: dict[str, Any], num_frames: int | None = None) -> Clip:
    """The clip of a message part, from its `start` to its `end`, at its `fps` where it is frames.

    Args:
        num_frames: as in `open_clip`.

    Raises:
        ValueError: as `open_clip`, or one of the three is not what it should be.
    """
    source = source_of(part, "video")
    segment, fps = clip_times(part, f"video {_name(source)}")
    return open_clip(source, num_frames, segment, DEFAULT_FPS if fps is None else fps)


def open_clip(source: Any, num_frames: int | None = None, segment: Segment = None, frames_per_s: float = DEFAULT_FPS) -> Clip:
    """Frames, a folder of frames, or a video file -> at most `num_frames` RGB frames, evenly spaced, and their rate.

    Args:
        num_frames: None takes every frame in hand, and `DEFAULT_FRAMES` of a folder or a file.
        segment: (from, to) in seconds; None for the whole.
        frames_per_s: of frames and folders of them, before any are left out; a video file knows its own.

    Raises:
        ValueError: nothing there, frames of different sizes, or no reader for video files.
    """
    if num_frames is None:
        num_frames = DEFAULT_FRAMES if isinstance(source, (str, Path)) else len(source)
    frames, fps = _sampled(source, num_frames, segment, frames_per_s)
    if not frames:
        raise ValueError(f"video {_name(source)}: no frames")
    pictures = _open_frames(frames, f"video {_name(source)}")
    if len({picture.size for picture in pictures}) > 1:
        raise ValueError(f"video {_name(source)}: frames of different sizes")
    return Clip(pictures, fps)


def _sampled(source: Any, num_frames: int, segment: Segment, frames_per_s: float) -> tuple[Sequence[Any], float]:
    if isinstance(source, (str, Path)):
        _check_path(source, f"video {_name(source)}: ")
        if not Path(source).is_dir():
            return read_video(Path(source), num_frames, segment)
        source = frame_files(Path(source))
    wanted, fps = sample(len(source), frames_per_s, segment, num_frames)
    return [source[i] for i in wanted], fps


def _open_frames(frames: Sequence[Any], name: str) -> list[Image.Image]:
    try:
        return [open_picture(frame) for frame in frames]
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error


def frame_files(folder: Path) -> list[Path]:
    """The picture files of a folder in natural order (frame2 before frame10)."""
    known = Image.registered_extensions()
    files = [path for path in folder.iterdir() if path.suffix.lower() in known]
    return sorted(files, key=lambda path: [int(s) if s.isdigit() else s for s in re.split(r"(\d+)", path.name)])


def _download(url: str) -> Image.Image:
    try:
        return load_image(url)
    except (UnidentifiedImageError, Image.DecompressionBombError):
        raise
    except Exception as error:  # transformers fetches with whichever client is installed, each with errors of its own
        raise ValueError(f"could not be fetched ({error})") from error


def _stream(source: Any) -> Any:
    if isinstance(source, bytes):
        return io.BytesIO(source)
    if str(source).startswith("data:"):
        try:
            return io.BytesIO(base64.b64decode(str(source).partition(",")[2], validate=True))
        except binascii.Error as error:
            raise ValueError("not valid base64") from error
    _check_path(source)
    return source


def _check_path(source: Any, prefix: str = "") -> None:
    if str(source).startswith(("http://", "https://")):
        raise ValueError(f"{prefix}a URL; download it and give the file (training must not depend on the web)")
    if not str(source).strip():  # which Path would take for the current folder
        raise ValueError(f"{prefix}an empty path; name a file")
    if not os.path.exists(source):  # unlike Path.exists, False of a name that no file can have
        raise ValueError(f"{prefix}no such file")


def _check_size(size: tuple[int, int]) -> None:
    width, height = size
    if min(size) < MIN_SIDE:
        raise ValueError(f"{width}x{height} pixels, allowed: at least {MIN_SIDE} a side")
    if max(size) > MAX_ASPECT * min(size):
        raise ValueError(f"{width}x{height} pixels, allowed: sides within a factor of {MAX_ASPECT}")
    if width * height > MAX_PIXELS:
        raise ValueError(f"{width}x{height} pixels, allowed: at most {MAX_PIXELS}")


def _normalised(picture: Image.Image) -> Image.Image:
    _check_size(picture.size)
    return _to_rgb(ImageOps.exif_transpose(picture))


def _to_rgb(picture: Image.Image) -> Image.Image:
    if picture.mode in SIXTEEN_BIT:
        return _from_wide_grey(picture)
    if picture.has_transparency_data:
        picture = picture.convert("RGBA")
        paper = Image.new("RGBA", picture.size, "white")
        return Image.alpha_composite(paper, picture).convert("RGB")
    return picture.convert("RGB")


def _from_wide_grey(picture: Image.Image) -> Image.Image:
    """Grey of more than 8 bits: PIL's own conversion clips at 255, so a 16-bit photo would come out white."""
    values = np.asarray(picture, dtype=np.float64)
    low, high = (0.0, 65535.0) if values.min() >= 0 and 255 < values.max() <= 65535 else (values.min(), values.max())
    if values.min() >= 0 and values.max() <= 255:
        low, high = 0.0, 255.0
    scaled = (values - low) * (255.0 / max(high - low, 1e-12))
    return Image.fromarray(np.clip(scaled, 0, 255).round().astype(np.uint8)).convert("RGB")


def _why(error: Exception) -> str:
    if isinstance(error, UnidentifiedImageError):
        return "not a picture in a known format"
    if isinstance(error, Image.DecompressionBombError):
        return TOO_MANY_PIXELS
    if isinstance(error, OSError) and error.strerror:  # the system's own: a folder, no permission
        return error.strerror
    return f"broken or truncated ({error})"


def _name(source: Any) -> str:
    if isinstance(source, (str, Path)):
        return str(source)[:200] if str(source).strip() else repr(source)
    return f"({len(source)} bytes)" if isinstance(source, bytes) else f"({type(source).__name__})"
