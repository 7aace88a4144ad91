"""Errors as clients of the API receive them: a status and one line, in OpenAI's JSON."""

from __future__ import annotations

import json
from http import HTTPStatus

from fastapi import Response
from starlette.exceptions import HTTPException

MAX_MESSAGE = 400  # characters; a message may quote a value of the request
KINDS = {
    HTTPStatus.UNAUTHORIZED: "authentication_error",
    HTTPStatus.FORBIDDEN: "permission_error",
    HTTPStatus.NOT_FOUND: "not_found_error",
    HTTPStatus.TOO_MANY_REQUESTS: "rate_limit_error",
}


class ApiError(HTTPException):
    """An error response.

    Args:
        message: one line that names the field, what is wrong with it, and the remedy.
        param: field of the request.
        code: short name of the error, for programs.
        retry_s: seconds to wait.
    """

    def __init__(
        self, status: int, message: str, param: str | None = None, code: str | None = None, retry_s: int | None = None
    ) -> None:
        line = " ".join(message.split())
        headers = None if retry_s is None else {"Retry-After": str(retry_s)}
        super().__init__(status, line if len(line) <= MAX_MESSAGE else f"{line[: MAX_MESSAGE - 3]}...", headers)
        self.param, self.code = param, code

    def body(self) -> bytes:
        """Returns the JSON as ASCII: a message may quote text that is invalid Unicode."""
        default = "server_error" if self.status_code >= HTTPStatus.INTERNAL_SERVER_ERROR else "invalid_request_error"
        kind = KINDS.get(HTTPStatus(self.status_code), default)
        error = {"message": self.detail, "type": kind, "param": self.param, "code": self.code}
        return json.dumps({"error": error}).encode("ascii")

    def response(self) -> Response:
        """Returns the response."""
        return Response(self.body(), self.status_code, self.headers, "application/json")


def invalid(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """Returns the error for a request that no retry can fix."""
    return ApiError(HTTPStatus.BAD_REQUEST, message, param, code)


def internal() -> ApiError:
    """Returns the error for a fault of the server; its log has the traceback."""
    return ApiError(HTTPStatus.INTERNAL_SERVER_ERROR, "the server failed at this request; its log names the reason")


def stopping() -> ApiError:
    """Returns the error for requests that arrive, or still wait, after the signal to stop."""
    return ApiError(HTTPStatus.SERVICE_UNAVAILABLE, "the server is stopping", retry_s=5)
