"""Clients without a certificate are refused: over HTTP, so that they are told why, and probes, which have none, get in.

A certificate that is shown and not trusted never comes so far: the handshake fails.
"""

from __future__ import annotations

from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send

from shared.errors import ClientCertificateRequired
from shared.http_errors import error_response
from shared.service_token import OPEN_PATHS


class RequireClientCertificate:
    """Around an app that listens by `HttpProtocol`: everything but OPEN_PATHS needs a client's certificate."""

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
