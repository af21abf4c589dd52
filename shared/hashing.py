"""Cache keys: sha256 over length-prefixed parts, never cut short.

Length prefixes make the encoding injective: no two different lists of parts give the same bytes to hash.
"""

from __future__ import annotations

import hashlib

IMAGE_KEY_SCHEME = b"diptych-image-v1"


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
