"""Requests to OpenAI-compatible servers, such as vLLM's: messages with images, choice of the server, retries.

No other module of data_prep sends HTTP requests. Neither URLs nor the key reach a file, a log or a message: a message names a
server by its place in `regenerate.server`.

The server receives the pixels that training uses. An image file that every reader decodes in the same way is sent unchanged.
Any other image (rotated by EXIF, transparent, 16 bits, animated) is converted to RGB and sent as PNG.
"""

from __future__ import annotations

import asyncio
import base64
import io
import json
import logging
import random
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any

import httpx
from PIL import Image, UnidentifiedImageError

from data_prep.config import DataConfig, Images, RegenerateConfig
from data_prep.conversation import Message, Part, media_parts
from data_prep.sources.base import Split
from sage.inputs.media import LIMIT_KEYS, decode_data_url, open_image, open_image_part
from sage.inputs.messages import text_of

PLAIN_FORMATS, PLAIN_MODES = ("JPEG", "PNG", "WEBP"), ("RGB", "L")
ORIENTATION = 0x0112  # EXIF tag; 1 = upright
CHAT, MODELS = "chat/completions", "models"
CONNECT_S, CHECK_S = 10.0, 120.0  # timeouts of a connection and of each request of the check at the start
MAX_DELAY_S = 60.0  # between two attempts
MAX_NAMED_DELAY_S = 600.0  # that a server may request (Retry-After)
MAX_REASON = 200  # characters of a server's message
KEY_REMEDY = "export its key in the variable of regenerate.key_variable"
REMEDIES = {  # by status, for refusals that concern every request
    401: KEY_REMEDY,
    403: KEY_REMEDY,
    404: "give its URL up to and including /v1, and serve the target",
}
BUSY = (429, 503)
PASSING = (408, 409, 425, *BUSY)


# -- messages ------------------------------------------------------------------------------------------------------------


class OutsideMedia(PermissionError):
    """An image outside the folders whose images may be sent."""


@dataclass(frozen=True)
class MediaPolicy:
    """How images are sent, and which: files outside the resolved folders `roots` are never read or sent."""

    roots: tuple[Path, ...]
    images: Images

    @classmethod
    def of(cls, config: DataConfig, split: Split, images: Images) -> MediaPolicy:
        """Returns the policy of a split: the `media_root` of each source, by default the folder of its file."""
        roots = []
        for source in config.resolved(split).values():
            if source.media_root or source.path:
                path = Path(source.path)
                roots.append(Path(source.media_root or (path if path.is_dir() else path.parent)).resolve())
        return cls(tuple(roots), images)

    def url(self, image: Any) -> str:
        """Returns the URL of an image for a request; ValueError if unreadable, OutsideMedia if outside, also by a link."""
        if isinstance(image, Image.Image):
            return _data_url(image)
        if isinstance(image, bytes) or str(image).startswith("data:"):
            data = image if isinstance(image, bytes) else decode_data_url(str(image))
            return _data_url(data, _plain_format(io.BytesIO(data)))
        file = Path(image).resolve()
        if not any(file.is_relative_to(root) for root in self.roots):
            raise OutsideMedia(
                f"image {image}: outside data.media_root, so it is not sent to a server; set data.media_root to a folder "
                "above all images, or answer without regenerate.server"
            )
        kind = _plain_format(file)
        if kind and self.images is Images.path:
            return file.as_uri()
        return _data_url(file.read_bytes() if kind else file, kind)


def request_messages(messages: list[Message], policy: MediaPolicy) -> list[dict[str, Any]]:
    """Returns the messages in the format of the API: those with images as lists of parts, others as text.

    Raises as `MediaPolicy.url`, and ValueError for a video, tools and their results.
    """
    if any(message["role"] == "tool" or message.get("tools") for message in messages):
        raise ValueError("tools; servers render them in their own way, so they are answered only without regenerate.server")

    def content(message: Message) -> Any:
        has_media = any(True for _ in media_parts([message]))
        return [_request_part(part, policy) for part in message["content"]] if has_media else text_of(message)

    return [{"role": message["role"], "content": content(message)} for message in messages]


