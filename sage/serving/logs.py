"""The log of the server, and a line for each request in it."""

from __future__ import annotations

import logging
import time
import uuid
from typing import Any

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

logger = logging.getLogger(__name__)
ID_HEADER = "x-request-id"
MAX_ID = 128  # characters
LEFT = 499  # status of a request whose client has left, as of nginx


def start_logging(level: str) -> None:
    """Logs this package from `level` on, and others from warnings on, with the time of each line."""
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("sage").setLevel(level.upper())


class AccessLog:
    """Gives requests an id, that of their client if it sends one, and logs them when they have ended. Answers HEAD as GET."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handles a request."""
        number = Headers(scope=scope).get(ID_HEADER, "")[:MAX_ID] or uuid.uuid4().hex
        method, status, started, first_s = scope["method"], LEFT, time.monotonic(), 0.0
        state: dict[str, Any] = {}

        async def send_with_id(message: Message) -> None:
            nonlocal status, first_s
            if message["type"] == "http.response.start":
                status, first_s = message["status"], time.monotonic() - started
                message = {**message, "headers": [*message.get("headers", ()), (ID_HEADER.encode(), number.encode("latin-1"))]}
            await send(message)

        try:
            inner = {**scope, "state": state, "method": "GET" if method == "HEAD" else method}  # uvicorn omits the body of HEAD
            await self._app(inner, receive, send_with_id)
        finally:
            path, seconds = scope["raw_path"].decode("ascii", "replace"), time.monotonic() - started
            tokens = f", {state['completion'].summary()}" if "completion" in state else ""
            logger.info("%s %s %s %d in %.3f s, first byte %.3f s%s", number, method, path, status, seconds, first_s, tokens)
