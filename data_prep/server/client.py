"""Requests to OpenAI-compatible servers: choice of the server, retries, errors that contain no address.

No other module of data_prep sends HTTP requests.
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
import time
from collections.abc import Sequence
from contextlib import suppress
from email.utils import parsedate_to_datetime
from typing import Any

import httpx

from data_prep.config import RegenerateConfig

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


class ServerError(ValueError):
    """A server cannot be used at all; the message names it by its place in `regenerate.server`."""


class RequestRefused(Exception):
    """The server does not accept this request."""


class AttemptFailed(Exception):
    """An attempt failed for a reason that may pass.

    Attributes:
        delay_s: pause that the server requests; None without one.
        is_busy: the server is running, but accepts no request now.
        is_down: the server cannot be connected to.
    """

    def __init__(self, reason: str, delay_s: float | None = None, is_busy: bool = False, is_down: bool = False) -> None:
        super().__init__(reason)
        self.delay_s, self.is_busy, self.is_down = delay_s, is_busy, is_down


class Server:
    """State of one server.

    Attributes:
        name: its place in `regenerate.server`, for messages.
        num_active: requests in progress.
        num_faults: failures since the last answer; several at the same time count as one.
        ready_at: time (`time.monotonic`) before which it gets no request, after a failure.
    """

    def __init__(self, url: str, name: str, client: httpx.AsyncClient, secrets: Sequence[str]) -> None:
        self.name, self.num_active, self.num_faults, self.ready_at = name, 0, 0, 0.0
        self._url, self._client, self._secrets = url, client, secrets

    async def request(self, method: str, path: str, body: Any, timeout_s: float) -> Any:
        """Sends one request; returns the JSON of the answer.

        Raises:
            AttemptFailed: the same request may succeed later.
            RequestRefused: it will not.
            ServerError: no request to this server will.
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
        return self._content(response, path)

    def pause(self, delay_s: float, named_s: float | None) -> None:
        """Delays the next request: by the time that the server names, or by one that doubles with every failure in a row."""
        now = time.monotonic()
        if now >= self.ready_at:  # requests at the same time fail together and count once
            doubled = min(delay_s * 2**self.num_faults, MAX_DELAY_S) * random.uniform(0.5, 1.0)
            self.num_faults += 1
            self.ready_at = now + (doubled if named_s is None else 0.0)
        self.ready_at = max(self.ready_at, now + min(named_s or 0.0, MAX_NAMED_DELAY_S))

    def _content(self, response: httpx.Response, path: str) -> Any:
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


class ServerPool:
    """Several servers of the same model, used evenly.

    A request goes to the server with the fewest requests among those that are not paused after a failure; if all are, it waits.
    Retries are not left to a client library, because they concern all servers and requests together: any server may answer the
    next attempt, all requests respect a server's pause, and a busy server is no failure of a request while it answers others.

    Args:
        key: sent as bearer token; empty: none.
    """

    def __init__(self, settings: RegenerateConfig, key: str) -> None:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        self._client = httpx.AsyncClient(headers=headers, limits=limits)
        self._settings = settings
        keep_urls_out_of_logs()
        urls = settings.urls()
        secrets = [text for text in (key, *urls, *(httpx.URL(url).netloc.decode() for url in urls)) if text]
        names = [f"server {number} of {len(urls)}" if len(urls) > 1 else "the server" for number in range(1, len(urls) + 1)]
        self.servers = [Server(url, name, self._client, secrets) for url, name in zip(urls, names, strict=True)]

    async def close(self) -> None:
        """Closes the connections."""
        await self._client.aclose()

    async def complete(self, body: Any) -> Any:
        """Requests a chat completion, at every attempt from the server that is free then.

        Raises:
            AttemptFailed: the last attempt failed.
            RequestRefused, ServerError: as `Server.request`.
        """
        return await self._request(self.servers, self._settings.retries, "POST", CHAT, body, self._settings.timeout_s)

    async def ask(self, server: Server, method: str, path: str, body: Any = None) -> Any:
        """Sends a request of the check at the start to one server; repeats it only if the server is busy.

        Raises:
            ServerError: the server cannot be used now.
            RequestRefused: as `Server.request`.
        """
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
            server = await _free_server(servers)
            try:
                found = await server.request(method, path, body, timeout_s)
            except AttemptFailed as failure:
                server.pause(self._settings.retry_delay_s, failure.delay_s)
                num_failed += not failure.is_busy
                # servers that are busy at every attempt, and not with our own requests
                are_exhausted = all(one.num_faults > self._settings.retries and not one.num_active for one in servers)
                if num_failed > retries or (failure.is_busy and are_exhausted):
                    raise
            else:
                server.num_faults = 0
                return found


async def _free_server(servers: Sequence[Server]) -> Server:
    while True:
        now = time.monotonic()
        server = min(servers, key=lambda server: (max(server.ready_at, now), server.num_active))
        if server.ready_at <= now:
            return server
        await asyncio.sleep(server.ready_at - now)


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
    """Returns the pause of the header Retry-After, in seconds or as a date."""
    value = response.headers.get("retry-after", "")
    for parse in (float, lambda text: parsedate_to_datetime(text).timestamp() - time.time()):
        with suppress(ValueError, TypeError):
            return max(0.0, parse(value))
    return None