def _request_part(part: Part, policy: MediaPolicy) -> dict[str, Any]:
    if part["type"] == "text":
        return {"type": "text", "text": part["text"]}
    if part["type"] == "video":
        raise ValueError("a video; servers sample frames in their own way, so it is answered only without regenerate.server")
    url = policy.url(part["image"])
    if any(part.get(key) for key in LIMIT_KEYS):  # the pixels that training uses
        url = _data_url(open_image_part(part))
    return {"type": "image_url", "image_url": {"url": url}}


def _plain_format(source: Any) -> str:
    """Returns the format of an image file that every reader decodes in the same way; empty for any other file."""
    try:
        with Image.open(source) as image:
            is_upright = image.getexif().get(ORIENTATION, 1) == 1 and getattr(image, "n_frames", 1) == 1
            is_plain = image.mode in PLAIN_MODES and not image.has_transparency_data and image.format in PLAIN_FORMATS
            return str(image.format) if is_upright and is_plain else ""
    except (OSError, UnidentifiedImageError, Image.DecompressionBombError, SyntaxError):
        return ""


def _data_url(image: Any, kind: str = "") -> str:
    """Returns the bytes of a file of format `kind`, or any other image as PNG, as a data URL."""
    if not kind:
        stream = io.BytesIO()
        open_image(image).save(stream, "PNG")
        image = stream.getvalue()
    return f"data:image/{(kind or 'PNG').lower()};base64,{base64.b64encode(image).decode()}"


# -- requests ------------------------------------------------------------------------------------------------------------


class ServerError(ValueError):
    """A server cannot be used at all; the message names it by its place in `regenerate.server`."""


class RequestRefused(Exception):
    """The server does not accept this request."""


class AttemptFailed(Exception):
    """An attempt failed for a reason that may pass: the server is busy, or down, or requests a pause, or the answer is bad."""

    def __init__(self, reason: str, delay_s: float | None = None, is_busy: bool = False, is_down: bool = False) -> None:
        super().__init__(reason)
        self.delay_s, self.is_busy, self.is_down = delay_s, is_busy, is_down


class Server:
    """State of one server; `name` is its place in `regenerate.server`, for messages."""

    def __init__(self, url: str, name: str, client: httpx.AsyncClient, secrets: Sequence[str]) -> None:
        self.name, self._url, self._client, self._secrets = name, url, client, secrets
        self.num_active = 0  # requests in progress
        self.num_faults = 0  # failures since the last answer; several at the same time count as one
        self.ready_at = 0.0  # time (`time.monotonic`) before which it gets no request, after a failure

    async def request(self, method: str, path: str, body: Any, timeout_s: float) -> Any:
        """Sends one request; returns the JSON of the answer.

        Raises AttemptFailed if it may succeed later, RequestRefused if it will not, ServerError if no request will.
        """
        self.num_active += 1
        try:
            timeout = httpx.Timeout(timeout_s, connect=min(CONNECT_S, timeout_s), pool=None)
            response = await self._client.request(method, f"{self._url}/{path}", json=body, timeout=timeout)
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            raise AttemptFailed("no connection", is_down=True) from error
        except httpx.TimeoutException as error:
            raise AttemptFailed(f"no answer within {timeout_s:g} s") from error
        except httpx.RequestError as error:
            raise AttemptFailed("the connection was cut") from error
        finally:
            self.num_active -= 1
        status = response.status_code
        if status == httpx.codes.OK:
            try:
                return response.json()
            except ValueError as error:
                raise AttemptFailed("an answer that is not JSON") from error
        title = f"{status} {httpx.codes.get_reason_phrase(status)}".strip()
        reason = ": ".join(filter(None, (title, server_message(response, self._secrets))))
        if status >= 500 or status in PASSING:
            raise AttemptFailed(reason, _retry_after(response), is_busy=status in BUSY)
        if status in REMEDIES or status < 400:
            remedy = REMEDIES.get(status, "give the URL that it redirects to")
            raise ServerError(f"regenerate.server: {self.name}: {path}: {reason}; {remedy}")
        raise RequestRefused(reason)

    def pause(self, delay_s: float, named_s: float | None) -> None:
        """Delays the next request: by the time that the server names, or by one that doubles with every failure in a row."""
        now = time.monotonic()
        if now >= self.ready_at:  # requests at the same time fail together and count once
            doubled = min(delay_s * 2**self.num_faults, MAX_DELAY_S) * random.uniform(0.5, 1.0)
            self.num_faults += 1
            self.ready_at = now + (doubled if named_s is None else 0.0)
        self.ready_at = max(self.ready_at, now + min(named_s or 0.0, MAX_NAMED_DELAY_S))


