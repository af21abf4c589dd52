"""Cache keys: sha256 over length-prefixed parts, never cut short.

Length prefixes make the encoding injective: no two different lists of parts give the same bytes to hash.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable
from typing import Concatenate, Final, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")
HASH_INLINE_BYTES: Final = 2**20  # hashing more would hold up an event loop for a millisecond

IMAGE_KEY_SCHEME = b"diptych-image-v1"
EMBEDDING_KEY_SCHEME = b"diptych-embedding-v1"


async def off_loop(make: Callable[Concatenate[bytes, P], T], data: bytes, *args: P.args, **kwargs: P.kwargs) -> T:
    """`make(data, ...)`, beside the event loop if the data are many: hashing lets go of the interpreter's lock."""
    if len(data) <= HASH_INLINE_BYTES:
        return make(data, *args, **kwargs)
    return await asyncio.to_thread(make, data, *args, **kwargs)


def digest(*parts: bytes) -> bytes:
    """The 32-byte sha256 of `parts`, each preceded by its length as 8 big-endian bytes."""
    state = hashlib.sha256()
    for part in parts:
        state.update(len(part).to_bytes(8, "big"))
        state.update(part)
    return state.digest()


def image_key(image: bytes, encoder_fingerprint: str) -> str:
    """The name of one image's embedding: 64 hex digits over scheme version, encoder fingerprint and bytes as received.

    The fingerprint covers everything else that changes the embedding (weights, processor, layer, dtype), so a key
    never outlives a change of model and two encoders share entries only if they would compute the same values.
    """
    return digest(IMAGE_KEY_SCHEME, encoder_fingerprint.encode(), image).hex()


def embedding_key(embedding: bytes, encoder_fingerprint: str) -> str:
    """The name of an embedding that a client sent itself; of another scheme, so that it never stands for a picture."""
    return digest(EMBEDDING_KEY_SCHEME, encoder_fingerprint.encode(), embedding).hex()
