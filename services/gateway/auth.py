"""Optional API keys. Keys are compared in constant time and are never logged, echoed or kept in clear."""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Iterable
from typing import Any, Final

from fastapi import Depends, Request
from pydantic import SecretStr

from shared.errors import Unauthorized

ANONYMOUS: Final = "anonymous"
_NAMED_KEY: Final = re.compile(r"([A-Za-z0-9_.-]{1,32}):(.+)", re.DOTALL)


class Keyring:
    """The keys that open this gateway; an empty one is open to all.

    keys   "key", or "name:key" for a name in metrics and limits; without one it is called after its digest
    kind   of key, as refusals call it
    """

    def __init__(self, keys: Iterable[SecretStr], kind: str = "API key") -> None:
        self._kind = kind
        # Digests have one length, so a comparison tells nothing about a key's own length either.
        self._names = dict(_name_and_digest(key.get_secret_value()) for key in keys)

    def check(self, authorization: str | None) -> str:
        """The name of the key in the header's value. Raises Unauthorized without saying what was given."""
        if not self._names:
            return ANONYMOUS
        scheme, _, key = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not key.strip():
            raise Unauthorized(f"an {self._kind} is needed: send the header 'Authorization: Bearer <key>'")
        given = _digest(key.strip())
        # Every key is compared: how long it takes does not tell which one it was.
        matches = [name for known, name in self._names.items() if hmac.compare_digest(given, known)]
        if not matches:
            raise Unauthorized(f"the {self._kind} is not valid")
        return matches[0]


def needs_key(keyring: Keyring) -> Any:
    """What a router or a route depends on to answer only requests that show one of these keys."""

    async def check(request: Request) -> None:
        keyring.check(request.headers.get("authorization"))

    return Depends(check)


def _name_and_digest(entry: str) -> tuple[bytes, str]:
    named = _NAMED_KEY.fullmatch(entry)
    digest = _digest(named.group(2) if named else entry)
    return digest, named.group(1) if named else f"key-{digest.hex()[:8]}"


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
