"""Where one request's spans go, for OpenTelemetry; nothing of it is imported, and nothing costs, unless asked for.

Asked for by variables that every SDK of OpenTelemetry knows: OTEL_EXPORTER_OTLP_ENDPOINT, OTEL_TRACES_EXPORTER=otlp.
`shared.otel` does the work; what is told here reaches it through the context of the request, and goes nowhere else.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Final, Protocol

from shared.wire.common import StageSpan

if TYPE_CHECKING:
    from shared.otel import Otel

Attributes = Mapping[str, str | int | float | bool | None]


class RequestSpan(Protocol):
    """The span of the request that is being worked on."""

    def describe(self, attributes: Attributes, *, name: str | None = None, failed: str | None = None) -> None:
        """Add what is known by now; None is left out. failed   what went wrong on our side"""
        ...

    def stages(self, spans: Iterable[StageSpan], *, began_at: float) -> None:
        """What was done for it, as spans below its own. began_at   their zero, by time.monotonic()"""
        ...


_CURRENT: Final[ContextVar[RequestSpan | None]] = ContextVar("request_span", default=None)


def current_span() -> RequestSpan | None:
    """None: nobody traces this request."""
    return _CURRENT.get()


@contextmanager
def working_on(span: RequestSpan) -> Iterator[None]:
    """Within it, and in what is started there, `current_span` is this one."""
    token = _CURRENT.set(span)
    try:
        yield
    finally:
        _CURRENT.reset(token)


def is_wanted(env: Mapping[str, str] = os.environ) -> bool:
    if env.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return False
    exporter = env.get("OTEL_TRACES_EXPORTER", "").lower()
    endpoints = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
    return exporter == "otlp" or (exporter == "" and any(env.get(name) for name in endpoints))


def tracing(service: str) -> Otel | None:
    """What traces this service; None where that is not asked for. Raises ValueError if it is and cannot be done."""
    if not is_wanted():
        return None
    protocol = os.environ.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL") or os.environ.get("OTEL_EXPORTER_OTLP_PROTOCOL")
    if protocol not in (None, "", "http/protobuf"):
        raise ValueError(f"OTEL_EXPORTER_OTLP_PROTOCOL is {protocol!r}; spans are sent by http/protobuf")
    try:
        from shared.otel import Otel  # late: an optional dependency
    except ImportError as error:
        raise ValueError(f"traces are asked for by OTEL_… variables: pip install 'diptych[otel]' ({error})") from None
    return Otel.from_environment(service)
