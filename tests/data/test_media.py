"""Images and videos of unusual formats: RGB frames with the sizes that their headers promise, or errors of one line."""

import base64
import importlib.util
import io
import random
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from PIL import Image, UnidentifiedImageError
from support.data_helpers import make_image, make_noise, make_processor, save_images, user
from support.messages import refused
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from data_prep.conversation import Conversation, check_conversation
from sage.inputs import video
from sage.inputs.media import (
    MAX_PIXELS,
    check_media,
    image_size,
    limited_size,
    open_image,
    open_video,
    open_video_part,
    video_size,
)
from sage.inputs.video import Video, sample_frames

RAMP = np.tile(np.linspace(0, 1, 32, dtype=np.float32), (16, 1))  # 32 x 16 pixels, dark to bright


def encoded(image: Image.Image, kind: str, **options: Any) -> bytes:
    stream = io.BytesIO()
    image.save(stream, kind, **options)
    return stream.getvalue()


def turned(kind: str, orientation: int, image: Image.Image | None = None) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return encoded(image or make_noise(32, 16), kind, exif=exif)


def animated(kind: str) -> bytes:
    return encoded(Image.new("RGB", (32, 16), "red"), kind, save_all=True, append_images=[Image.new("RGB", (32, 16), "blue")])


RED, BLUE, WHITE = (255, 0, 0), (0, 0, 255), (255, 255, 255)
FLAT = Image.new("RGB", (32, 16), "red")
RED_ABOVE_BLUE = Image.fromarray(np.repeat(np.array([[RED] * 32, [BLUE] * 32], dtype=np.uint8), 8, axis=0))
OPENED: dict[str, tuple[Callable[[], bytes], tuple[int, int], tuple[int, int, int] | None]] = {  # file, size, first pixel
    "JPEG": (lambda: encoded(make_noise(32, 16), "JPEG"), (32, 16), None),
    "CMYK": (lambda: encoded(Image.new("CMYK", (32, 16), (0, 255, 255, 0)), "JPEG", quality=100), (32, 16), None),
    "gray with alpha": (lambda: encoded(Image.new("LA", (32, 16), (0, 128)), "PNG"), (32, 16), (127, 127, 127)),
    "transparent": (lambda: encoded(Image.new("RGBA", (32, 16), (255, 0, 0, 0)), "PNG"), (32, 16), WHITE),
    "palette with alpha": (lambda: encoded(FLAT.quantize(4), "PNG", transparency=0), (32, 16), WHITE),
    "16-bit gray": (lambda: encoded(Image.fromarray(np.full((16, 32), 32768, np.uint16)), "PNG"), (32, 16), (128, 128, 128)),
    "turned clockwise": (lambda: turned("PNG", 6, RED_ABOVE_BLUE), (16, 32), BLUE),
    "bilevel": (lambda: encoded(Image.new("1", (32, 16), 1), "PNG"), (32, 16), WHITE),
    "animated GIF": (lambda: animated("GIF"), (32, 16), RED),
    "APNG": (lambda: animated("PNG"), (32, 16), RED),
    "pages of TIFF": (lambda: animated("TIFF"), (32, 16), RED),
    "floats from 0 to 1": (lambda: encoded(Image.fromarray(1 - RAMP), "TIFF"), (32, 16), WHITE),
    "floats from 0 to 255": (lambda: encoded(Image.fromarray(255 - 255 * RAMP), "TIFF"), (32, 16), WHITE),
    "negative floats": (lambda: encoded(Image.fromarray(1 - 2 * RAMP), "TIFF"), (32, 16), WHITE),
    **{
        f"{kind}, EXIF {n}": (lambda kind=kind, n=n: turned(kind, n), (16, 32) if 5 <= n <= 8 else (32, 16), None)  # type: ignore[misc]
        for kind in ("JPEG", "PNG", "TIFF", "WEBP")
        for n in (1, 3, 6, 8, 9)
    },
}
REFUSED: dict[str, tuple[Callable[[], bytes], str]] = {
    "1 x N": (lambda: encoded(Image.new("RGB", (1, 40)), "PNG"), "1x40"),
    "strip": (lambda: encoded(Image.new("RGB", (1000, 2)), "PNG"), "1000x2"),
    "truncated": (lambda: encoded(make_noise(), "JPEG")[:600], "truncated"),
    "NaN": (lambda: encoded(Image.fromarray(np.where(RAMP > 0.5, np.nan, RAMP)), "TIFF"), "NaN"),
    "infinite": (lambda: encoded(Image.fromarray(np.where(RAMP > 0.5, np.inf, RAMP)), "TIFF"), "NaN or infinite"),
    "SVG": (lambda: b'<?xml version="1.0"?><svg xmlns="http://www.w3.org/2000/svg"/>', "an SVG drawing"),
    "text": (lambda: b"not an image", "not an image in a known format"),
}


