"""The routes of the server."""

from __future__ import annotations

import time
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException

from sage.serving.errors import ApiError, internal
from sage.serving.exchange import Exchange
from sage.serving.guard import Guard
from sage.serving.metrics import CONTENT_TYPE
from sage.serving.service import Service

CHAT = "/v1/chat/completions"


def new_app(service: Service) -> FastAPI:
    """Returns the ASGI application of a service whose scheduler runs."""
    app = FastAPI(title="sage-serve", docs_url=None, redoc_url=None, openapi_url=None)
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
        if not service.scheduler.is_alive:
            raise internal()
        if service.scheduler.is_draining:
            raise ApiError(HTTPStatus.SERVICE_UNAVAILABLE, "the server is stopping")
        return {"status": "ok"}

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(service.metrics.text(), media_type=CONTENT_TYPE)

    def counted(request: Request, error: ApiError) -> Response:
        if request.url.path == CHAT:
            service.metrics.responses.labels(error.status).inc()
        return respond(error)

    async def on_api_error(request: Request, error: Any) -> Response:
        return counted(request, error)

    async def on_http_error(request: Request, error: Any) -> Response:
        return counted(request, _unrouted(request, error))

    async def on_fault(request: Request, error: Any) -> Response:
        return counted(request, internal())

    app.add_exception_handler(ApiError, on_api_error)
    app.add_exception_handler(HTTPException, on_http_error)
    app.add_exception_handler(Exception, on_fault)
    app.add_middleware(Guard, service=service, respond=respond)
    return app


def respond(error: ApiError) -> Response:
    """Returns the response of an error."""
    return Response(error.body(), error.status, headers=error.headers, media_type="application/json")


def _unrouted(request: Request, error: HTTPException) -> ApiError:
    path, method = request.url.path[:100], request.method[:20]
    if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        return ApiError(error.status_code, f"{method} {path}: not allowed; {CHAT} takes POST, other paths GET")
    if error.status_code == HTTPStatus.NOT_FOUND:
        return ApiError(error.status_code, f"{path}: unknown; the server has {CHAT}, /v1/models, /health and /metrics")
    return ApiError(error.status_code, str(error.detail))
