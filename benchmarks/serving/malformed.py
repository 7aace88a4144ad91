"""Requests that a server must refuse: wrong JSON, wrong types, values out of range, corrupt images, bombs, long prompts."""

from __future__ import annotations

import base64
import io
import json
import random
import struct
import zlib
from collections.abc import Iterator
from typing import Any

from PIL import Image

JSON = "application/json"
WRONG: dict[str, list[Any]] = {  # field -> values that are not allowed
    "messages": ["Hi", 1, {}, [], [1], [[]], [{}], [{"role": "user"}], [{"role": "tool", "content": "x"}], [None], True],
    "max_tokens": [-1, 0, 1.5, "8", [], {}, 10**9, 10**40, True],
    "max_completion_tokens": [-5, 0, "x", 10**7, False],
    "temperature": [-1, 2.5, "hot", [], {}, 10**400, 1e-30, True],
    "top_p": [0, -0.1, 1.1, "x", {}, True],
    "top_k": [-2, 1.5, "x", [], True],
    "min_p": [-1, 2, "x", []],
    "repetition_penalty": [0, -1, 1e-300, 1e300, "x"],
    "seed": ["x", 1.5, 2**63, -(2**70), 10**300, [], True],
    "stop": [1, {}, [1], [""], "", "x" * 5000, ["x"] * 100, [None], "\ud800", True],
    "n": [0, 2, -1, "1", True],
    "stream": ["yes", 1, [], {}],
    "stream_options": [1, "x", [], {"gone": True}, {"include_usage": 3}],
    "logprobs": [True, 1, "x"],
    "top_logprobs": [1, -1, "x"],
    "presence_penalty": [1, -2, "x"],
    "frequency_penalty": [0.5, "x"],
    "logit_bias": [{"5": 1}, 3],
    "response_format": [{"type": "json_object"}, "text"],
    "tools": [[{"type": "function"}], "x"],
    "min_tokens": [-1, "x", 2.5],
    "ignore_eos": [1, "x"],
    "model": ["gone", 1, ["toy"], "\ud800"],
    "audio": [{}, 1],
    "unknown_field": [1, "x"],
}


def valid(**fields: Any) -> dict[str, Any]:
    """A body that is answered."""
    return {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4, **fields}


def data_url(data: bytes, kind: str = "png") -> str:
    """A file as a data URL."""
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


def with_image(url: Any) -> dict[str, Any]:
    """A body with an image."""
    content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "What?"}]
    return valid(messages=[{"role": "user", "content": content}])


def png(side: int = 64, seed: int = 0) -> bytes:
    """A picture of noise."""
    stream = io.BytesIO()
    Image.frombytes("RGB", (side, side), random.Random(seed).randbytes(3 * side * side)).save(stream, "PNG")
    return stream.getvalue()


def bomb(width: int, height: int) -> bytes:
    """A PNG of a few bytes with this size."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(bytes(1000))) + chunk(b"IEND", b"")


def malformed(count: int, seed: int = 0, prompt_bytes: int = 10_000_000) -> Iterator[tuple[str, bytes, str]]:
    """Yields `count` requests as (name, body, content type): every fixed case first, then random ones."""
    random_ = random.Random(seed)
    cases = list(_fixed(prompt_bytes))
    cases += [
        (f"{name}={value!r}"[:60], _body(valid(**{name: value})), JSON) for name, wrong in WRONG.items() for value in wrong
    ]
    while len(cases) < count:
        cases.append(_random(random_))
    yield from cases[:count]


def _random(random_: random.Random) -> tuple[str, bytes, str]:
    if random_.random() < 0.5:
        body = _body(valid(user="x" * 50))
        return "truncated JSON", body[: random_.randrange(len(body))], JSON
    data = png()
    return "truncated image", _body(with_image(data_url(data[: random_.randrange(len(data) - 200)]))), JSON


def _fixed(prompt_bytes: int) -> Iterator[tuple[str, bytes, str]]:
    good = data_url(png())
    yield "long prompt", _body(valid(messages=[{"role": "user", "content": "a b " * (prompt_bytes // 4)}])), JSON
    for text in (b"", b"x", b"[]", b"1", b"null", b'"x"', b"\xff\xfe", b"{", b'{"a": NaN}', b"[" * 100_000, b"9" * 100_000):
        yield f"body {text[:10]!r}", text, JSON
    yield "text body", _body(valid()), "text/plain"
    yield "form", b"messages=x", "application/x-www-form-urlencoded"
    for size in ((60_000, 60_000), (20_000, 20_000), (2**31 - 1, 2), (5000, 3), (1, 1), (0, 5)):
        yield f"bomb {size}", _body(with_image(data_url(bomb(*size)))), JSON
    yield "corrupt pixels", _body(with_image(data_url(bomb(100, 100)))), JSON
    urls = (
        "",
        "data:",
        "data:image/png;base64,",
        "data:image/png;base64,@@",
        "data:image/png,abc",
        f"{good[:-7]}",
        f"{good}\u00e9",
    )
    for url in (*urls, "file:///etc/passwd", "/etc/passwd", "http://127.0.0.1/x.png", "http://169.254.169.254/", "ftp://x/y"):
        yield f"image {url[:40]}", _body(with_image(url)), JSON
    others: tuple[Any, ...] = (None, 1, [], {}, {"url": 1}, {"url": None})
    for value in others:
        yield f"image {value!r}", _body(with_image(value)), JSON
    yield "PostScript", _body(with_image(data_url(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "eps"))), JSON
    yield "SVG", _body(with_image(data_url(b"<svg xmlns='http://www.w3.org/2000/svg'/>", "svg+xml"))), JSON
    many = [{"type": "image_url", "image_url": {"url": good}}] * 200
    yield "too many images", _body(valid(messages=[{"role": "user", "content": many}])), JSON
    for content in (None, 1, [], [1], ["x"], [{"type": "text"}], [{"type": "text", "text": 1}], [{"type": "input_audio"}], " "):
        yield f"content {content!r}", _body(valid(messages=[{"role": "user", "content": content}])), JSON
    yield "surrogate", _body(valid(messages=[{"role": "user", "content": "\ud800"}])), JSON
    for part in (
        {"type": "video", "video": []},
        {"type": "video", "video": "x.mp4"},
        {"type": "video", "video": [good], "fps": 0},
    ):
        yield f"video {str(part)[:30]}", _body(valid(messages=[{"role": "user", "content": [part]}])), JSON
    calls = {"role": "assistant", "content": "x", "tool_calls": [{"id": "1"}]}
    yield "tool calls", _body(valid(messages=[calls])), JSON


def _body(content: Any) -> bytes:
    return json.dumps(content).encode()
