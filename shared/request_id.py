"""RequestIds: one id follows a request through every service, in headers and in logs.

Plain ASGI: the framework's own middleware class would copy every streamed chunk through a queue.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager

import structlog
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from shared.errors import DiptychError
from shared.http_errors import error_response
from shared.log import get_logger
from shared.wire.common import REQUEST_ID_HEADER

log = get_logger(__name__)
_WELL_FORMED = re.compile(r"[\x21-\x7e]{1,128}")


class RequestIds:
    """Around an app: log lines name the request they belong to, answers carry its id, those to a bug of ours too."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = request_id_of(scope)
        responder = Responder(send, request_id)
        with logged_as(request_id):
            try:
                await self._app(scope, receive, responder.send)
            except Exception as error:  # noqa: BLE001 - a bug of ours, answered as one
                await responder.fail(error, scope, receive)


class Responder:
    """Sends an answer with the request's id, and the answer to an exception that nobody expected.

    more_headers   of the answer, asked for when it begins
    status         of the answer, once it has begun
    """

    def __init__(self, send: Send, request_id: str, more_headers: Callable[[], Mapping[str, str]] = dict) -> None:
        self._send = send
        self._more_headers = more_headers
        self._id_header = (REQUEST_ID_HEADER.lower().encode(), request_id.encode())
        self.status: int | None = None

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            more = [(name.encode(), value.encode()) for name, value in self._more_headers().items()]
            message["headers"] = [*message["headers"], self._id_header, *more]
        await self._send(message)

    async def fail(self, error: Exception, scope: Scope, receive: Receive) -> None:
        """Log it; answer 500 if nothing was sent yet, else cut the connection by raising it again."""
        log.error("unexpected error", path=scope["path"], exc_info=error)
        if self.status is not None:
            raise error
        answer = error_response(DiptychError("internal error; the server's log has the details"))
        await answer(scope, receive, self.send)


def request_id_of(scope: Scope) -> str:
    """The caller's own id if it is one that can be put into a header and a log line; else a new one."""
    given = Request(scope).headers.get(REQUEST_ID_HEADER, "")
    return given if _WELL_FORMED.fullmatch(given) else uuid.uuid4().hex


def logged_as(request_id: str) -> AbstractContextManager[None]:
    """While entered, log lines of this task and of those that it starts name the request."""
    bound: AbstractContextManager[None] = structlog.contextvars.bound_contextvars(request_id=request_id)
    return bound
