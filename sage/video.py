"""Frames of a video file, with whichever reader is installed."""

from __future__ import annotations

import importlib
import importlib.util
import struct
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from PIL import Image

VIDEO_SUFFIXES = (".mp4", ".mkv", ".webm", ".avi", ".mov", ".m4v", ".gif")
READERS = ("av", "cv2")
# What PIL's decoders raise on damaged bytes; each format has its own ways (AVIF: RuntimeError, TIFF: TypeError, ...).
BROKEN = (OSError, SyntaxError, EOFError, RuntimeError, TypeError, LookupError, ArithmeticError, struct.error)
MAX_PIXELS = 100_000_000  # of a picture or a frame
TOO_MANY_PIXELS = f"too many pixels, allowed: at most {MAX_PIXELS}"

Segment = tuple[float, float] | None  # seconds


def read_video(path: Path, num_frames: int, segment: Segment = None) -> list[Image.Image]:
    """At most `num_frames` evenly spaced frames, of the whole or of a segment.

    Raises:
        ValueError: no reader is installed, or the file is not a video.
    """
    reader = "gif" if path.suffix.lower() == ".gif" else _reader(path)
    try:
        with unwarned():
            frames = _read(reader, path, num_frames, segment)
    except Image.DecompressionBombError as error:
        raise ValueError(f"video {path}: {TOO_MANY_PIXELS}") from error
    except (ValueError, *BROKEN) as error:
        raise ValueError(f"video {path}: not a readable video ({error})") from error
    if not frames:
        raise ValueError(f"video {path}: no frames could be read")
    return frames


def _reader(path: Path) -> str:
    name = next((name for name in READERS if importlib.util.find_spec(name)), None)
    if name is None:
        raise ValueError(f"video {path}: no video reader is installed; pip install av, or give a folder of frames")
    return name


def _read(reader: str, path: Path, num_frames: int, segment: Segment) -> list[Image.Image]:
    if reader == "gif":
        return _read_gif(path, num_frames)
    return _read_av(path, num_frames, segment) if reader == "av" else _read_cv2(path, num_frames, segment)


@contextmanager
def unwarned() -> Iterator[None]:
    """Keeps PIL from warning of big pictures; its limit for that is below `MAX_PIXELS`, that of its error above."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)
        yield


def spaced(total: int, count: int) -> list[int]:
    """`count` indices out of `total`, the middles of equal pieces; all of them where there are no more.

    Example: spaced(10, 2) == [2, 7].
    """
    if total <= count:
        return list(range(total))
    return [int((2 * i + 1) * total / (2 * count)) for i in range(count)]


def within(total: int, frames_per_s: float, segment: Segment) -> range:
    """The frame numbers of a segment, at least one."""
    if segment is None:
        return range(total)
    first = min(max(0, round(segment[0] * frames_per_s)), total - 1)
    return range(first, max(first + 1, min(total, round(segment[1] * frames_per_s))))


def _wanted(total: int, frames_per_s: float, segment: Segment, num_frames: int) -> set[int]:
    frames = within(total, frames_per_s, segment) if total else range(0)
    return {frames[i] for i in spaced(len(frames), num_frames)}


def _read_gif(path: Path, num_frames: int) -> list[Image.Image]:
    with Image.open(path) as picture:
        total = getattr(picture, "n_frames", 1)
        frames = []
        for i in spaced(total, num_frames):
            picture.seek(i)
            frames.append(picture.convert("RGB"))
    return frames


def _read_av(path: Path, num_frames: int, segment: Segment) -> list[Image.Image]:
    av: Any = importlib.import_module("av")
    try:
        with av.open(str(path)) as container:
            rate = float(container.streams.video[0].average_rate or 1)
            total = sum(1 for _ in container.decode(video=0))
        wanted = _wanted(total, rate, segment, num_frames)
        with av.open(str(path)) as container:
            return [frame.to_image() for i, frame in enumerate(container.decode(video=0)) if i in wanted]
    except av.error.FFmpegError as error:  # some are exceptions of no common kind
        raise ValueError(str(error)) from error


def _read_cv2(path: Path, num_frames: int, segment: Segment) -> list[Image.Image]:
    cv2: Any = importlib.import_module("cv2")
    capture = cv2.VideoCapture(str(path))
    total, rate = int(capture.get(cv2.CAP_PROP_FRAME_COUNT)), capture.get(cv2.CAP_PROP_FPS) or 1.0
    wanted = _wanted(total, rate, segment, num_frames)
    frames: list[Image.Image] = []
    try:
        for index in range(total):
            found, frame = capture.read()
            if not found:
                break
            if index in wanted:
                frames.append(Image.fromarray(cv2.cvtColor(frame, cv2.COLOR_BGR2RGB)))
    except cv2.error as error:  # an exception of no common kind
        raise ValueError(str(error)) from error
    finally:
        capture.release()
    return frames
