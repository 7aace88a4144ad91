"""One chat completion request and its answer: body, preparation, tokens as they are accepted, and a client that leaves.

The status line is sent with the first part of the answer, so whatever fails before has its own status, in a stream as well.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable
from contextlib import aclosing, suppress
from http import HTTPStatus
from typing import Any

from fastapi import Request, Response
from fastapi.responses import StreamingResponse
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from sage.serving.completion import Completion, error_event
from sage.serving.errors import ApiError, internal
from sage.serving.service import Service

BODY_TIMEOUT_S = 60.0
MAX_DISCARDED = 4  # times the largest body: what is read of a larger one, so that its client receives the answer
JSON, EVENTS = "application/json", "text/event-stream"
UNBUFFERED = {"cache-control": "no-cache", "x-accel-buffering": "no"}


class Exchange(Response):
    """Receives a chat completion request and answers it; raises ApiError before anything is sent."""

    def __init__(self, service: Service) -> None:
        super().__init__()
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        service = self._service
        with suppress(ClientDisconnect):
            body = await _body(Request(scope, receive), service.limits.max_body_bytes)
            with service.scheduler.reserved():
                work = asyncio.get_running_loop().run_in_executor(service.pool, service.prepare, body)
                prepared = await until_left(work, receive)
                async with aclosing(service.scheduler.decode(prepared.inputs, prepared.sampling)) as results:
                    parts = Completion(service, prepared).parts(results)
                    first = await until_left(anext(parts), receive)
                    service.metrics.responses.labels(HTTPStatus.OK.value).inc()
                    answer = Response(first, media_type=JSON)
                    if prepared.request.stream:
                        answer = StreamingResponse(_stream(first, parts), headers=UNBUFFERED, media_type=EVENTS)
                    await answer(scope, receive, send)


async def _stream(first: bytes, parts: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Yields the events of a stream; an error is one, too."""
    yield first
    try:
        async for part in parts:
            yield part
    except ApiError as error:
        yield error_event(error)
    except Exception:
        yield error_event(internal())
        raise


async def _body(request: Request, limit: int) -> bytes:
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != JSON:
        raise ApiError(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, f"content-type: give {JSON}")
    try:
        return await asyncio.wait_for(read_body(request, limit), BODY_TIMEOUT_S)
    except TimeoutError as error:
        raise ApiError(HTTPStatus.REQUEST_TIMEOUT, f"body: not complete after {BODY_TIMEOUT_S:g} s") from error


async def read_body(request: Request, limit: int) -> bytes:
    """Reads a request's body; ApiError if it is larger than `limit` bytes, ClientDisconnect if it does not end."""
    data, num_bytes = bytearray(), 0
    async for chunk in request.stream():
        num_bytes += len(chunk)
        if num_bytes <= limit:
            data += chunk
        elif num_bytes > MAX_DISCARDED * limit:
            break
    if num_bytes > limit:
        message = f"body: more than {limit} bytes; send fewer or smaller images"
        raise ApiError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, message, code="request_too_large")
    return bytes(data)


async def until_left(work: Awaitable[Any], receive: Receive) -> Any:
    """Returns the result of `work`, which is cancelled when the client closes the connection; ClientDisconnect if it has."""
    task, leaving = asyncio.ensure_future(work), asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait({task, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        for pending in (task, leaving):
            pending.cancel()
        await asyncio.gather(task, leaving, return_exceptions=True)


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
