"""Around every request: its id, its place among those in flight, its one log line and its metrics.

Plain ASGI: the framework's own middleware class would copy every streamed chunk through a queue.
"""

from __future__ import annotations

import time
from typing import Final

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from services.gateway.key_limits import KeyLimits
from services.gateway.lifecycle import RETRY_AFTER_S, Lifecycle
from services.gateway.metrics import GatewayMetrics
from services.gateway.timeline import GATEWAY
from services.gateway.trace import Trace
from shared.errors import DiptychError, NotReady
from shared.http_errors import error_response
from shared.log import get_logger
from shared.request_id import Responder, logged_as, request_id_of
from shared.tracing import RequestSpan, current_span
from shared.wire.common import StageSpan

log = get_logger(__name__)
_API = "/v1/"
_CLIENT_CLOSED = 499
OPERATIONS: Final = {
    "/v1/chat/completions": "chat",
    "/v1/responses": "chat",
    "/v1/completions": "text_completion",
}


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
        responder = Responder(send, trace.request_id, lambda: self._limit_headers(trace))
        is_api = scope["path"].startswith(_API)
        self._lifecycle.num_in_flight += is_api
        try:
            with logged_as(trace.request_id):
                await self._answer(scope, receive, responder, trace)
        finally:
            self._lifecycle.num_in_flight -= is_api
            if trace.is_counted and trace.key_name is not None:
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

    def _limit_headers(self, trace: Trace) -> dict[str, str]:
        return {} if trace.key_name is None else self._limits.headers(trace.key_name)

    def _record(self, scope: Scope, status: int, trace: Trace) -> None:
        route = getattr(scope.get("route"), "path", "other")
        if trace.outcome == "aborted":
            status = _CLIENT_CLOSED
        elif status >= 400 and trace.outcome == "ok":
            trace.outcome = f"http_{status}"
        self._metrics.answered(route, status, trace)
        if (span := current_span()) is not None:
            describe_request(span, route, trace)
        facts = {
            "request_id": trace.request_id,
            "route": route,
            "status": status,
            "outcome": trace.outcome,
            "reason": trace.reason,
            "duration_s": round(trace.elapsed_s, 4),
            "first_token_s": trace.first_token_s and round(trace.first_token_s, 4),
            "key": trace.key_name,
            "stages": {name: round(seconds, 4) for name, seconds in trace.stages.items()} or None,
            "model": trace.model,
            "num_images": trace.num_images or None,
            "num_prompt_tokens": trace.num_prompt_tokens,
            "num_cached_tokens": trace.num_cached_tokens,
            "num_generated_tokens": trace.num_generated_tokens,
        }
        routine = log.info if scope["path"].startswith(_API) else log.debug
        write = routine if trace.reason is None else log.warning
        write("request", **{name: value for name, value in facts.items() if value is not None})


def describe_request(span: RequestSpan, route: str, trace: Trace) -> None:
    """In the words of OpenTelemetry's conventions for generative AI, and ours for what they have none for."""
    operation = OPERATIONS.get(route)
    answered = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": operation and "diptych",
        "gen_ai.request.model": trace.model,
        "gen_ai.usage.input_tokens": trace.num_prompt_tokens,
        "gen_ai.usage.output_tokens": trace.num_generated_tokens,
        "gen_ai.usage.cache_read.input_tokens": trace.num_cached_tokens,
        "gen_ai.latency.time_to_first_token": trace.first_token_s,
        "diptych.usage.image_tokens": trace.num_image_tokens,
        "diptych.num_images": trace.num_images or None,
        "diptych.request_id": trace.request_id,
        "error.type": None if trace.outcome == "ok" else trace.outcome,
    }
    name = f"{operation} {trace.model}" if operation and trace.model else None
    span.describe(answered, name=name, failed=trace.reason)
    own = [
        StageSpan(stage=each.stage, start_s=each.start_ms / 1000, duration_s=each.duration_ms / 1000)
        for each in trace.timeline.spans
        if each.where == GATEWAY
    ]
    span.stages(own, began_at=time.monotonic() - trace.elapsed_s)
