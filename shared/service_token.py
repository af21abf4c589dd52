"""The token that services show each other: who may reach a port of a panel is not yet who may use it.

A panel with tokens answers no request without one, but for probes and metrics. The first of several is the one that is
sent and all are accepted, so that a token can be exchanged while services run: add the new one behind the old one
everywhere, then put it in front, then take the old one away.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence
from typing import Annotated, Final

from pydantic import BeforeValidator, Field, SecretStr
from pydantic_settings import NoDecode
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from shared.errors import ServiceTokenRefused
from shared.http_errors import error_response

MIN_TOKEN_CHARS: Final = 16
OPEN_PATHS: Final = frozenset({"/health", "/ready", "/metrics"})  # say how a service is, not what it was asked


def _tokens(value: object) -> object:
    """Checked here and not by pydantic, whose complaint would show the token.

    Raises ValueError for one that is short, or that no header can carry.
    """
    if not isinstance(value, str):
        return value
    tokens = [token for part in value.split(",") if (token := part.strip())]
    for token in tokens:
        if len(token) < MIN_TOKEN_CHARS or not token.isascii() or not token.isprintable() or " " in token:
            raise ValueError(
                f"each token needs {MIN_TOKEN_CHARS} or more visible ASCII characters, e.g. from `openssl rand -hex 32`"
            )
    return [SecretStr(token) for token in tokens]


# One name for all services, so it takes no prefix. Unset or blank: no token is sent, and none is asked for.
ServiceTokens = Annotated[
    tuple[SecretStr, ...],
    NoDecode,
    BeforeValidator(_tokens),
    Field(
        validation_alias="DIPTYCH_SERVICE_TOKEN",
        description="shown by services to each other; panels then refuse all who lack it; of several the first is sent",
    ),
]


def token_headers(tokens: Sequence[SecretStr]) -> dict[str, str]:
    """What a client of another service sends along."""
    return {"Authorization": f"Bearer {tokens[0].get_secret_value()}"} if tokens else {}


class RequireServiceToken:
    """Around a panel's app: everything but OPEN_PATHS needs a token.

    tokens   at least one
    """

    def __init__(self, app: ASGIApp, tokens: Sequence[SecretStr]) -> None:
        assert tokens
        self._app = app
        # Digests have one length, so a comparison tells nothing about a token's own length either.
        self._digests = [_digest(token.get_secret_value()) for token in tokens]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS or self._is_known(Headers(scope=scope)):
            await self._app(scope, receive, send)
            return
        refused = ServiceTokenRefused(
            "this port is for Diptych's own services: the request's Authorization header has none of the tokens in "
            "DIPTYCH_SERVICE_TOKEN"
        )
        await error_response(refused)(scope, receive, send)

    def _is_known(self, headers: Headers) -> bool:
        scheme, _, token = headers.get("authorization", "").partition(" ")
        given = _digest(token.strip())
        # Every token is compared: how long it takes does not tell which one it was.
        matches = [hmac.compare_digest(given, known) for known in self._digests]
        return scheme.lower() == "bearer" and any(matches)


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest()
