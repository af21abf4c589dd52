"""Turns errors into HTTP answers in the OpenAI shape, in one place for every service."""

from __future__ import annotations

import math
from typing import Any

import orjson
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import Match

from shared.errors import (
    DiptychError,
    InvalidRequest,
    MethodNotAllowed,
    NotFound,
    PayloadTooLarge,
    UpstreamFailed,
)
from shared.log import MAX_VALUE_CHARS, redact
from shared.wire.common import WireError

MAX_ECHO_CHARS = 80
_METHODS = ("DELETE", "GET", "HEAD", "PATCH", "POST", "PUT")


def error_response(error: DiptychError) -> Response:
    headers = {}
    if error.retry_after_s is not None:
        headers["Retry-After"] = str(max(1, math.ceil(error.retry_after_s)))
    if isinstance(error, MethodNotAllowed) and error.allowed:
        headers["Allow"] = error.allowed
    return Response(
        orjson.dumps(error.to_body()), status_code=error.status, headers=headers, media_type="application/json"
    )


def wire_error(error: DiptychError) -> WireError:
    """The same error as an event of a stream."""
    return WireError(
        status=error.status,
        message=error.message,
        type=error.type,
        code=error.code,
        param=error.param,
        retry_after_s=error.retry_after_s,
    )


def install_error_handlers(app: FastAPI) -> None:
    """Every error of `app` leaves as `{"error": {...}}`. Unexpected exceptions are for `request_id.RequestIds`."""

    async def on_diptych_error(_request: Request, error: Exception) -> Response:
        assert isinstance(error, DiptychError)
        return error_response(error)

    async def on_validation_error(_request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return error_response(from_validation_errors(list(error.errors())))

    async def on_http_exception(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        return error_response(_from_http_exception(request, error))

    app.add_exception_handler(DiptychError, on_diptych_error)
    app.add_exception_handler(RequestValidationError, on_validation_error)
    app.add_exception_handler(HTTPException, on_http_exception)


def _from_http_exception(request: Request, error: HTTPException) -> DiptychError:
    where = f"{request.method} {redact(request.url.path)}"
    if error.status_code == 404:
        return NotFound(f"there is no {where} here")
    if error.status_code == 405:
        allowed = _allowed_methods(request)
        refused = MethodNotAllowed(f"{where} is not allowed; the path takes {allowed}")
        refused.allowed = allowed
        return refused
    if error.status_code == 413:
        return PayloadTooLarge(str(error.detail))
    if error.status_code < 500:
        return InvalidRequest(str(error.detail))
    return UpstreamFailed(str(error.detail))


def _allowed_methods(request: Request) -> str:
    """Of all routes of this path: the one that refused says only its own."""
    routes = request.app.routes
    scopes = {method: {**request.scope, "method": method} for method in _METHODS}
    allowed = [m for m, scope in scopes.items() if any(route.matches(scope)[0] is Match.FULL for route in routes)]
    return ", ".join(allowed)


def from_validation_errors(errors: list[Any]) -> InvalidRequest:
    """One readable sentence for pydantic's first complaint: where, what was given, what is wanted."""
    first: dict[str, Any] = errors[0] if errors else {"loc": (), "msg": "the body is not valid", "type": ""}
    param = location(first.get("loc", ()))
    if first.get("type") == "json_invalid":
        return InvalidRequest(f"the body is not valid JSON: {first.get('ctx', {}).get('error', first['msg'])}")
    given = first.get("input")
    shown = "" if isinstance(given, (dict, list)) or given is None else f" (given: {_short(given)})"
    return InvalidRequest(f"{param or 'body'}: {first['msg']}{shown}", param=param)


def location(parts: tuple[Any, ...] | list[Any]) -> str | None:
    """("body", "messages", 0, "content") -> "messages[0].content"."""
    text = ""
    for part in parts:
        if isinstance(part, int):
            text += f"[{part}]"
        elif part != "body":
            text += f".{part}" if text else str(part)
    return text or None


def _short(value: object) -> str:
    shown = redact(repr(value[:MAX_VALUE_CHARS] if isinstance(value, str | bytes) else value))
    return shown if len(shown) <= MAX_ECHO_CHARS else f"{shown[:MAX_ECHO_CHARS]}…"
