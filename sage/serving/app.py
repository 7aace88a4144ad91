"""The routes of the server, who may use them, bodies of requests, answers, and the access log.

The API key, and the hosts that a browser may call a local server by, are checked first, then a place is reserved, and only then
is the body read. The status line of an answer is sent with its first part, so whatever fails before has its own status, in a
stream as well.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import time
import uuid
from collections.abc import AsyncIterator, Awaitable
from contextlib import aclosing, asynccontextmanager, suppress
from http import HTTPStatus
from typing import Any

from fastapi import Depends, FastAPI, Request, Response
from fastapi.responses import PlainTextResponse, StreamingResponse
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from pydantic.json_schema import models_json_schema
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sage.serving.completion import Completion, error_event
from sage.serving.errors import ApiError, internal, invalid, stopping
from sage.serving.request import ChatRequest, CompletionRequest, TextRequest
from sage.serving.service import Service

logger = logging.getLogger(__name__)
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
KINDS: dict[str, type[CompletionRequest]] = {CHAT: ChatRequest, COMPLETIONS: TextRequest}
SCHEMAS = "#/components/schemas/"
OPEN_PATHS = ("/health",)  # without a key
LOCAL_HOSTS = ("localhost", "127.0.0.1", "[::1]")
JSON, EVENTS = "application/json", "text/event-stream"
UNBUFFERED = {"cache-control": "no-cache", "x-accel-buffering": "no"}
BODY_TIMEOUT_S = 60.0
NUM_LARGEST = 4  # of the largest bodies, which all requests that are received and parsed have together
MAX_VALUES = 50_000  # of JSON: parsing keeps Python's lock
ID_HEADER, MAX_ID = "x-request-id", 128  # characters
LEFT = 499  # status of a request whose client has left, as of nginx


def new_app(service: Service) -> ASGIApp:
    """Returns the ASGI application of a service whose scheduler runs."""

    errors: dict[int | str, Any] = {"default": {"description": "An error"}}
    app = FastAPI(title="sage-serve", docs_url=None, redoc_url=None, dependencies=[Depends(check_access)], responses=errors)
    app.state.service, app.state.inbox = service, Inbox(service.limits.max_body_bytes)
    if origins := service.access.allowed_origins:
        app.add_middleware(CORSMiddleware, allow_origins=origins, allow_methods=["*"], allow_headers=["*"])
    model = {"id": service.model, "object": "model", "created": int(time.time()), "owned_by": "sage-draft"}
    model |= {"root": service.model, "max_model_len": service.max_context}

    @app.post(CHAT)
    async def chat_completions() -> Response:
        return Exchange(ChatRequest)

    @app.post(COMPLETIONS)
    async def completions() -> Response:
        return Exchange(TextRequest)

    @app.get("/v1/models")
    async def models() -> Any:
        return {"object": "list", "data": [model]}

    @app.get("/v1/models/{name:path}")
    async def named_model(name: str) -> Any:
        if name != service.model:
            raise ApiError(HTTPStatus.NOT_FOUND, f"model: {name!r} is not served; {service.model!r} is", code="model_not_found")
        return model

    @app.get("/health")
    async def health() -> Any:
        if not service.scheduler.process.is_alive:
            raise internal()
        if service.scheduler.is_draining:
            raise stopping()
        if age := service.scheduler.hung_s:
            raise ApiError(HTTPStatus.SERVICE_UNAVAILABLE, f"the decoding process has made no round for {age:.0f} s")
        return {"status": "ok"}

    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        return Response(generate_latest(service.metrics.registry), media_type=CONTENT_TYPE_LATEST)

    async def on_error(request: Request, error: Exception) -> Response:
        if not isinstance(error, ApiError):
            error = _unrouted(request, error) if isinstance(error, HTTPException) else internal()
        if request.url.path in KINDS:
            service.metrics.responses.labels(error.status_code).inc()
        return error.response()

    for kind in (HTTPException, Exception):
        app.add_exception_handler(kind, on_error)
    app.openapi_schema = _schema(app)
    return AccessLog(app)


async def check_access(request: Request) -> None:
    """Refuses requests without the key. Without a key, a server that listens locally also refuses requests under any name
    but that of this machine: a web page could reach it by a name that resolves to it.
    """
    service: Service = request.app.state.service
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    is_known = scheme.lower() == "bearer" and hmac.compare_digest(given.strip().encode(), service.access.api_key.encode())
    if service.access.api_key and request.url.path not in OPEN_PATHS and not is_known:
        message = "Authorization: missing or wrong; send Bearer and the key of the server"
        raise ApiError(HTTPStatus.UNAUTHORIZED, message, code="invalid_api_key")
    host = request.headers.get("host", "").lower()
    name = host if host.endswith("]") else host.rpartition(":")[0] or host
    if not service.access.api_key and service.access.is_local and name not in LOCAL_HOSTS:
        raise ApiError(HTTPStatus.FORBIDDEN, f"Host: {name!r} is not this machine; start the server with --api-key")


def _schema(app: FastAPI) -> dict[str, Any]:
    """Returns the OpenAPI schema, with the bodies of requests, which are validated in other threads."""
    _, bodies = models_json_schema([(kind, "validation") for kind in KINDS.values()], ref_template=f"{SCHEMAS}{{model}}")
    schema = app.openapi() | {"components": {"schemas": bodies["$defs"]}}
    for path, kind in KINDS.items():
        content = {JSON: {"schema": {"$ref": f"{SCHEMAS}{kind.__name__}"}}}
        operation = schema["paths"][path]["post"]
        operation["requestBody"] = {"required": True, "content": content}
        operation["responses"]["200"]["content"] = {JSON: {}, EVENTS: {}}
    return schema


def _unrouted(request: Request, error: HTTPException) -> ApiError:
    path, method = request.url.path[:100], request.method[:20]
    if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        return ApiError(error.status_code, f"{method} {path}: not allowed; completions take POST, other paths GET")
    if error.status_code == HTTPStatus.NOT_FOUND:
        return ApiError(error.status_code, f"{path}: unknown; /openapi.json lists those of the server")
    return ApiError(error.status_code, str(error.detail))


class AccessLog:
    """Gives requests an id, that of their client if it sends one, and logs them when they have ended. Answers HEAD as GET."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handles a request."""
        request_id = Headers(scope=scope).get(ID_HEADER, "")[:MAX_ID] or uuid.uuid4().hex
        method, status, started, first_s = scope["method"], LEFT, time.monotonic(), 0.0
        state: dict[str, Any] = {}

        async def send_with_id(message: Message) -> None:
            nonlocal status, first_s
            if message["type"] == "http.response.start":
                status, first_s = message["status"], time.monotonic() - started
                message = {
                    **message,
                    "headers": [*message.get("headers", ()), (ID_HEADER.encode(), request_id.encode("latin-1"))],
                }
            await send(message)

        try:
            inner = {**scope, "state": state, "method": "GET" if method == "HEAD" else method}  # uvicorn omits the body of HEAD
            await self._app(inner, receive, send_with_id)
        finally:
            path, seconds = scope["raw_path"].decode("ascii", "replace"), time.monotonic() - started
            tokens = f", {state['completion'].summary()}" if "completion" in state else ""
            logger.info(
                "%s %s %s %d in %.3f s, first byte %.3f s%s", request_id, method, path, status, seconds, first_s, tokens
            )


