"""Optional API keys. Keys are compared in constant time and are never logged, echoed or kept in clear."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable

from shared.errors import Unauthorized


class Keyring:
    """The keys that open this gateway; an empty one is open to all."""

    def __init__(self, keys: Iterable[str]) -> None:
        # Digests have one length, so a comparison tells nothing about a key's own length either.
        self._digests = [_digest(key) for key in keys]

    def check(self, authorization: str | None) -> None:
        """`authorization` is the header's value. Raises Unauthorized without saying what was given."""
        if not self._digests:
            return
        scheme, _, key = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not key.strip():
            raise Unauthorized("an API key is needed: send the header 'Authorization: Bearer <key>'")
        given = _digest(key.strip())
        # Every key is compared: how long it takes does not tell which one it was.
        num_matches = sum(hmac.compare_digest(given, known) for known in self._digests)
        if not num_matches:
            raise Unauthorized("the API key is not valid")


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
