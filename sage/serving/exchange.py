"""One chat completion request and its answer: body, preparation, tokens as they are accepted, and a client that leaves.

The status line is sent with the first tokens, so whatever fails before them has its own status, in a stream as well.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, suppress
from http import HTTPStatus
from typing import Any

from fastapi import Response

from sage.decoding.answer import Stats
from sage.serving.completion import Completion, error_chunk
from sage.serving.errors import ApiError, internal
from sage.serving.service import Service

BODY_TIMEOUT_S = 60.0
MAX_DISCARDED = 4  # times the largest body: what is read of a larger one, so that its client receives the answer
Receive = Callable[[], Awaitable[Any]]
Send = Callable[[Any], Awaitable[None]]
Results = AsyncIterator[list[int] | Stats]  # new tokens, the end of the answer last
JSON, EVENTS = b"application/json", b"text/event-stream; charset=utf-8"


class ClientLeft(Exception):
    """The client has closed the connection."""


class Exchange(Response):
    """Receives a chat completion request and answers it; raises ApiError before anything is sent."""

    def __init__(self, service: Service) -> None:
        super().__init__()
        self._service = service

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        with suppress(ClientLeft):
            body = await self._body(scope, receive)
            with self._service.scheduler.reserved():
                await until_left(self._answer(body, send), receive)

    async def _body(self, scope: Any, receive: Receive) -> bytes:
        limit = self._service.limits.max_body_bytes
        headers = dict(scope["headers"])
        if headers.get(b"content-type", b"").partition(b";")[0].strip().lower() != JSON:
            raise ApiError(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "content-type: give application/json")
        try:
            return await asyncio.wait_for(read_body(receive, limit), BODY_TIMEOUT_S)
        except TimeoutError as error:
            raise ApiError(HTTPStatus.REQUEST_TIMEOUT, f"body: not complete after {BODY_TIMEOUT_S:g} s") from error

    async def _answer(self, body: bytes, send: Send) -> None:
        service = self._service
        prepared = await asyncio.get_running_loop().run_in_executor(service.pool, service.prepare, body)
        completion = Completion(service, prepared)
        answer = self._stream if prepared.request.stream else self._complete
        async with aclosing(service.scheduler.decode(prepared.inputs, prepared.sampling)) as results:
            await answer(completion, results, send)

    async def _complete(self, completion: Completion, results: Results, send: Send) -> None:
        text = "".join([completion.add(result) async for result in results])
        data = json.dumps(completion.response(text), ensure_ascii=False).encode()
        await self._start(send, JSON, [(b"content-length", str(len(data)).encode())])
        await _send(send, data, more=False)

    async def _stream(self, completion: Completion, results: Results, send: Send) -> None:
        is_started = False
        try:
            async for result in results:
                if not is_started:
                    is_started = True
                    await self._start(send, EVENTS, [(b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")])
                    await _send(send, completion.first_chunk())
                text, tokens = completion.add(result), [] if isinstance(result, Stats) else result
                if text or (tokens and completion.prepared.request.return_token_ids):
                    await _send(send, completion.text_chunk(text, tokens))
            await _send(send, completion.last_chunks(), more=False)
        except Exception as error:
            if not is_started:
                raise
            await _send(send, error_chunk((error if isinstance(error, ApiError) else internal()).content), more=False)
            if not isinstance(error, ApiError):
                raise

    async def _start(self, send: Send, kind: bytes, headers: list[tuple[bytes, bytes]]) -> None:
        self._service.metrics.responses.labels(HTTPStatus.OK.value).inc()
        headers = [(b"content-type", kind), *headers]
        await send({"type": "http.response.start", "status": HTTPStatus.OK.value, "headers": headers})


async def read_body(receive: Receive, limit: int) -> bytes:
    """Reads a request's body; ApiError if it is larger than `limit` bytes, ClientLeft if it does not end."""
    data, num_bytes = bytearray(), 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientLeft
        chunk = message.get("body", b"")
        num_bytes += len(chunk)
        if num_bytes <= limit:
            data += chunk
        else:
            data.clear()
        if not message.get("more_body", False) or num_bytes > MAX_DISCARDED * limit:
            break
    if num_bytes > limit:
        message = f"body: more than {limit} bytes; send fewer or smaller images"
        raise ApiError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, message, code="request_too_large")
    return bytes(data)


async def until_left(work: Any, receive: Receive) -> None:
    """Runs `work`, and cancels it when the client closes the connection; ClientLeft if it has."""
    task = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait({task, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            task.result()
            return
        raise ClientLeft
    finally:
        for pending in (task, leaving):
            pending.cancel()
        await asyncio.gather(task, leaving, return_exceptions=True)


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _send(send: Send, data: bytes, more: bool = True) -> None:
    await send({"type": "http.response.body", "body": data, "more_body": more})
