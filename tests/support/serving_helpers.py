"""A server in a thread, and messages with images, for tests of `sage.serving`."""

import base64
import io
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
from PIL import Image

from sage.serving.server import Server, running
from sage.serving.service import Service

MODEL = "toy"
HELLO = [{"role": "user", "content": "Hello"}]
LIMITS: dict[str, Any] = {
    "max_requests": 3,
    "queue": 2,
    "max_context": 400,
    "max_body_mb": 2.0,
    "max_pixels": 40_000,
    "prefill_tokens": 16,
}


@dataclass
class Running:
    service: Service
    server: Server
    client: httpx.Client
    url: str
    target: Any = None

    def chat(self, messages: Any = None, **fields: Any) -> httpx.Response:
        """Requests a chat completion of 8 tokens, unless `max_tokens` says otherwise."""
        body = {"messages": HELLO if messages is None else messages, "max_tokens": 8, **fields}
        return self.client.post("/v1/chat/completions", json=body)


@contextmanager
def serving(service: Service, target: Any = None) -> Iterator[Running]:
    with running(service) as (server, url), httpx.Client(base_url=url, timeout=60) as client:
        yield Running(service, server, client, url, target)


def image_url(size: tuple[int, int] = (56, 56), color: str = "red", kind: str = "PNG") -> str:
    stream = io.BytesIO()
    Image.new("RGB", size, color).save(stream, kind)
    return data_url(stream.getvalue(), kind.lower())


def data_url(data: bytes, kind: str = "png") -> str:
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


def with_images(text: str, *urls: Any) -> list[dict[str, Any]]:
    images = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return [{"role": "user", "content": [*images, {"type": "text", "text": text}]}]


def wait_until(condition: Callable[[], bool]) -> None:
    """Waits at most a minute until a condition holds."""
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)
