"""The routes of the server, who may use them, and a chat completion request with its answer.

The API key, and the hosts that a browser may call a local server by, are checked first, then a place is reserved, and only then
is the body read. The status line of an answer is sent with its first part, so whatever fails before has its own status, in a
stream as well.
"""

from __future__ import annotations

import asyncio
import hmac
import time
from collections.abc import AsyncIterator, Awaitable
from contextlib import aclosing, suppress
from http import HTTPStatus
from typing import Any

from fastapi import Depends, FastAPI, Request, Response
from fastapi.responses import StreamingResponse
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from pydantic.json_schema import models_json_schema
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Receive, Scope, Send

from sage.serving.bodies import JSON
from sage.serving.chat_request import ChatRequest
from sage.serving.completion import Completion, error_event
from sage.serving.errors import ApiError, internal, stopping
from sage.serving.logs import AccessLog
from sage.serving.request import Request as Kind
from sage.serving.request import TextRequest
from sage.serving.service import Service

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
KINDS: dict[str, type[Kind]] = {CHAT: ChatRequest, COMPLETIONS: TextRequest}
SCHEMAS = "#/components/schemas/"
OPEN_PATHS = ("/health",)  # without a key
LOCAL_HOSTS = ("localhost", "127.0.0.1", "[::1]")
EVENTS = "text/event-stream"
UNBUFFERED = {"cache-control": "no-cache", "x-accel-buffering": "no"}


def new_app(service: Service) -> ASGIApp:
    """Returns the ASGI application of a service whose scheduler runs."""

    async def guard(request: Request) -> None:
        check_access(service, request)

    app = FastAPI(title="sage-serve", docs_url=None, redoc_url=None, dependencies=[Depends(guard)])
    if service.allowed_origins:
        app.add_middleware(CORSMiddleware, allow_origins=service.allowed_origins, allow_methods=["*"], allow_headers=["*"])
    model = {"id": service.model, "object": "model", "created": int(time.time()), "owned_by": "sage-draft"}
    model |= {"root": service.model, "max_model_len": service.max_context}

    @app.post(CHAT)
    async def chat_completions() -> Response:
        return Exchange(service, ChatRequest)

    @app.post(COMPLETIONS)
    async def completions() -> Response:
        return Exchange(service, TextRequest)

    @app.get("/v1/models")
    async def models() -> Any:
        return {"object": "list", "data": [model]}

    @app.get("/v1/models/{name:path}")
    async def one_model(name: str) -> Any:
        if name != service.model:
            raise ApiError(HTTPStatus.NOT_FOUND, f"model: {name!r} is not served; {service.model!r} is", code="model_not_found")
        return model

    @app.get("/health")
    async def health() -> Any:
        if not service.scheduler.decoding.is_alive:
            raise internal()
        if service.scheduler.is_draining:
            raise stopping()
        if age := service.scheduler.hung_s:
            raise ApiError(HTTPStatus.SERVICE_UNAVAILABLE, f"the decoding process has made no round for {age:.0f} s")
        return {"status": "ok"}

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(generate_latest(service.metrics.registry), media_type=CONTENT_TYPE_LATEST)

    async def on_error(request: Request, error: Exception) -> Response:
        if not isinstance(error, ApiError):
            error = _unrouted(request, error) if isinstance(error, HTTPException) else internal()
        if request.url.path in KINDS:
            service.metrics.responses.labels(error.status).inc()
        return error.response()

    for kind in (ApiError, HTTPException, Exception):
        app.add_exception_handler(kind, on_error)
    app.openapi_schema = _schema(app)
    return AccessLog(app)


def check_access(service: Service, request: Request) -> None:
    """Refuses requests without the key. Without a key, a server that listens locally also refuses requests under any name
    but that of this machine: a web page could reach it by a name that resolves to it.
    """
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    is_known = scheme.lower() == "bearer" and hmac.compare_digest(given.strip().encode(), service.api_key.encode())
    if service.api_key and request.url.path not in OPEN_PATHS and not is_known:
        message = "Authorization: missing or wrong; send Bearer and the key of the server"
        raise ApiError(HTTPStatus.UNAUTHORIZED, message, code="invalid_api_key")
    host = request.headers.get("host", "").lower()
    name = host if host.endswith("]") else host.rpartition(":")[0] or host
    if not service.api_key and service.is_local and name not in LOCAL_HOSTS:
        raise ApiError(HTTPStatus.FORBIDDEN, f"Host: {name!r} is not this machine; start the server with --api-key")


def _schema(app: FastAPI) -> dict[str, Any]:
    """Returns the OpenAPI schema, with the bodies of requests, which are validated in other threads."""
    _, bodies = models_json_schema([(kind, "validation") for kind in KINDS.values()], ref_template=f"{SCHEMAS}{{model}}")
    found = app.openapi() | {"components": {"schemas": bodies["$defs"]}}
    for path, kind in KINDS.items():
        content = {JSON: {"schema": {"$ref": f"{SCHEMAS}{kind.__name__}"}}}
        found["paths"][path]["post"]["requestBody"] = {"required": True, "content": content}
    return found


def _unrouted(request: Request, error: HTTPException) -> ApiError:
    path, method = request.url.path[:100], request.method[:20]
    if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        return ApiError(error.status_code, f"{method} {path}: not allowed; completions take POST, other paths GET")
    if error.status_code == HTTPStatus.NOT_FOUND:
        return ApiError(error.status_code, f"{path}: unknown; /openapi.json lists those of the server")
    return ApiError(error.status_code, str(error.detail))


# -- a request -------------------------------------------------------------------------------------------------------------


class Exchange(Response):
    """Receives a request of a kind and answers it; raises ApiError before anything is sent."""

    def __init__(self, service: Service, kind: type[Kind]) -> None:
        super().__init__()
        self._service, self._kind = service, kind

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        service = self._service
        with suppress(ClientDisconnect), service.scheduler.reserved() as place:
            async with service.inbox.body(Request(scope, receive)) as body:
                completion: Completion = await until_left(service.prepared(self._kind, body), receive)
                scope["state"]["completion"] = completion
            async with aclosing(service.scheduler.decode(place, completion.inputs, completion.sampling)) as results:
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
