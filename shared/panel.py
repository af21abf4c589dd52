"""What the two panels, vision encoder and text engine, have in common as services: who gets in, how they start, drain
and give up. What they serve is theirs; the gateway is neither.

The port opens before the model is loaded, so that probes can tell "loading" from "gone".
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Protocol

from fastapi import FastAPI
from pydantic import SecretStr
from pydantic_settings import BaseSettings

from shared.client_certificate import RequireClientCertificate
from shared.http_errors import install_error_handlers
from shared.log import get_logger
from shared.request_id import RequestIds
from shared.server import serve
from shared.service_token import RequireServiceToken
from shared.settings import reason_of
from shared.settings_errors import flags_of
from shared.tls import Tls
from shared.tracing import tracing

log = get_logger(__name__)


class PanelSettings(Protocol):
    """The settings that both panels have."""

    @property
    def host(self) -> str: ...
    @property
    def port(self) -> int: ...
    @property
    def drain_timeout_s(self) -> float: ...
    @property
    def service_token(self) -> Sequence[SecretStr]: ...
    @property
    def tls_cert_file(self) -> Path | None: ...
    @property
    def tls_key_file(self) -> Path | None: ...
    @property
    def tls_ca_file(self) -> Path | None: ...
    @property
    def tls_require_client_cert(self) -> bool: ...


class PanelService(Protocol):
    """is_draining   said to it when the process is to end: it takes nothing new"""

    is_draining: bool

    async def start(self) -> None: ...
    async def close(self) -> None: ...


def panel_app(name: str, settings: PanelSettings, make_service: Callable[[FastAPI, Tls], PanelService]) -> FastAPI:
    """An app without routes, whose lifespan makes `app.state.service` and starts it in the background. A start that
    fails ends the process.

    name           as on the command line, e.g. "text-engine"
    make_service   called on the event loop, with the app and what the service is known by
    """
    tracer = tracing(name)
    tls = Tls(
        "services", cert_file=settings.tls_cert_file, key_file=settings.tls_key_file, ca_file=settings.tls_ca_file
    )

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        service = app.state.service = make_service(app, tls)
        starting = asyncio.create_task(_start_or_give_up(app, service, settings))
        yield
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
        await service.close()
        if tracer is not None:
            await asyncio.to_thread(tracer.close)

    app = FastAPI(title=f"Diptych {name.replace('-', ' ')}", lifespan=lifespan, docs_url=None, redoc_url=None)
    app.state.identities, app.state.tls_context = (tls,), tls.server_context()
    if settings.tls_require_client_cert:
        app.add_middleware(RequireClientCertificate)
    if settings.service_token:
        app.add_middleware(RequireServiceToken, tokens=settings.service_token)
    app.add_middleware(RequestIds)
    if tracer is not None:
        app.add_middleware(tracer.middleware)
    install_error_handlers(app)
    return app


def serve_panel(app: FastAPI, settings: PanelSettings) -> None:
    """Serve until SIGTERM; running work may finish within `drain_timeout_s`."""

    def start_draining() -> None:
        app.state.service.is_draining = True

    serve(
        app,
        host=settings.host,
        port=settings.port,
        drain_timeout_s=settings.drain_timeout_s,
        on_drain=start_draining,
        tls_context=app.state.tls_context,
        identities=app.state.identities,
    )


def give_up(app: FastAPI, reason: str) -> None:
    """End the process with an error, so that its supervisor starts another."""
    app.state.failed = reason
    if (stop := getattr(app.state, "stop", None)) is not None:  # absent under a foreign server: probes then tell
        stop()


async def _start_or_give_up(app: FastAPI, service: PanelService, settings: PanelSettings) -> None:
    try:
        await service.start()
    except Exception as error:
        expected = isinstance(error, ValueError | OSError)
        assert isinstance(settings, BaseSettings)
        reason = reason_of(error, type(settings), flags=flags_of(type(settings), sys.argv))
        log.error("the model cannot be loaded", reason=reason, exc_info=None if expected else error)
        give_up(app, reason)
