"""Requests to OpenAI-compatible servers: choice of the server, retries, errors without addresses.

The only module that uses HTTP. Does not own: the content of requests and answers (data_prep.server.chat_request).
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
import time
from collections.abc import Sequence
from email.utils import parsedate_to_datetime
from http import HTTPStatus
from typing import Any

import httpx

from data_prep.config import RegenerateConfig

CHAT, MODELS = "chat/completions", "models"
CONNECT_S, CHECK_S = 10.0, 120.0  # for a connection, and for each request of the check at the start
MAX_DELAY_S = 60.0  # between two attempts
MAX_NAMED_DELAY_S = 600.0  # that a server may name itself (Retry-After)
MAX_REASON = 200  # characters of a server's message
KEY_REMEDY = "export its key in the variable of regenerate.key_variable"
REMEDIES: dict[int, str] = {  # of refusals that concern every request
    HTTPStatus.UNAUTHORIZED: KEY_REMEDY,
    HTTPStatus.FORBIDDEN: KEY_REMEDY,
    HTTPStatus.NOT_FOUND: "give its URL up to and including /v1, and serve the target",
}
BUSY = (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE)
PASSING = (HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.CONFLICT, HTTPStatus.TOO_EARLY, *BUSY)


class ServerError(ValueError):
    """A server cannot be used at all; the message names it by its place in `regenerate.server`."""


class Refused(Exception):
    """The server does not accept this request."""


class Fault(Exception):
    """An attempt failed in a way that may pass.

    Attributes:
        delay_s: pause that the server asks for; None if it names none.
        is_busy: the server works, but takes no request now.
        is_down: no connection.
    """

    def __init__(self, reason: str, delay_s: float | None = None, is_busy: bool = False, is_down: bool = False) -> None:
        super().__init__(reason)
        self.delay_s, self.is_busy, self.is_down = delay_s, is_busy, is_down


class Server:
    """One server, and how it fared.

    Attributes:
        name: its place in `regenerate.server`, for messages.
        num_active: requests in progress.
        num_faults: since the last answer; several at the same time count as one.
        ready_at: time (`time.monotonic`) before which it gets no request, after a fault.
    """

    def __init__(self, url: str, name: str, client: httpx.AsyncClient, secrets: Sequence[str]) -> None:
        self.name, self.num_active, self.num_faults, self.ready_at = name, 0, 0, 0.0
        self._url, self._client, self._secrets = url, client, secrets

    async def request(self, method: str, path: str, body: Any = None, *, timeout_s: float) -> Any:
        """Sends one request; returns the JSON of the answer.

        Raises:
            Fault: it may succeed later.
            Refused: it will not.
            ServerError: neither will any other.
        """
        self.num_active += 1
        try:
            timeout = httpx.Timeout(timeout_s, connect=min(CONNECT_S, timeout_s), pool=None)
            response = await self._client.request(method, f"{self._url}/{path}", json=body, timeout=timeout)
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            raise Fault("no connection", is_down=True) from error
        except httpx.TimeoutException as error:
            raise Fault(f"no answer within {timeout_s:g} s") from error
        except httpx.RequestError as error:
            raise Fault("the connection was cut") from error
        finally:
            self.num_active -= 1
        return self._content(response, path)

    def rest(self, delay_s: float, named_s: float | None) -> None:
        """Gives the server a pause: the one that it names, or one that doubles with every fault in a row."""
        now = time.monotonic()
        if now >= self.ready_at:  # requests at the same time fail together: one fault
            doubled = min(delay_s * 2**self.num_faults, MAX_DELAY_S) * random.uniform(0.5, 1.0)
            self.num_faults += 1
            self.ready_at = now + (doubled if named_s is None else 0.0)
        self.ready_at = max(self.ready_at, now + min(named_s or 0.0, MAX_NAMED_DELAY_S))

    def _content(self, response: httpx.Response, path: str) -> Any:
        status = response.status_code
        if status == HTTPStatus.OK:
            try:
                return response.json()
            except (ValueError, UnicodeDecodeError) as error:
                raise Fault("an answer that is not JSON") from error
        reason = self._reason(response)
        if status >= HTTPStatus.INTERNAL_SERVER_ERROR or status in PASSING:
            raise Fault(reason, _retry_after(response), is_busy=status in BUSY)
        if status in REMEDIES or status < HTTPStatus.BAD_REQUEST:
            remedy = REMEDIES.get(status, "give the URL that it redirects to")
            raise ServerError(f"regenerate.server: {self.name}: {path}: {reason}; {remedy}")
        raise Refused(reason)

    def _reason(self, response: httpx.Response) -> str:
        """Returns status and message of an answer, without what is secret."""
        known = {int(status): status.phrase for status in HTTPStatus}
        title = f"{response.status_code} {known.get(response.status_code, '')}".strip()
        text = server_message(response, self._secrets)
        return f"{title}: {text}" if text else title


class ServerPool:
    """Several servers of the same model, used evenly.

    A request goes to the server with the fewest requests among those that are not resting after a fault; if all are, it waits.

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
        hosts = [httpx.URL(url).netloc.decode() for url in urls]
        secrets = [text for text in (key, *urls, *hosts) if text]
        names = [f"server {number} of {len(urls)}" if len(urls) > 1 else "the server" for number in range(1, len(urls) + 1)]
        self.servers = [Server(url, name, self._client, secrets) for url, name in zip(urls, names, strict=True)]

    async def close(self) -> None:
        """Closes the connections."""
        await self._client.aclose()

    async def complete(self, body: Any) -> Any:
        """Requests a chat completion, at every attempt from the server that is free then.

        Raises:
            Fault: the last of all attempts failed.
            Refused, ServerError: as `Server.request`.
        """
        num_faults = 0
        while True:
            server = await self._free_server()
            try:
                found = await server.request("POST", CHAT, body, timeout_s=self._settings.timeout_s)
            except Fault as fault:
                server.rest(self._settings.retry_delay_s, fault.delay_s)
                num_faults += not fault.is_busy
                if num_faults > self._settings.retries or (fault.is_busy and all(map(self._is_hopeless, self.servers))):
                    raise
            else:
                server.num_faults = 0
                return found

    async def ask(self, server: Server, method: str, path: str, body: Any = None) -> Any:
        """Sends a request of the check at the start to one server; repeats it only if the server is busy.

        Raises:
            ServerError: the server cannot be used now.
            Refused: as `Server.request`.
        """
        for attempt in range(self._settings.retries + 1):
            try:
                return await server.request(method, path, body, timeout_s=min(CHECK_S, self._settings.timeout_s))
            except Fault as fault:
                server.rest(self._settings.retry_delay_s, fault.delay_s)
                if not fault.is_busy or attempt == self._settings.retries:
                    times = f" ({attempt + 1} attempts)" if attempt else ""
                    remedy = "start it" if fault.is_down else "wait until it is free" if fault.is_busy else "see its log"
                    raise ServerError(f"regenerate.server: {server.name}: {fault}{times}; {remedy}") from fault
                await asyncio.sleep(max(0.0, server.ready_at - time.monotonic()))
        raise AssertionError

    def _is_hopeless(self, server: Server) -> bool:
        """Whether a server has been busy at every attempt, and not with our own requests."""
        return server.num_faults > self._settings.retries and not server.num_active

    async def _free_server(self) -> Server:
        while True:
            now = time.monotonic()
            server = min(self.servers, key=lambda server: (max(server.ready_at, now), server.num_active))
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
    """Raises the level of httpx and httpcore, which log URLs below it."""
    for name in ("httpx", "httpcore"):
        logging.getLogger(name).setLevel(logging.WARNING)


def _retry_after(response: httpx.Response) -> float | None:
    """Returns the pause of the header Retry-After, in seconds or as a date."""
    value = response.headers.get("retry-after", "")
    try:
        return max(0.0, float(value))
    except ValueError:
        pass
    try:
        return max(0.0, parsedate_to_datetime(value).timestamp() - time.time())
    except (ValueError, TypeError):
        return None
