"""Around every request: its id, its place among those in flight, its one log line and its metrics.

Plain ASGI: the framework's own middleware class would copy every streamed chunk through a queue.
"""

from __future__ import annotations

import re
import uuid

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.gateway.lifecycle import RETRY_AFTER_S, Lifecycle
from services.gateway.metrics import GatewayMetrics
from services.gateway.trace import Trace
from shared.errors import NotReady
from shared.http_errors import error_response
from shared.log import get_logger
from shared.wire import REQUEST_ID_HEADER

log = get_logger(__name__)
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")
_API = "/v1/"
_CLIENT_CLOSED = 499


def trace_of(request: Request) -> Trace:
    trace = request.state.trace
    assert isinstance(trace, Trace)
    return trace


class RequestScope:
    def __init__(self, app: ASGIApp, lifecycle: Lifecycle, metrics: GatewayMetrics) -> None:
        self._app = app
        self._lifecycle = lifecycle
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        trace = Trace(_request_id(Request(scope).headers.get(REQUEST_ID_HEADER, "")))
        scope.setdefault("state", {})["trace"] = trace
        status = 500
        id_header = (REQUEST_ID_HEADER.lower().encode(), trace.request_id.encode())

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], id_header]
            await send(message)

        is_api = scope["path"].startswith(_API)
        self._lifecycle.num_in_flight += is_api
        try:
            if is_api and self._lifecycle.is_draining:
                trace.outcome = NotReady.code
                leaving = NotReady("this gateway is shutting down", retry_after_s=RETRY_AFTER_S)
                await error_response(leaving)(scope, receive, send_with_id)
            else:
                await self._app(scope, receive, send_with_id)
        finally:
            self._lifecycle.num_in_flight -= is_api
            self._record(scope, status, trace)

    def _record(self, scope: Scope, status: int, trace: Trace) -> None:
        route = getattr(scope.get("route"), "path", "other")
        if trace.outcome == "aborted":
            status = _CLIENT_CLOSED
        elif status >= 400 and trace.outcome == "ok":
            trace.outcome = f"http_{status}"
        self._metrics.answered(route, status, trace)
        facts = {
            "request_id": trace.request_id,
            "route": route,
            "status": status,
            "outcome": trace.outcome,
            "duration_s": round(trace.elapsed_s, 4),
            "first_token_s": trace.first_token_s and round(trace.first_token_s, 4),
            "model": trace.model,
            "num_images": trace.num_images or None,
            "num_prompt_tokens": trace.num_prompt_tokens,
            "num_cached_tokens": trace.num_cached_tokens,
            "num_generated_tokens": trace.num_generated_tokens,
        }
        write = log.info if scope["path"].startswith(_API) else log.debug
        write("request", **{name: value for name, value in facts.items() if value is not None})


def _request_id(given: str) -> str:
    """The client's own id if it is one that can be put into a header and a log line."""
    return given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
