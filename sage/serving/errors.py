"""Errors as clients of the API receive them: a status and one line, in OpenAI's JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from http import HTTPStatus

from fastapi import Response

MAX_MESSAGE = 400  # characters; a message may quote a value of the request
KINDS = {
    HTTPStatus.UNAUTHORIZED: "authentication_error",
    HTTPStatus.FORBIDDEN: "permission_error",
    HTTPStatus.NOT_FOUND: "not_found_error",
    HTTPStatus.TOO_MANY_REQUESTS: "rate_limit_error",
}


class ApiError(Exception):
    """An error response.

    Args:
        message: one line that names the field, what is wrong with it, and the remedy.
        param: field of the request.
        code: short name of the error, for programs.
    """

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        line = " ".join(message.split())
        super().__init__(line if len(line) <= MAX_MESSAGE else f"{line[: MAX_MESSAGE - 3]}...")
        self.status, self.param, self.code, self.headers = status, param, code, headers

    def body(self) -> bytes:
        """Returns the JSON as ASCII: a message may quote text that is invalid Unicode."""
        default = "server_error" if self.status >= HTTPStatus.INTERNAL_SERVER_ERROR else "invalid_request_error"
        kind = KINDS.get(HTTPStatus(self.status), default)
        error = {"message": str(self), "type": kind, "param": self.param, "code": self.code}
        return json.dumps({"error": error}).encode("ascii")

    def response(self) -> Response:
        """Returns the response."""
        return Response(self.body(), self.status, self.headers, "application/json")


def invalid(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """Returns the error for a request that no retry can fix."""
    return ApiError(HTTPStatus.BAD_REQUEST, message, param, code)


def internal() -> ApiError:
    """Returns the error for a fault of the server; its log has the traceback."""
    return ApiError(HTTPStatus.INTERNAL_SERVER_ERROR, "the server failed at this request; its log names the reason")


def stopping() -> ApiError:
    """Returns the error for requests that arrive, or still wait, after the signal to stop."""
    return ApiError(HTTPStatus.SERVICE_UNAVAILABLE, "the server is stopping", headers={"Retry-After": "5"})
