"""The routes of the server, and who may use them: the API key, and the hosts that a browser may call a local server by."""

from __future__ import annotations

import hmac
import time
from http import HTTPStatus
from typing import Any

from fastapi import Depends, FastAPI, Request, Response
from starlette.exceptions import HTTPException

from sage.serving.errors import ApiError, internal, stopping
from sage.serving.exchange import Exchange
from sage.serving.metrics import CONTENT_TYPE
from sage.serving.service import Service

CHAT = "/v1/chat/completions"
OPEN_PATHS = ("/health",)  # without a key
LOCAL_HOSTS = ("localhost", "127.0.0.1", "[::1]")


def new_app(service: Service) -> FastAPI:
    """Returns the ASGI application of a service whose scheduler runs."""

    async def guard(request: Request) -> None:
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

    app = FastAPI(title="sage-serve", docs_url=None, redoc_url=None, openapi_url=None, dependencies=[Depends(guard)])
    model = {"id": service.model, "object": "model", "created": int(time.time()), "owned_by": "sage-draft"}
    model |= {"root": service.model, "max_model_len": service.max_context}

    @app.post(CHAT)
    async def chat_completions() -> Response:
        return Exchange(service)

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
        return {"status": "ok"}

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(service.metrics.text(), media_type=CONTENT_TYPE)

    async def on_error(request: Request, error: Exception) -> Response:
        if not isinstance(error, ApiError):
            error = _unrouted(request, error) if isinstance(error, HTTPException) else internal()
        if request.url.path == CHAT:
            service.metrics.responses.labels(error.status).inc()
        return error.response()

    for kind in (ApiError, HTTPException, Exception):
        app.add_exception_handler(kind, on_error)
    return app


def _unrouted(request: Request, error: HTTPException) -> ApiError:
    path, method = request.url.path[:100], request.method[:20]
    if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        return ApiError(error.status_code, f"{method} {path}: not allowed; {CHAT} takes POST, other paths GET")
    if error.status_code == HTTPStatus.NOT_FOUND:
        return ApiError(error.status_code, f"{path}: unknown; the server has {CHAT}, /v1/models, /health and /metrics")
    return ApiError(error.status_code, str(error.detail))
