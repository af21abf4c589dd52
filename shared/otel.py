"""Spans by OpenTelemetry: one for each request a service takes, and below it its stages. Imported only when asked for.

The caller's W3C trace context is taken over, and handed on to the other services, so one request is one trace. Requests
without any are traced by the gateway alone: probes and scrapes make no traces.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from typing import Final

import httpx
import structlog
from opentelemetry import context, trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace import SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from shared.tracing import Attributes, working_on
from shared.wire.common import StageSpan

CLOSE_TIMEOUT_S: Final = 3.0
_PROPAGATOR: Final = TraceContextTextMapPropagator()
_SERVER_ERROR: Final = 500
_API: Final = "/v1/"


class Otel:
    """One service's tracer. `close` sends what is left."""

    def __init__(self, service: str, exporter: SpanExporter) -> None:
        named = {"service.name": f"diptych-{service}", "service.namespace": "diptych"}
        given = OTELResourceDetector().detect().attributes
        resource = Resource.create({name: value for name, value in named.items() if name not in given})
        # The sampler and the batches' sizes are the SDK's own variables.
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("diptych")
        self._starts_traces = service == "gateway"

    @classmethod
    def from_environment(cls, service: str) -> Otel:
        return cls(service, OTLPSpanExporter())

    def close(self) -> None:
        """Waits for a while, and not for ever: the collector may be gone."""
        closing = threading.Thread(target=self._provider.shutdown, daemon=True)
        closing.start()
        closing.join(CLOSE_TIMEOUT_S)

    async def hand_on(self, request: httpx.Request) -> None:
        """A hook of an HTTP client: what it asks for belongs to the request that is being worked on."""
        _PROPAGATOR.inject(request.headers)

    def middleware(self, app: ASGIApp) -> ASGIApp:
        async def traced(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] != "http" or not scope["path"].startswith(_API):
                await app(scope, receive, send)
                return
            parent = _PROPAGATOR.extract(Headers(scope=scope))
            if not self._starts_traces and not trace.get_current_span(parent).get_span_context().is_valid:
                await app(scope, receive, send)
                return
            await self._trace(app, parent, scope, receive, send)

        return traced

    async def _trace(self, app: ASGIApp, parent: context.Context, scope: Scope, receive: Receive, send: Send) -> None:
        method = scope["method"]
        span = self._tracer.start_span(method, parent, SpanKind.SERVER, {"http.request.method": method})

        async def noting_status(message: Message) -> None:
            if message["type"] == "http.response.start":
                span.set_attribute("http.response.status_code", message["status"])
                if message["status"] >= _SERVER_ERROR:
                    span.set_status(Status(StatusCode.ERROR))
            await send(message)

        attached = context.attach(trace.set_span_in_context(span, parent))
        trace_id = trace.format_trace_id(span.get_span_context().trace_id)
        try:
            with working_on(_Span(self._tracer, span)), structlog.contextvars.bound_contextvars(trace_id=trace_id):
                await app(scope, receive, noting_status)
        except BaseException as error:
            span.set_status(Status(StatusCode.ERROR, type(error).__name__))
            raise
        finally:
            route = getattr(scope.get("route"), "path", None)
            if route is not None:
                span.set_attribute("http.route", route)
                if getattr(span, "name", None) == method:
                    span.update_name(f"{method} {route}")
            context.detach(attached)
            span.end()


class _Span:
    def __init__(self, tracer: trace.Tracer, span: trace.Span) -> None:
        self._tracer = tracer
        self._span = span

    def describe(self, attributes: Attributes, *, name: str | None = None, failed: str | None = None) -> None:
        self._span.set_attributes({key: value for key, value in attributes.items() if value is not None})
        if name is not None:
            self._span.update_name(name)
        if failed is not None:
            self._span.set_status(Status(StatusCode.ERROR, failed))

    def stages(self, spans: Iterable[StageSpan], *, began_at: float) -> None:
        if not self._span.is_recording():
            return
        epoch_s = time.time() - time.monotonic() + began_at
        below = trace.set_span_in_context(self._span)
        for stage in spans:
            start = epoch_s + stage.start_s
            facts = {"diptych.image.key": stage.image_key and stage.image_key[:12], "diptych.source": stage.source}
            known = {key: value for key, value in facts.items() if value}
            child = self._tracer.start_span(stage.stage, below, attributes=known, start_time=int(start * 1e9))
            child.end(int((start + stage.duration_s) * 1e9))