@pytest.mark.parametrize("name", OPENED)
def test_odd_images_are_opened_with_the_size_of_their_header(name: str) -> None:
    make, size, first = OPENED[name]
    data = make()
    image = open_image(data)
    assert image.mode == "RGB" and image.size == image_size(data) == size
    assert first is None or image.getpixel((0, 0)) == first


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_image_is_refused_by_name(name: str, tmp_path: Path) -> None:
    make, part = REFUSED[name]
    (tmp_path / "file.bin").write_bytes(make())
    with refused("file.bin", part):
        open_image(tmp_path / "file.bin")


def test_limits_of_pixels_scale_images() -> None:
    assert limited_size((4032, 3024), {"max_pixels": 802816}) == (1034, 775)
    assert limited_size((10, 10), {"min_pixels": 1000}) == (32, 32)
    assert limited_size((32, 16), {"min_pixels": 4, "max_pixels": 4000}) == (32, 16)
    processor = make_processor("qwen2_5_vl")
    processor.image_processor = Qwen2VLImageProcessorPil(patch_size=4, merge_size=2, min_pixels=64, max_pixels=4096)
    question = user(make_noise(64, 64), "What?")
    whole = processor.prepare([question])["input_ids"].shape[1]
    question["content"][0]["max_pixels"] = 256
    assert processor.prepare([question])["input_ids"].shape[1] == whole - 64 + 4


@pytest.mark.parametrize(
    ("keys", "part"),
    [
        ({"max_pixels": "100"}, "max_pixels '100'"),
        ({"min_pixels": True}, "min_pixels True"),
        ({"max_pixels": 1e5}, "max_pixels 100000.0"),
        ({"min_pixels": 9, "max_pixels": 4}, "min_pixels 9"),
        ({"resized_height": 28}, "resized_height"),
    ],
)
def test_keys_of_a_part_are_honoured_or_refused(keys: dict[str, Any], part: str) -> None:
    question = user(make_image(), "What?")
    question["content"][0] |= keys
    with refused("message 0", part):
        check_conversation(Conversation("c", [question]), needs_answer=False)
    with refused("image", part):
        make_processor("qwen2_5_vl").prepare([question])


@pytest.mark.parametrize("content", [None, 3, {"a": 1}, ["hi"], [{"text": "hi"}], [{"type": "text"}], [{"type": "image_url"}]])
def test_prompts_that_templates_would_misread_are_refused(content: Any) -> None:
    with refused("message 0: "):
        make_processor("qwen2_5_vl").prepare([{"role": "user", "content": content}])


def test_limits_are_those_of_images() -> None:
    clip = user([make_image()], "What?")
    clip["content"][0]["max_pixels"] = 256
    with refused("message 0", "max_pixels of a video"):
        check_conversation(Conversation("c", [clip]), needs_answer=False)


# -- videos, and other sources ------------------------------------------------------------------------------------------


def shades(opened: Video) -> list[int]:
    return [frame.getpixel((0, 0))[0] for frame in opened.frames]  # type: ignore[index]


def save_gif(path: Path, count: int, **options: Any) -> Path:
    first, *rest = [Image.new("RGB", (16, 16), (i * 30, 0, 0)) for i in range(count)]
    first.save(path, save_all=True, append_images=rest, **options)
    return path


def save_video(path: Path) -> Path:
    """Saves two seconds of frames of increasing red."""
    av = importlib.import_module("av")
    with av.open(str(path), "w") as container:
        stream = container.add_stream("mpeg4", rate=4)
        stream.width = stream.height = 32
        for i in range(8):
            frame = av.VideoFrame.from_image(Image.new("RGB", (32, 32), (i * 30, 0, 0)))
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return path


