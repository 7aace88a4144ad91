"""Who may use the server: the API key, and the hosts that a browser may call a local server by."""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import Any

from sage.serving.errors import ApiError
from sage.serving.service import Service

OPEN_PATHS = ("/health",)  # without a key
LOCAL_HOSTS = ("localhost", "127.0.0.1", "[::1]")
App = Callable[[Any, Any, Any], Awaitable[None]]


class Guard:
    """Refuses requests without the key. Without a key, a server that listens locally also refuses requests under any name but
    that of this machine: a web page could reach it by a name that resolves to it.
    """

    def __init__(self, app: App, service: Service, respond: Callable[[ApiError], App]) -> None:
        self._app, self._service, self._respond = app, service, respond

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        error = self._problem(scope) if scope["type"] == "http" else None
        await (self._app if error is None else self._respond(error))(scope, receive, send)

    def _problem(self, scope: Any) -> ApiError | None:
        headers = dict(scope["headers"])
        key = self._service.api_key
        if key and scope["path"] not in OPEN_PATHS:
            scheme, _, given = headers.get(b"authorization", b"").partition(b" ")
            is_equal = hmac.compare_digest(given.strip(), key.encode())
            if scheme.lower() != b"bearer" or not is_equal:
                message = "Authorization: missing or wrong; send Bearer and the key of the server"
                return ApiError(HTTPStatus.UNAUTHORIZED, message, code="invalid_api_key")
        if not key and self._service.is_local:
            host = headers.get(b"host", b"").decode("latin-1").lower()
            name = host if host.endswith("]") else host.rpartition(":")[0] or host
            if name not in LOCAL_HOSTS:
                return ApiError(HTTPStatus.FORBIDDEN, f"Host: {name!r} is not this machine; start the server with --api-key")
        return None
