"""Around every request: its id, its place among those in flight, its one log line and its metrics.

Plain ASGI: the framework's own middleware class would copy every streamed chunk through a queue.
"""

from __future__ import annotations

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from services.gateway.key_limits import KeyLimits
from services.gateway.lifecycle import RETRY_AFTER_S, Lifecycle
from services.gateway.metrics import GatewayMetrics
from services.gateway.trace import Trace
from shared.errors import DiptychError, NotReady
from shared.http_errors import error_response
from shared.log import get_logger
from shared.request_id import Responder, logged_as, request_id_of

log = get_logger(__name__)
_API = "/v1/"
_CLIENT_CLOSED = 499


def trace_of(request: Request) -> Trace:
    trace = request.state.trace
    assert isinstance(trace, Trace)
    return trace


class RequestScope:
    def __init__(self, app: ASGIApp, lifecycle: Lifecycle, limits: KeyLimits, metrics: GatewayMetrics) -> None:
        self._app = app
        self._lifecycle = lifecycle
        self._limits = limits
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        trace = Trace(request_id_of(scope))
        scope.setdefault("state", {})["trace"] = trace
        responder = Responder(send, trace.request_id)
        is_api = scope["path"].startswith(_API)
        self._lifecycle.num_in_flight += is_api
        try:
            with logged_as(trace.request_id):
                await self._answer(scope, receive, responder, trace)
        finally:
            self._lifecycle.num_in_flight -= is_api
            if trace.key_name is not None:
                self._limits.leave(trace.key_name)
            self._record(scope, responder.status or 500, trace)

    async def _answer(self, scope: Scope, receive: Receive, responder: Responder, trace: Trace) -> None:
        if scope["path"].startswith(_API) and self._lifecycle.is_draining:
            leaving = NotReady("this gateway is shutting down", retry_after_s=RETRY_AFTER_S)
            trace.failed(leaving)
            await error_response(leaving)(scope, receive, responder.send)
            return
        try:
            await self._app(scope, receive, responder.send)
        except Exception as error:  # noqa: BLE001 - a bug of ours, answered as one
            trace.outcome = DiptychError.code
            await responder.fail(error, scope, receive)

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
            "reason": trace.reason,
            "duration_s": round(trace.elapsed_s, 4),
            "first_token_s": trace.first_token_s and round(trace.first_token_s, 4),
            "key": trace.key_name,
            "model": trace.model,
            "num_images": trace.num_images or None,
            "num_prompt_tokens": trace.num_prompt_tokens,
            "num_cached_tokens": trace.num_cached_tokens,
            "num_generated_tokens": trace.num_generated_tokens,
        }
        routine = log.info if scope["path"].startswith(_API) else log.debug
        write = routine if trace.reason is None else log.warning
        write("request", **{name: value for name, value in facts.items() if value is not None})
