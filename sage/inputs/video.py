"""Frames of a video file, with whichever reader is installed, and how many of them make a second.

Owns: which frames of a clip are taken, reading them, what decoders raise on damaged bytes. Does not own: frames in hand or
in a folder, limits on size (sage.inputs.media).
"""

from __future__ import annotations

import importlib
import importlib.util
import math
import struct
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from PIL import Image

VIDEO_SUFFIXES = (".mp4", ".mkv", ".webm", ".avi", ".mov", ".m4v", ".gif")
READERS = ("av", "cv2")
CLIP_KEYS = ("fps", "start", "end")  # of a message part: frames per second, and the segment in seconds
UNTOLD_FPS = 10.0  # of a file that does not tell; what browsers take for a GIF without delays
# What PIL's decoders raise on damaged bytes; each format has its own ways (AVIF: RuntimeError, TIFF: TypeError, ...).
BROKEN = (OSError, SyntaxError, EOFError, RuntimeError, TypeError, LookupError, ArithmeticError, struct.error)
MAX_PIXELS = 100_000_000  # of a picture or a frame
TOO_MANY_PIXELS = f"too many pixels, allowed: at most {MAX_PIXELS}"

Segment = tuple[float, float] | None  # seconds


class Clip(NamedTuple):
    """Frames (RGB) and how many of them make a second."""

    frames: list[Image.Image]
    fps: float


Reader = Callable[[Path, int, Segment], Clip]


def read_video(path: Path, num_frames: int, segment: Segment = None) -> Clip:
    """At most `num_frames` evenly spaced frames, of the whole or of a segment.

    Raises:
        ValueError: no reader is installed, or the file is not a video.
    """
    read = _read_gif if path.suffix.lower() == ".gif" else _reader(path)
    try:
        with unwarned():
            clip = read(path, num_frames, segment)
    except Image.DecompressionBombError as error:
        raise ValueError(f"video {path}: {TOO_MANY_PIXELS}") from error
    except (ValueError, *BROKEN) as error:
        raise ValueError(f"video {path}: not a readable video ({error})") from error
    if not clip.frames:
        raise ValueError(f"video {path}: no frames could be read")
    return clip


@contextmanager
def unwarned() -> Iterator[None]:
    """Keeps PIL from warning of big pictures; its limit for that is below `MAX_PIXELS`, that of its error above."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)
        yield


def clip_times(part: dict[str, Any], name: str) -> tuple[Segment, float | None]:
    """The segment (seconds) and the frames per second that a message part names, None for what it does not.

    A part with a start alone goes on to its clip's end, one with an end alone begins where its clip does.

    Args:
        name: the clip, in errors.

    Raises:
        ValueError: not a number, no frames per second, or an end before the start.
    """
    fps, start, end = (_number(part.get(key), f"{name}: {key}") for key in CLIP_KEYS)
    if fps is not None and fps <= 0:
        raise ValueError(f"{name}: fps {fps:g}, allowed: above 0, the frames per second")
    if start is None and end is None:
        return None, fps
    segment = (0.0 if start is None else start, math.inf if end is None else end)
    if segment[1] < max(segment[0], 0.0):
        raise ValueError(f"{name}: start {segment[0]:g} and end {segment[1]:g}, allowed: seconds, the end not before the start")
    return segment, fps


def _number(value: Any, name: str) -> float | None:
    try:
        number = None if value is None else float(value)
    except (TypeError, ValueError):
        number = math.nan
    if number is None or math.isfinite(number):
        return number
    raise ValueError(f"{name} {value!r}, allowed: a number")


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
    begin, end = (round(min(max(0.0, at * frames_per_s), total)) for at in segment)
    first = min(begin, total - 1)
    return range(first, max(first + 1, end))


def sample(total: int, frames_per_s: float, segment: Segment, num_frames: int) -> tuple[list[int], float]:
    """The numbers of at most `num_frames` frames of a segment, and how many of those make a second.

    Example: 60 s of 30 frames per second by 16 frames are 16 / 60 frames per second: sample(1800, 30.0, None, 16)[1].
    """
    if total <= 0:
        return [], frames_per_s
    frames = within(total, frames_per_s, segment)
    taken = [frames[i] for i in spaced(len(frames), num_frames)]
    return taken, frames_per_s * (len(taken) / len(frames))


def _reader(path: Path) -> Reader:
    name = next((name for name in READERS if importlib.util.find_spec(name)), None)
    if name is None:
        raise ValueError(f"video {path}: no video reader is installed; pip install av, or give a folder of frames")
    return _read_av if name == "av" else _read_cv2


def _read_gif(path: Path, num_frames: int, segment: Segment) -> Clip:
    with Image.open(path) as picture:
        total = getattr(picture, "n_frames", 1)
        duration_s = sum(_shown_s(picture, i) for i in range(total))
        wanted, fps = sample(total, total / duration_s, segment, num_frames)
        return Clip([_gif_frame(picture, i) for i in wanted], fps)


def _shown_s(picture: Image.Image, index: int) -> float:
    picture.seek(index)
    return picture.info.get("duration", 0) / 1000 or 1 / UNTOLD_FPS


def _gif_frame(picture: Image.Image, index: int) -> Image.Image:
    picture.seek(index)
    return picture.convert("RGB")


def _read_av(path: Path, num_frames: int, segment: Segment) -> Clip:
    av: Any = importlib.import_module("av")
    try:
        with av.open(str(path)) as container:
            rate = float(container.streams.video[0].average_rate or UNTOLD_FPS)
            total = sum(1 for _ in container.decode(video=0))
        wanted, fps = sample(total, rate, segment, num_frames)
        kept = set(wanted)
        with av.open(str(path)) as container:
            return Clip([frame.to_image() for i, frame in enumerate(container.decode(video=0)) if i in kept], fps)
    except av.error.FFmpegError as error:  # some are exceptions of no common kind
        raise ValueError(str(error)) from error


def _read_cv2(path: Path, num_frames: int, segment: Segment) -> Clip:
    cv2: Any = importlib.import_module("cv2")
    capture = cv2.VideoCapture(str(path))
    total, rate = int(capture.get(cv2.CAP_PROP_FRAME_COUNT)), capture.get(cv2.CAP_PROP_FPS) or UNTOLD_FPS
    wanted, fps = sample(total, rate, segment, num_frames)
    kept = set(wanted)
    frames: list[Image.Image] = []
    try:
        for index in range(total):
            found, frame = capture.read()
            if not found:
                break
            if index in kept:
                frames.append(Image.fromarray(cv2.cvtColor(frame, cv2.COLOR_BGR2RGB)))
    except cv2.error as error:  # an exception of no common kind
        raise ValueError(str(error)) from error
    finally:
        capture.release()
    return Clip(frames, fps)
