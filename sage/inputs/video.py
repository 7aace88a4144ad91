"""Video files: reading and sampling of frames."""

from __future__ import annotations

import importlib
import importlib.util
import math
import struct
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from PIL import Image, ImageSequence

VIDEO_SUFFIXES = (".mp4", ".mkv", ".webm", ".avi", ".mov", ".m4v", ".gif")
READER = "av"
TIME_KEYS = ("fps", "start", "end")  # of a message part: frames per second, and the segment in seconds
UNKNOWN_FPS = 10.0  # assumed of files without a rate, as browsers do for a GIF without delays
# Raised by PIL's decoders on corrupt bytes, differently for each format (AVIF: RuntimeError, TIFF: TypeError, ...).
DECODING_ERRORS = (OSError, SyntaxError, EOFError, RuntimeError, TypeError, LookupError, ArithmeticError, struct.error)
MAX_PIXELS = 100_000_000  # of an image or a frame
TOO_MANY_PIXELS = f"too many pixels, allowed: at most {MAX_PIXELS}"

Segment = tuple[float, float] | None  # seconds
Size = tuple[int, int]  # width and height in pixels


class VideoSize(NamedTuple):
    """Number of the sampled frames of a video, and their width and height in pixels."""

    frames: int
    width: int
    height: int


class Video(NamedTuple):
    """RGB frames, and the number of them per second."""

    frames: list[Image.Image]
    fps: float


def read_video(path: Path, num_frames: int, segment: Segment = None) -> Video:
    """Reads at most `num_frames` evenly spaced frames of a video file or of a segment of it.

    Raises ValueError if the file cannot be read as a video, or its format needs `av`, which is not installed.
    """
    is_gif = path.suffix.lower() == ".gif"
    if not is_gif and importlib.util.find_spec(READER) is None:
        raise ValueError(f"video {path}: no video reader is installed; pip install {READER}, or give a folder of frames")
    with _naming(path):
        video = (_read_gif if is_gif else _read_av)(path, num_frames, segment)
    if not video.frames:
        raise ValueError(f"video {path}: no frames could be read")
    return video


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Turns an error of a decoder into a ValueError that names the video."""
    try:
        with no_size_warning():
            yield
    except Image.DecompressionBombError as error:
        raise ValueError(f"video {path}: {TOO_MANY_PIXELS}") from error
    except Exception as error:
        # some errors of `av` are subclasses of no built-in one
        if isinstance(error, (ValueError, *DECODING_ERRORS)) or type(error).__module__.startswith(READER):
            raise ValueError(f"video {path}: not a readable video ({error})") from error
        raise


def measure_video(path: Path, num_frames: int, segment: Segment = None) -> tuple[VideoSize, float]:
    """Returns the frames and the size of `read_video`'s result and its frames per second; raises as it.

    Of a file for `av` the container is read, whose number of frames decoding could fall short of if the file is corrupt. A GIF,
    which has neither a rate nor a number of frames, is decoded.
    """
    if path.suffix.lower() == ".gif" or importlib.util.find_spec(READER) is None:
        video = read_video(path, num_frames, segment)
        return VideoSize(len(video.frames), *video.frames[0].size), video.fps
    av: Any = importlib.import_module(READER)
    with _naming(path):
        with av.open(str(path)) as container:
            stream = container.streams.video[0]
            rate = float(stream.average_rate or UNKNOWN_FPS)
            total = stream.frames or sum(1 for packet in container.demux(stream) if packet.size)
        with av.open(str(path)) as container:
            first = next(container.decode(video=0), None)
            width, height = (0, 0) if first is None else _upright(first).size
    wanted, fps = sample_frames(total, rate, segment, num_frames)
    if not wanted:
        raise ValueError(f"video {path}: no frames could be read")
    return VideoSize(len(wanted), width, height), fps


@contextmanager
def no_size_warning() -> Iterator[None]:
    """Suppresses PIL's warning for large images, whose limit is below `MAX_PIXELS`; the limit of PIL's error is above it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)
        yield


def video_times(part: dict[str, Any], name: str) -> tuple[Segment, float | None]:
    """Returns the segment (seconds) and the frames per second of a message part; None for those it does not have.

    Without an end, a segment ends with the video; without a start, it begins with it. ValueError, which names the video, for
    what is no number, a rate of 0 or less, or an end before the start.
    """
    fps, start, end = (_number(part.get(key), f"{name}: {key}") for key in TIME_KEYS)
    if fps is not None and fps <= 0:
        raise ValueError(f"{name}: fps {fps:g}, allowed: above 0, the frames per second")
    if start is None and end is None:
        return None, fps
    segment = (0.0 if start is None else start, math.inf if end is None else end)
    if segment[1] < max(segment[0], 0.0):
        raise ValueError(f"{name}: start {segment[0]:g} and end {segment[1]:g}, allowed: seconds, the end not before the start")
    return segment, fps


def _number(value: Any, name: str) -> float | None:
    if value is None:
        return None
    with suppress(TypeError, ValueError):
        if math.isfinite(number := float(value)):
            return number
    raise ValueError(f"{name} {value!r}, allowed: a number")


def sample_frames(total: int, frames_per_s: float, segment: Segment, num_frames: int) -> tuple[list[int], float]:
    """Returns the numbers of at most `num_frames` frames of a segment, the middles of equal intervals, and their rate.

    A segment has at least one frame. Example: sample_frames(10, 2.0, (0.0, 5.0), 2) == ([2, 7], 0.4).
    """
    if total <= 0:
        return [], frames_per_s
    begin, end = (round(min(max(0.0, at * frames_per_s), total)) for at in segment or (0.0, math.inf))
    first = min(begin, total - 1)
    length = max(1, end - first)
    count = min(length, num_frames)
    return [first + int((2 * i + 1) * length / (2 * count)) for i in range(count)], frames_per_s * (count / length)


def _read_gif(path: Path, num_frames: int, segment: Segment) -> Video:
    with Image.open(path) as image:
        frames = ImageSequence.Iterator(image)
        durations_s = [frame.info.get("duration", 0) / 1000 or 1 / UNKNOWN_FPS for frame in frames]
        wanted, fps = sample_frames(len(durations_s), len(durations_s) / sum(durations_s), segment, num_frames)
        return Video([frames[i].convert("RGB") for i in wanted], fps)


def _upright(frame: Any) -> Image.Image:
    """Returns a frame of `av` as it is shown: turned and mirrored by the display matrix of its file, which phones write."""
    image: Image.Image = frame.to_image()
    matrix = frame.side_data.get("DISPLAYMATRIX")
    if matrix is None:
        return image
    right, down, _, to_right, to_down = struct.unpack("=5i", bytes(matrix)[:20])  # where its x axis goes, and its y axis
    if abs(down) > abs(right):
        image, right, to_down = image.transpose(Image.Transpose.TRANSPOSE), to_right, down
    image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if right < 0 else image
    return image.transpose(Image.Transpose.FLIP_TOP_BOTTOM) if to_down < 0 else image


def _read_av(path: Path, num_frames: int, segment: Segment) -> Video:
    av: Any = importlib.import_module(READER)
    with av.open(str(path)) as container:
        rate = float(container.streams.video[0].average_rate or UNKNOWN_FPS)
        total = sum(1 for _ in container.decode(video=0))
    wanted, fps = sample_frames(total, rate, segment, num_frames)
    kept = set(wanted)
    with av.open(str(path)) as container:
        return Video([_upright(frame) for i, frame in enumerate(container.decode(video=0)) if i in kept], fps)
