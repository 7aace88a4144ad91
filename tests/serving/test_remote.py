"""Images that a server downloads: from which hosts, how much, and whom they delay."""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from typing import Any

import pytest
from support.chat_server import JsonHandler, listening
from support.serving_helpers import wait_until, with_images

from sage.serving import media
from sage.serving.media import RemoteMedia

DEADLINE = float("inf")
GOOD = "good.example"
ALLOWED = RemoteMedia([GOOD], max_bytes=1000)


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Callable[[type[BaseHTTPRequestHandler]], Any]:
    """Runs a handler as the public host GOOD."""

    @contextmanager
    def start(handler: type[BaseHTTPRequestHandler]) -> Iterator[None]:
        with listening(handler) as address:
            monkeypatch.setattr(media, "public_address", lambda host, port: "127.0.0.1")
            monkeypatch.setattr(media, "PORTS", {"http": int(address.rpartition(":")[2])})
            yield

    return start


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("http://other.example/x.png", "not a host that this server downloads from"),
        ("http://good.example:22/x.png", "port 22"),
        ("http://user@good.example/x.png", "contains a user"),
        ("file:///etc/passwd", "give a data URL"),
        ("http://good.example/x.png", "an internal address"),
    ],
)
def test_downloads_only_from_allowed_public_hosts(url: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for address in ("127.0.0.1", "10.0.0.1", "169.254.169.254", "::1", "::ffff:10.0.0.1", "fe80::1%eth0"):
        found = [(0, 0, 0, "", ("93.184.216.34", 80)), (0, 0, 0, "", (address, 80))]
        monkeypatch.setattr(media.socket, "getaddrinfo", lambda *_, found=found, **__: found)
        with pytest.raises(ValueError, match=words):
            ALLOWED.fetch(url, DEADLINE)


def test_a_download_follows_no_redirect_and_has_a_limit(host: Callable[..., Any]) -> None:
    class Handler(JsonHandler):
        def do_GET(self) -> None:
            status = 302 if self.path == "/moved" else 200
            self.send(status, b"x" * (2000 if self.path == "/large" else 10), {"Location": "http://127.0.0.1/"})

    with host(Handler):
        assert ALLOWED.fetch("http://GOOD.example/x", DEADLINE) == b"x" * 10
        for path, words in (("moved", "redirects are not followed"), ("large", "more than 1000 bytes")):
            with pytest.raises(ValueError, match=words):
                ALLOWED.fetch(f"http://good.example/{path}", DEADLINE)


def test_slow_downloads_delay_no_text_and_have_one_deadline(new: Callable[..., Any], host: Callable[..., Any]) -> None:
    goes_on = threading.Event()

    class Handler(JsonHandler):
        def do_GET(self) -> None:
            goes_on.wait(10)
            self.send(200, b"")

    with host(Handler), new(policy="autoregressive", allow_remote_media=[GOOD]) as server, ThreadPoolExecutor(3) as pool:
        images = [pool.submit(server.chat, with_images("?", *["http://good.example/x"] * 2)) for _ in range(3)]
        wait_until(lambda: len(server.service.scheduler.places) == 3)
        assert server.chat().status_code == 200 and not any(image.done() for image in images)
        with pytest.raises(ValueError, match=r"cannot be downloaded \(TimeoutError\)"):
            ALLOWED.fetch("http://good.example/x", time.monotonic() + 0.05)
        goes_on.set()
        assert all("not an image" in image.result().text for image in images)
