"""Everything that goes wrong is answered as OpenAI does: a status, and a body that says what, where and why."""

from __future__ import annotations

import math
from typing import Any

from fastapi import FastAPI
from fastapi.requests import Request
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from echelon.serve.request import BadRequest, EngineFailed, Refused

_LONGEST = 600  # characters of a message, which may repeat what was sent


class ApiError(Exception):
    """An answer other than 200."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        parameter: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.kind, self.parameter = status, message, kind, parameter
        self.code, self.headers = code, headers

    def body(self) -> dict[str, Any]:
        message = self.message if len(self.message) <= _LONGEST else f"{self.message[:_LONGEST]}…"
        return {"error": {"message": message, "type": self.kind, "param": self.parameter, "code": self.code}}

    def response(self) -> JSONResponse:
        return JSONResponse(self.body(), self.status, self.headers)


def ended() -> ApiError:
    """What is told to clients whose answers were cut off, or not begun, since the server ends."""
    message = "the server is ending: ask another, or this one when it is there again"
    return ApiError(503, message, kind="server_error", code="server_ending", headers={"Retry-After": "5"})


def as_api_error(error: Exception) -> ApiError:
    """How an error is told; what nobody foresaw is told without its details, which are logged."""
    match error:
        case ApiError():
            return error
        case BadRequest():
            return ApiError(400, str(error), parameter=error.parameter)
        case Refused():
            wait = str(max(1, math.ceil(error.retry_seconds)))
            kind, code = "rate_limit_error", "engine_overloaded"
            return ApiError(429, str(error), kind=kind, code=code, headers={"Retry-After": wait})
        case EngineFailed():
            return ApiError(
                503, "the engine has failed: the server's log tells why", kind="server_error", code="engine_failed"
            )
        case HTTPException(status_code=404 | 405 as status):
            code = "not_found" if status == 404 else "method_not_allowed"
            return ApiError(status, str(error.detail), code=code, headers=dict(error.headers or {}))
        case _:
            return ApiError(500, "an error inside the server, which its log tells", kind="server_error")


def answer_errors(app: FastAPI) -> None:
    def answer(request: Request, error: Exception) -> JSONResponse:
        if isinstance(error, HTTPException):
            methods = (error.headers or {}).get("Allow")
            hint = f"it takes {methods}" if methods else "see the API under /v1, /health, /metrics and the page at /"
            words = f"there is no {request.method} {request.url.path}: {hint}"
            error = HTTPException(error.status_code, words, error.headers)
        return as_api_error(error).response()

    for kind in (ApiError, BadRequest, Refused, EngineFailed, HTTPException, Exception):
        app.add_exception_handler(kind, answer)
