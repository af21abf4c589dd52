"""Base64 in a request: data URLs of pictures, and embeddings in their place.

Decoding holds the interpreter's lock, so a large one is done on another thread and piece by piece: between two pieces
the event loop has its turn. What the bytes are is not looked at.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import io
from collections.abc import Callable, Iterator
from typing import Final
from urllib.parse import unquote_to_bytes

from services.gateway.cut_urls import CutUrl
from shared.errors import InvalidEmbedding, InvalidImageUrl

PIECE_CHARS: Final = 64 * 1024  # decoded at once; `unquote_to_bytes` takes a hundred times a text of per cent signs
INLINE_CHARS: Final = 2**20  # decoding more would hold up an event loop for a millisecond
_BLANKS: Final = b" \t\r\n\f"
_ZIP: Final = b"PK\x03\x04"
# What a data URL of a picture may call itself; "" is a sender who did not care, the encoder looks at the bytes anyway.
_ACCEPTED_TYPES: Final = ("image/", "application/octet-stream", "")


async def decoded(decode: Callable[[str], bytes], text: str) -> bytes:
    """`decode(text)`, beside the event loop if the text is long."""
    num_chars = len(text.payload) if isinstance(text, CutUrl) else len(text)
    return decode(text) if num_chars <= INLINE_CHARS else await asyncio.to_thread(decode, text)


def decode_embedding(payload: str) -> bytes:
    """The bytes of a safetensors file. What is in them is the encoder's to judge."""
    try:
        data = _decode_base64(_pieces(payload), "the embedding's", _BLANKS)
    except InvalidImageUrl as error:
        raise InvalidEmbedding(error.message) from None
    if data.startswith(_ZIP):
        raise InvalidEmbedding("this is what torch.save writes, a pickle; write the file with safetensors.torch.save")
    return data


def decode_data_url(url: str) -> bytes:
    """The bytes of an RFC 2397 base64 data URL of an image.

    Case of scheme, type and `base64` does not matter; parameters are ignored; percent-encoding is undone; white space
    within and missing padding at the end are accepted, as browsers do. Anything else raises InvalidImageUrl.
    """
    comma = url.find(",")
    if comma < 0:
        raise InvalidImageUrl("the data URL has no comma: data:image/png;base64,... is wanted")
    media_type, *parameters = (part.strip().lower() for part in url[len("data:") : comma].split(";"))
    if not parameters or parameters[-1] != "base64":
        raise InvalidImageUrl("the data URL is not base64: data:image/png;base64,... is wanted")
    if not media_type.startswith(_ACCEPTED_TYPES[:2]) and media_type:
        raise InvalidImageUrl(f"the data URL holds {media_type[:60]!r}, not an image")
    if isinstance(url, CutUrl):  # no parser has looked at it, and a line end, say, is in no JSON text as it is
        data = _decode_base64(_pieces(url.payload), "the data URL's", b" ")
    else:
        data = _decode_base64(_pieces(url, comma + 1), "the data URL's", _BLANKS)
    if not data:
        raise InvalidImageUrl("the data URL is empty: the image has 0 bytes")
    return data


def _decode_base64(pieces: Iterator[bytes], whose: str, blanks: bytes) -> bytes:
    """blanks   what may stand between the characters"""
    data = io.BytesIO()
    rest = b""
    for piece in pieces:
        data.write(_strict(rest, whose))
        chars = unquote_to_bytes(piece) if b"%" in piece else piece
        rest = rest[_num_whole(rest) :] + chars.translate(None, delete=blanks)
    stripped = rest.rstrip(b"=")
    if len(stripped) % 4 == 1:
        raise InvalidImageUrl(f"{whose} base64 is cut: its number of characters, 4n + 1, cannot be whole bytes")
    if len(rest) != len(stripped) and len(rest) % 4:
        raise InvalidImageUrl(f"{whose} base64 has the wrong amount of padding")
    data.write(_strict(stripped + b"=" * (-len(stripped) % 4), whose, is_end=True))
    return data.getvalue()


def _num_whole(chars: bytes) -> int:
    """Of base64's groups of four."""
    return len(chars) // 4 * 4


def _strict(chars: bytes, whose: str, *, is_end: bool = False) -> bytes:
    whole = chars[: _num_whole(chars)]
    try:
        if b"=" in whole and not is_end:
            raise _not_base64(whose)
        return base64.b64decode(whole, validate=True)
    except binascii.Error:
        raise _not_base64(whose) from None


def _not_base64(whose: str) -> InvalidImageUrl:
    return InvalidImageUrl(f"{whose} base64 holds characters that are not base64")


def _pieces(text: str | memoryview, start: int = 0) -> Iterator[bytes]:
    """From `start` on; what is not ASCII becomes a question mark, which is no base64 either."""
    per_cent = "%" if isinstance(text, str) else ord("%")
    while start < len(text):
        end = start + PIECE_CHARS
        if end < len(text):  # a percent-encoded character is not cut
            end -= max(text[end - 1] == per_cent, 2 * (text[end - 2] == per_cent))
        piece = text[start:end]
        yield piece.encode("ascii", "replace") if isinstance(piece, str) else bytes(piece)
        start = end