# -- a request -------------------------------------------------------------------------------------------------------------


class Inbox:
    """Reads bodies of at most `max_bytes`, within one budget of bytes and a time limit."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes, self._num_left = max_bytes, NUM_LARGEST * max_bytes

    @asynccontextmanager
    async def body(self, request: Request) -> AsyncIterator[bytearray]:
        """Yields a request's body; ApiError for one that cannot be parsed, ClientDisconnect if it does not end.

        Its bytes count until the block ends.
        """
        if request.headers.get("content-type", "").partition(";")[0].strip().lower() != JSON:
            raise ApiError(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, f"content-type: give {JSON}")
        data = bytearray()
        try:
            await self._read(request, data)
            if data.count(b",") + data.count(b"[") + data.count(b"{") > MAX_VALUES:
                raise invalid(f"body: more than {MAX_VALUES} commas and brackets; shorten the texts", code="request_too_large")
            yield data
        finally:
            self._num_left += len(data)

    async def _read(self, request: Request, data: bytearray) -> None:
        try:
            async with asyncio.timeout(BODY_TIMEOUT_S):
                async for chunk in request.stream():
                    if len(data) + len(chunk) > self._max_bytes:
                        message = f"body: more than {self._max_bytes} bytes; send fewer or smaller images"
                        raise ApiError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, message, code="request_too_large")
                    if len(chunk) > self._num_left:
                        message = "body: other requests are too large at the moment; try again later"
                        raise ApiError(HTTPStatus.TOO_MANY_REQUESTS, message, code="queue_full", retry_s=1)
                    data += chunk
                    self._num_left -= len(chunk)
        except TimeoutError as error:
            raise ApiError(HTTPStatus.REQUEST_TIMEOUT, f"body: not complete after {BODY_TIMEOUT_S:g} s") from error


class Exchange(Response):
    """Receives a request of a kind and answers it; raises ApiError before anything is sent."""

    def __init__(self, kind: type[CompletionRequest]) -> None:
        super().__init__()
        self._kind = kind

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        service, inbox = scope["app"].state.service, scope["app"].state.inbox
        with suppress(ClientDisconnect), service.scheduler.reserved() as ticket:
            async with inbox.body(Request(scope, receive)) as body:
                completion: Completion = await until_left(service.prepared(self._kind, body), receive)
                scope["state"]["completion"] = completion
            async with aclosing(
                service.scheduler.decode(ticket, completion.inputs, completion.sampling, **completion.options)
            ) as results:
                parts = completion.parts(results)
                first = await until_left(anext(parts), receive)
                service.metrics.responses.labels(HTTPStatus.OK.value).inc()
                answer = Response(first, media_type=JSON)
                if completion.request.stream:
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


async def until_left(work: Awaitable[Any], receive: Receive) -> Any:
    """Returns the result of `work`, which is cancelled when the client closes the connection; ClientDisconnect if it has."""

    async def leave() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    task, leaving = asyncio.ensure_future(work), asyncio.ensure_future(leave())
    try:
        await asyncio.wait({task, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        for pending in (task, leaving):
            pending.cancel()
        await asyncio.gather(task, leaving, return_exceptions=True)
