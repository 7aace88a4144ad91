"""Odd image files: opened as RGB with the size that their header promises, or refused by name."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from support.data_helpers import make_image, make_noise, make_processor, user
from support.messages import refused
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from data_prep.conversation import Conversation, check_conversation
from sage.inputs.media import image_size, limited_size, open_image

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
