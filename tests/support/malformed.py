"""Requests that a server must refuse: wrong JSON, wrong types, values out of range, corrupt images, bombs, long prompts."""

from __future__ import annotations

import base64
import json
import struct
import zlib
from collections.abc import Iterator
from typing import Any

from support.serving_helpers import data_url, image_url, with_images

JSON = "application/json"
WRONG: dict[str, list[Any]] = {  # field -> values that are not allowed
    "messages": ["Hi", [], [1], [{}], [{"role": "user"}], [{"role": "tool", "content": "x"}]],
    "max_tokens": [0, 1.5, "8", True, 10**9, 10**40],
    "max_completion_tokens": [0],
    "temperature": [-1, 2.5, "hot", 10**400, 1e-30, True],
    "top_p": [0, 1.1],
    "top_k": [-2, 1.5],
    "min_p": [-1, 2],
    "repetition_penalty": [1e-300, 1e300],
    "seed": [2**63, -(2**70), 10**300],
    "stop": [1, [1], [""], "x" * 5000, ["x"] * 100, "\ud800"],
    "n": [2, True],
    "stream": ["yes", 1],
    "stream_options": [1, {"gone": True}, {"include_usage": 3}],
    "logit_bias": [{"5": 1}],
    "response_format": [{"type": "json_object"}],
    "tools": [[{"type": "function"}]],
    "min_tokens": [-1],
    "model": ["gone", 1],
    "audio": [{}],
    "unknown_field": [1],
}
URLS = (
    *("", "data:", "data:image/png;base64,", "data:image/png;base64,@@", "data:image/png,abc", f"{image_url()}\u00e9"),
    *("file:///etc/passwd", "/etc/passwd", "http://127.0.0.1/x.png", "http://169.254.169.254/", "ftp://x/y", None, 1),
)
TRUNCATED = data_url(base64.b64decode(image_url().partition(",")[2])[:80])
PARTS: tuple[Any, ...] = (
    *(1, "x", {"type": "text"}, {"type": "text", "text": 1}, {"type": "input_audio"}, {"type": "image_url", "image_url": {}}),
    *({"type": "video", "video": []}, {"type": "video", "video": "x.mp4"}, {"type": "video", "video": [image_url()], "fps": 0}),
)


def bomb(width: int, height: int) -> bytes:
    """A PNG of a few bytes with this size."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(bytes(1000))) + chunk(b"IEND", b"")


def malformed() -> Iterator[tuple[str, bytes, str]]:
    """Yields requests as (name, body, content type)."""
    for text in (b"", b"[]", b"\xff\xfe", b"{", b'{"a": NaN}', b"[" * 100_000, b"9" * 100_000):
        yield f"body {text[:10]!r}", text, JSON
    hello = [{"role": "user", "content": "Hello"}]
    yield "form", json.dumps({"messages": hello}).encode(), "application/x-www-form-urlencoded"
    for name, values in WRONG.items():
        for value in values:
            yield f"{name}={value!r}"[:60], json.dumps({"messages": hello, "max_tokens": 4, name: value}).encode(), JSON
    for label, messages in _conversations():
        yield label, json.dumps({"messages": messages, "max_tokens": 4}).encode(), JSON


def _conversations() -> Iterator[tuple[str, Any]]:
    for size in ((60_000, 60_000), (20_000, 20_000), (5000, 3), (1, 1), (0, 5), (100, 100)):
        yield f"bomb {size}", with_images("What?", data_url(bomb(*size)))
    for url in (*URLS, data_url(b"%!PS-Adobe-3.0 EPSF-3.0\n", "eps"), data_url(b"<svg/>", "svg+xml"), TRUNCATED):
        yield f"image {url}"[:40], with_images("What?", url)
    for content in (None, 1, [], " ", "\ud800", "a b " * 250_000, *([part] for part in PARTS)):
        yield f"content {content!r}"[:60], [{"role": "user", "content": content}]
    yield "too many images", with_images("What?", *[image_url()] * 200)
    yield "tool calls", [{"role": "assistant", "content": "x", "tool_calls": [{"id": "1"}]}]