def corrupted(complete: bytes, count: int) -> Iterator[bytes]:
    """Yields copies of a file with up to 20 bytes changed, some of them truncated as well."""
    rng = random.Random(0)
    for _ in range(count):
        data = bytearray(complete)
        for _ in range(rng.randint(1, 20)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        yield bytes(data if rng.random() < 0.7 else data[: rng.randrange(len(data))])


def error_of(path: Path, data: bytes) -> str:
    """Returns the error of a video file with these bytes, "" if it is read; only ValueError is caught."""
    path.write_bytes(data)
    try:
        open_video(path, 4)
    except ValueError as error:
        return str(error)
    return ""


def test_sources_of_an_image(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    make_image().save(path)
    data = path.read_bytes()
    uri = "data:image/png;base64," + base64.b64encode(data).decode()
    for source in (make_image(), str(path), path, data, uri):
        found = open_image(source)
        assert found.mode == "RGB"
        assert found.getpixel((3, 3)) == (255, 0, 0)


@pytest.mark.slow
def test_decompression_bomb_is_refused_before_decoding() -> None:
    side = int(MAX_PIXELS**0.5) + 100
    with refused("image ", f"at most {MAX_PIXELS}"):
        open_image(encoded(Image.new("1", (side, side)), "PNG"))
    with refused("image ", f"at most {MAX_PIXELS}"):  # the limit of PIL itself
        open_image(encoded(Image.new("1", (2 * side, side)), "PNG"))


def test_unreadable_images_are_named(tmp_path: Path) -> None:
    (tmp_path / "empty.png").write_bytes(b"")
    for opens in (open_image, open_video, check_media):
        with refused(f"{tmp_path}/empty.png: an empty file"):
            opens(tmp_path / "empty.png")
    with refused(f"image {tmp_path}/gone.png: no such file"):
        open_image(tmp_path / "gone.png")
    for empty in ("", " "):
        for opens in (open_image, open_video, check_media):
            with refused(repr(empty), "empty path"):
                opens(empty)
    with refused(f"image {'x' * 200}: no such file"):  # such as base64 without `data:`
        open_image("x" * 5000)
    with refused(f"image {tmp_path}: Is a directory"):
        open_image(tmp_path)
    with refused("image https://example.com/a.png", "URL"):
        check_media("https://example.com/a.png")
    with refused("image ", "base64"):
        open_image("data:image/png;base64,@@")


def test_failed_download_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    class ConnectError(Exception):
        """An error of the HTTP client, which is not an OSError."""

    errors = {ConnectError("Name or service not known"): "(Name or service not known)", UnidentifiedImageError("page"): ""}
    for error, reason in errors.items():
        monkeypatch.setattr("transformers.image_utils.load_image", Mock(side_effect=error))
        with refused("image https://x.org/a.png", reason):
            open_image("https://x.org/a.png", allow_urls=True)


def test_frames_of_a_folder_in_natural_order(tmp_path: Path) -> None:
    for i in range(12):
        Image.new("RGB", (8, 8), (i * 20, 0, 0)).save(tmp_path / f"frame{i}.png")
    (tmp_path / "notes.txt").write_text("no frame")
    assert shades(open_video(tmp_path, 32)) == [i * 20 for i in range(12)]
    assert shades(open_video(str(tmp_path), 3)) == [40, 120, 200]
    assert shades(open_video(tmp_path, 32, (2.0, 4.0), frames_per_s=2.0)) == [80, 100, 120, 140]


def test_unreadable_videos_are_named(tmp_path: Path) -> None:
    with refused(f"video {tmp_path}", "no frames"):
        open_video(tmp_path, 4)
    with refused("video gone: no such file"):
        open_video("gone", 4)
    save_images(tmp_path, "a.png")
    make_image(8).save(tmp_path / "b.png")
    with refused(f"video {tmp_path}", "frames of different sizes"):
        open_video(tmp_path, 4)
    (tmp_path / "b.png").write_text("not an image")
    with refused(f"video {tmp_path}: image {tmp_path}/b.png"):
        open_video(tmp_path, 4)


def test_video_file_needs_a_reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.mp4").write_bytes(b"no video")
    monkeypatch.setattr(video, "READER", "no_such_reader")
    with refused("a.mp4", "pip install"):
        open_video(tmp_path / "a.mp4", 4)


def test_video_file(tmp_path: Path) -> None:
    pytest.importorskip("av")
    path = save_video(tmp_path / "a.mp4")
    opened = open_video(path, 4, frames_per_s=25.0)  # ignored: the file has its own rate
    reds = [frame.getpixel((16, 16))[0] for frame in opened.frames]  # type: ignore[index]
    assert np.allclose(reds, [30, 90, 150, 210], atol=12)
    assert opened.fps == 2.0
    part = open_video(path, 4, (1.0, 1.5))
    assert (len(part.frames), part.fps) == (2, 4.0)


CORNERS = {  # display matrix: where the x axis and the y axis of a frame go -> size as shown, corner of its first pixel
    (1, 0, 0, 1): ((96, 48), (0, 0)),
    (0, 1, -1, 0): ((48, 96), (1, 0)),
    (-1, 0, 0, -1): ((96, 48), (1, 1)),
    (0, -1, 1, 0): ((48, 96), (0, 1)),
    (-1, 0, 0, 1): ((96, 48), (1, 0)),
    (1, 0, 0, -1): ((96, 48), (0, 1)),
    (0, 1, 1, 0): ((48, 96), (0, 0)),
    (0, -1, -1, 0): ((48, 96), (1, 1)),
}


def test_videos_of_phones_are_turned_and_mirrored_as_their_files_say(tmp_path: Path) -> None:
    """As ffmpeg shows them; the measured size is that of the frames."""
    av = pytest.importorskip("av")
    path, frame = tmp_path / "phone.mp4", Image.new("RGB", (96, 48))
    frame.paste((255, 0, 0), (0, 0, 48, 24))
    with av.open(str(path), "w") as container:
        stream = container.add_stream("mpeg4", rate=10, width=96, height=48, pix_fmt="yuv420p")
        container.mux(stream.encode(av.VideoFrame.from_image(frame)))
        container.mux(stream.encode())
    data = bytearray(path.read_bytes())
    at = data.find(b"tkhd") + 44
    for (a, b, c, d), (size, (x, y)) in CORNERS.items():
        data[at : at + 36] = struct.pack(">9i", a << 16, b << 16, 0, c << 16, d << 16, 0, 0, 0, 1 << 30)
        path.write_bytes(data)
        shown = open_video(path).frames[0]
        assert shown.size == video_size({"video": str(path)})[0][1:] == size
        places = [(i, j) for i in (0, 1) for j in (0, 1)]
        reds = [shown.getpixel((size[0] * (1 + 2 * i) // 4, size[1] * (1 + 2 * j) // 4))[0] for i, j in places]  # type: ignore[index]
        assert [place for place, red in zip(places, reds, strict=True) if red > 128] == [(x, y)]


@pytest.mark.parametrize(("kind", "count", "least"), [("mp4", 60, 10), ("gif", 300, 100)])
def test_corrupt_video_files_are_named(tmp_path: Path, kind: str, count: int, least: int) -> None:
    if kind == "mp4":
        pytest.importorskip("av")
    complete = (save_video(tmp_path / "a.mp4") if kind == "mp4" else save_gif(tmp_path / "a.gif", 6)).read_bytes()
    broken = tmp_path / f"b.{kind}"
    errors = [reason for data in corrupted(complete, count) if (reason := error_of(broken, data))]
    assert len(errors) > least
    assert all(reason.startswith(f"video {broken}: ") and "\n" not in reason for reason in errors)


def test_a_gif_has_seconds_and_segments(tmp_path: Path) -> None:
    path = save_gif(tmp_path / "a.gif", 8, duration=500)
    assert shades(open_video(path, 32)) == [i * 30 for i in range(8)]
    assert open_video(path, 32).fps == 2.0
    assert open_video(path, 2).fps == 0.5
    part = open_video(path, 32, (1.0, 2.5))
    assert (shades(part), part.fps) == ([60, 90, 120], 2.0)
    assert (
        open_video(save_gif(tmp_path / "b.gif", 4, duration=[100, 200, 0, 100]), 32).fps == 8.0
    )  # 0 is a tenth, as in browsers


def test_gif_decompression_bomb_is_refused(tmp_path: Path) -> None:
    data = bytearray(save_gif(tmp_path / "a.gif", 2).read_bytes())
    data[6:10] = struct.pack("<HH", 65535, 65535)  # its width and height
    assert error_of(tmp_path / "b.gif", bytes(data)).endswith(f"b.gif: too many pixels, allowed: at most {MAX_PIXELS}")


def test_segment_and_rate_of_a_message_part() -> None:
    frames = [Image.new("RGB", (8, 8), (i * 20, 0, 0)) for i in range(12)]
    part = {"type": "video", "video": frames}
    assert open_video_part(part) == Video(frames, 2.0)
    assert open_video_part(part | {"start": None, "end": None, "fps": None}) == Video(frames, 2.0)
    assert open_video_part(part | {"start": 2, "end": 4}) == Video(frames[4:8], 2.0)
    assert open_video_part(part | {"start": 2, "fps": "3"}) == Video(frames[6:], 3.0)
    assert open_video_part(part | {"end": 2, "fps": 3}, 2) == Video([frames[1], frames[4]], 1.0)


@pytest.mark.parametrize(
    ("times", "parts"),
    [
        ({"fps": 0}, ("fps 0", "above 0")),
        ({"start": [1]}, ("start [1]", "a number")),
        ({"end": float("nan")}, ("end nan", "a number")),
        ({"start": 3, "end": 2.5}, ("start 3 and end 2.5", "seconds")),
    ],
)
def test_invalid_times_are_named(times: dict[str, Any], parts: tuple[str, ...]) -> None:
    with refused("video (list): ", *parts):
        open_video_part({"type": "video", "video": [make_image(8)], **times})


def test_evenly_spaced_frames() -> None:
    assert sample_frames(10, 2.0, None, 2) == ([2, 7], 0.4)
    assert sample_frames(3, 2.0, None, 5) == ([0, 1, 2], 2.0)
    assert sample_frames(10, 2.0, (1.0, 2.5), 8) == ([2, 3, 4], 2.0)
    assert sample_frames(10, 2.0, (50.0, 60.0), 8) == ([9], 2.0)
