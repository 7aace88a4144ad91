"""Bodies of requests: read within one budget of bytes and a time limit, and checked before they are parsed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from http import HTTPStatus

from starlette.requests import Request

from sage.serving.errors import ApiError, invalid

JSON = "application/json"
TIMEOUT_S = 60.0
NUM_LARGEST = 4  # of the largest bodies, which all requests that are received and parsed have together
MAX_VALUES = 50_000  # of JSON: parsing keeps Python's lock


class Inbox:
    """Reads bodies of at most `max_bytes`."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes, self._num_left = max_bytes, NUM_LARGEST * max_bytes

    @asynccontextmanager
    async def body(self, request: Request) -> AsyncIterator[bytes]:
        """Yields a request's body; ApiError for one that cannot be parsed, ClientDisconnect if it does not end.

        Its bytes count until the block ends.
        """
        if request.headers.get("content-type", "").partition(";")[0].strip().lower() != JSON:
            raise ApiError(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, f"content-type: give {JSON}")
        data = bytearray()
        try:
            await self._read(request, data)
            yield _checked(bytes(data))
        finally:
            self._num_left += len(data)

    async def _read(self, request: Request, data: bytearray) -> None:
        try:
            async with asyncio.timeout(TIMEOUT_S):
                async for chunk in request.stream():
                    self._take(data, chunk)
        except TimeoutError as error:
            raise ApiError(HTTPStatus.REQUEST_TIMEOUT, f"body: not complete after {TIMEOUT_S:g} s") from error

    def _take(self, data: bytearray, chunk: bytes) -> None:
        if len(data) + len(chunk) > self._max_bytes:
            message = f"body: more than {self._max_bytes} bytes; send fewer or smaller images"
            raise ApiError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, message, code="request_too_large")
        if len(chunk) > self._num_left:
            message = "body: other requests are too large at the moment; try again later"
            raise ApiError(HTTPStatus.TOO_MANY_REQUESTS, message, code="queue_full", headers={"Retry-After": "1"})
        data += chunk
        self._num_left -= len(chunk)


def _checked(body: bytes) -> bytes:
    if body.count(b",") + body.count(b"[") + body.count(b"{") > MAX_VALUES:
        raise invalid(f"body: more than {MAX_VALUES} commas and brackets; shorten the texts", code="request_too_large")
    return body
