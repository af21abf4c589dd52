"""Keys: full digests over length-prefixed parts, so that no two different inputs meet."""

from __future__ import annotations

import hashlib
import re

from hypothesis import given
from hypothesis import strategies as st

from shared.hashing import digest, image_key


def test_a_digest_is_sha256_over_length_prefixed_parts() -> None:
    expected = hashlib.sha256(b"\0\0\0\0\0\0\0\x02ab" + b"\0\0\0\0\0\0\0\x00" + b"\0\0\0\0\0\0\0\x01c").digest()
    assert digest(b"ab", b"", b"c") == expected


@given(st.lists(st.binary(max_size=4), max_size=4), st.lists(st.binary(max_size=4), max_size=4))
def test_different_lists_of_parts_never_share_a_digest(one: list[bytes], other: list[bytes]) -> None:
    assert (digest(*one) == digest(*other)) == (one == other)


def test_an_image_key_is_a_full_digest_that_depends_on_bytes_and_fingerprint() -> None:
    key = image_key(b"image", "fingerprint")
    assert re.fullmatch(r"[0-9a-f]{64}", key)
    assert image_key(b"image", "fingerprint") == key
    assert image_key(b"imagf", "fingerprint") != key
    assert image_key(b"image", "fingerprinu") != key


def test_bytes_cannot_move_between_fingerprint_and_image() -> None:
    assert image_key(b"bc", "a") != image_key(b"c", "ab")
