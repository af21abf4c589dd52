"""Who shows no certificate is refused: over HTTP, so that it is told why, and so that probes, which have none, get in.

A certificate that is shown and not trusted never comes so far: the handshake fails.
"""

from __future__ import annotations

import asyncio
import ssl
from typing import Any, Final

from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from shared.errors import ClientCertificateRequired
from shared.http_errors import error_response
from shared.service_token import OPEN_PATHS

GOODBYE_S: Final = 0.5


class HttpOverTls(HttpToolsProtocol):
    """uvicorn's protocol, with ASGI's `tls` extension as far as it is used here: the client's certificate."""

    _tls: dict[object, object] | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's own
        super().connection_made(transport)
        connection = transport.get_extra_info("ssl_object")
        if connection is not None:
            certificate = connection.getpeercert(binary_form=True)
            self._tls = {"client_cert_chain": [ssl.DER_cert_to_PEM_cert(certificate)] if certificate else []}

    def shutdown(self) -> None:
        """To be called when the server leaves: an idle connection ends, one that is being answered ends after that."""
        super().shutdown()
        if self.transport.is_closing():
            # Its end waits for the client's goodbye, which a pool of idle connections does not read our own for.
            self.loop.call_later(GOODBYE_S, self.transport.abort)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        if self._tls is not None:
            self.scope["extensions"] = {"tls": self._tls}


class RequireClientCertificate:
    """Around an app that listens by `HttpOverTls`: everything but OPEN_PATHS needs a client's certificate."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS or _has_certificate(scope):
            await self._app(scope, receive, send)
            return
        refused = ClientCertificateRequired(
            "this port wants a client certificate: connect by TLS, with one of the authority that this server trusts"
        )
        await error_response(refused)(scope, receive, send)


def _has_certificate(scope: Scope) -> bool:
    extensions: dict[str, Any] = scope.get("extensions") or {}
    return bool(extensions.get("tls", {}).get("client_cert_chain"))