class ServerPool:
    """Several servers of the same model, used evenly; `key` is sent as bearer token if there is one.

    A request goes to the server with the fewest requests among those that are not paused after a failure; if all are, it waits.
    Retries are not left to a client library, because they concern all servers and requests together: any server may answer the
    next attempt, all requests respect a server's pause, and a busy server is no failure of a request while it answers others.
    """

    def __init__(self, settings: RegenerateConfig, key: str) -> None:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        client = httpx.AsyncClient(headers=headers, limits=limits)
        self._settings, self.close = settings, client.aclose
        keep_urls_out_of_logs()
        urls = settings.urls()
        secrets = [text for text in (key, *urls, *(httpx.URL(url).netloc.decode() for url in urls)) if text]
        names = [f"server {number} of {len(urls)}" if len(urls) > 1 else "the server" for number in range(1, len(urls) + 1)]
        self.servers = [Server(url, name, client, secrets) for url, name in zip(urls, names, strict=True)]

    async def complete(self, body: Any) -> Any:
        """Requests a chat completion, at every attempt from the server that is free then; raises as `Server.request`."""
        return await self._request(self.servers, self._settings.retries, "POST", CHAT, body, self._settings.timeout_s)

    async def ask(self, server: Server, method: str, path: str, body: Any = None) -> Any:
        """Sends a request of the check at the start, only again if the server is busy; RequestRefused, or ServerError."""
        try:
            return await self._request([server], 0, method, path, body, min(CHECK_S, self._settings.timeout_s))
        except AttemptFailed as failure:
            times = f" ({server.num_faults} attempts)" if server.num_faults > 1 else ""
            remedy = "start it" if failure.is_down else "wait until it is free" if failure.is_busy else "see its log"
            raise ServerError(f"regenerate.server: {server.name}: {failure}{times}; {remedy}") from failure

    async def _request(
        self, servers: Sequence[Server], retries: int, method: str, path: str, body: Any, timeout_s: float
    ) -> Any:
        """Repeats a failed request up to `retries` times; while servers are busy, until all of them have exhausted theirs."""
        num_failed = 0
        while True:
            now = time.monotonic()
            server = min(servers, key=lambda server: (max(server.ready_at, now), server.num_active))
            if server.ready_at > now:
                await asyncio.sleep(server.ready_at - now)
                continue
            try:
                answer = await server.request(method, path, body, timeout_s)
            except AttemptFailed as failure:
                server.pause(self._settings.retry_delay_s, failure.delay_s)
                num_failed += not failure.is_busy
                # servers that are busy at every attempt, and not with our own requests
                are_exhausted = all(server.num_faults > self._settings.retries and not server.num_active for server in servers)
                if num_failed > retries or (failure.is_busy and are_exhausted):
                    raise
            else:
                server.num_faults = 0
                return answer


def server_message(response: httpx.Response, secrets: Sequence[str]) -> str:
    """Returns the message of an answer that is an error, without `secrets`, on one line; empty if it has none."""
    try:
        content = response.json()
        error = content.get("error", content)
        text = error["message"] if isinstance(error, dict) and "message" in error else content.get("detail", error)
        text = text if isinstance(text, str) else json.dumps(text)
    except (ValueError, AttributeError, KeyError):
        text = ""
    for secret in secrets:
        text = text.replace(secret, "...")
    return " ".join(text.split())[:MAX_REASON]


def keep_urls_out_of_logs() -> None:
    """Keeps httpx and httpcore from logging URLs, which they do below the level of a warning."""
    for name in ("httpx", "httpcore"):
        logging.getLogger(name).setLevel(logging.WARNING)


def _retry_after(response: httpx.Response) -> float | None:
    value = response.headers.get("retry-after", "")
    for parse in (float, lambda text: parsedate_to_datetime(text).timestamp() - time.time()):
        with suppress(ValueError, TypeError):
            return max(0.0, parse(value))
    return None
