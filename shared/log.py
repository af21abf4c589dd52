"""Structured logs: readable lines on a terminal, one JSON object per line elsewhere.

Neither keys nor image bytes may reach a log: long values are cut and credentials in URLs are masked by a processor, so
that a careless call site cannot leak them.
"""

from __future__ import annotations

import logging
import re
import sys
from typing import Any, Literal

import structlog

LogFormat = Literal["auto", "console", "json"]
MAX_VALUE_CHARS = 2000
MAX_SEARCHED_CHARS = 8 * MAX_VALUE_CHARS  # clients choose what is searched: its cost must not grow with what they send
_BASE64_RUN = re.compile(r"[A-Za-z0-9+/=_-]{160,}")
_URL_PASSWORD = re.compile(r"(?<=://)[^/@\s:]*:[^/@\s]*(?=@)")
_BEARER = re.compile(r"(?i)\b(bearer|basic)\s+\S+")
_URL_QUERY = re.compile(r"(?<=[a-z0-9/])\?[^\s'\"]*", re.IGNORECASE)  # a secret only where it has an "="


def redact(text: str) -> str:
    """Mask what must not be logged: passwords and query strings in URLs, bearer tokens, base64 runs; cut the rest."""
    text = _URL_PASSWORD.sub("***", text[:MAX_SEARCHED_CHARS])
    text = _BEARER.sub(r"\1 ***", text)
    text = _URL_QUERY.sub(lambda query: "?***" if "=" in query.group() else query.group(), text)
    text = _BASE64_RUN.sub(lambda run: f"<{len(run.group())} characters>", text)
    return text if len(text) <= MAX_VALUE_CHARS else f"{text[:MAX_VALUE_CHARS]}… ({len(text)} characters)"


def _redact_event(_logger: Any, _method: str, event: dict[str, Any]) -> dict[str, Any]:
    return {
        # A traceback says at its end what happened and where: line by line, so that only the values in it are cut.
        key: "\n".join(map(redact, value.split("\n")))
        if key == "exception"
        else redact(value)
        if isinstance(value, str)
        else value
        for key, value in event.items()
    }


def configure_logging(service: str, level: str = "info", log_format: LogFormat = "auto") -> None:
    """Route structlog and the standard library's loggers through one pipeline to stderr. Call once per process."""
    console = log_format == "console" or (log_format == "auto" and sys.stderr.isatty())

    def add_service(_logger: Any, _method: str, event: dict[str, Any]) -> dict[str, Any]:
        event.setdefault("service", service)
        return event

    shared_processors: list[Any] = [
        structlog.contextvars.merge_contextvars,
        add_service,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="%H:%M:%S" if console else "iso", utc=not console),
        structlog.processors.format_exc_info,
        _redact_event,
    ]
    renderer: Any = structlog.dev.ConsoleRenderer(pad_event_to=28) if console else structlog.processors.JSONRenderer()
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,  # first: what nobody will read costs nothing
            *shared_processors,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        wrapper_class=structlog.stdlib.BoundLogger,
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=False,
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared_processors,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, renderer],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    for noisy in ("httpx", "httpcore", "uvicorn.access", "uvicorn.error", "asyncio"):
        logging.getLogger(noisy).setLevel(logging.WARNING)


def get_logger(name: str) -> structlog.stdlib.BoundLogger:
    logger: structlog.stdlib.BoundLogger = structlog.get_logger(name)
    return logger
