"""From an `image_url` to the bytes behind it: data URLs decoded here, http(s) fetched, files that were uploaded read.

Everything else is refused.

The bytes are neither decoded nor judged by their type: the encoder looks at them.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import re
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import unquote_to_bytes

from services.gateway.fetch import ImageFetcher
from services.gateway.file_store import FILE_ID_PREFIX, FileStore
from shared.errors import DiptychError, ImageTooLarge, InvalidImageUrl, InvalidRequest

_SCHEME = re.compile(r"([a-z][a-z0-9+.-]*):", re.IGNORECASE)
_WHITESPACE = b" \t\r\n\f"
# What a data URL of a picture may call itself; "" is a sender who did not care, the encoder looks at the bytes anyway.
_ACCEPTED_TYPES = ("image/", "application/octet-stream", "")
_WANTED = "give a data: URL (data:image/png;base64,...), an http(s) URL or the id of an uploaded file"


@dataclass(frozen=True, slots=True)
class ImageSource:
    """An image part as the client wrote it. `param` names it: `messages[0].content[1].image_url`.

    url   a URL, or a file's id in its place
    """

    url: str
    param: str


@dataclass(frozen=True, slots=True)
class LoadedImage:
    data: bytes
    param: str


class ImageLoader:
    def __init__(self, fetcher: ImageFetcher, files: FileStore, *, max_images: int) -> None:
        self._fetcher = fetcher
        self._files = files
        self._max_images = max_images

    async def load(self, sources: Sequence[ImageSource], max_bytes: int) -> list[LoadedImage]:
        """The bytes of every image, fetched side by side. The first failure ends the others and names its part."""
        if len(sources) > self._max_images:
            raise InvalidRequest(
                f"the request has {len(sources)} images; at most {self._max_images}",
                param=sources[self._max_images].param,
            )
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._load(source, max_bytes)) for source in sources]
        except* DiptychError as failures:
            raise failures.exceptions[0] from None
        return [task.result() for task in tasks]

    async def _load(self, source: ImageSource, max_bytes: int) -> LoadedImage:
        try:
            return LoadedImage(await self._bytes(source.url, max_bytes), source.param)
        except DiptychError as error:
            raise at_part(error, source.param) from error

    async def _bytes(self, url: str, max_bytes: int) -> bytes:
        if url.startswith(FILE_ID_PREFIX):
            data = await self._files.read(url)
        else:
            scheme = _SCHEME.match(url)
            match scheme and scheme.group(1).lower():
                case "data":
                    data = decode_data_url(url)
                case "http" | "https":
                    return await self._fetcher.fetch(url, max_bytes)
                case None:
                    raise InvalidImageUrl(f"this is not a URL; {_WANTED}")
                case other:
                    raise InvalidImageUrl(f"{other[:20]}: URLs are refused; {_WANTED}")
        if len(data) > max_bytes:
            raise ImageTooLarge(f"the image has {len(data)} bytes; at most {max_bytes}")
        return data


def decode_data_url(url: str) -> bytes:
    """The bytes of an RFC 2397 base64 data URL of an image.

    Case of scheme, type and `base64` does not matter; parameters are ignored; percent-encoding is undone; white space
    within and missing padding at the end are accepted, as browsers do. Anything else raises InvalidImageUrl.
    """
    head, comma, payload = url.partition(",")
    if not comma:
        raise InvalidImageUrl("the data URL has no comma: data:image/png;base64,... is wanted")
    media_type, *parameters = (part.strip().lower() for part in head[len("data:") :].split(";"))
    if not parameters or parameters[-1] != "base64":
        raise InvalidImageUrl("the data URL is not base64: data:image/png;base64,... is wanted")
    if not media_type.startswith(_ACCEPTED_TYPES[:2]) and media_type:
        raise InvalidImageUrl(f"the data URL holds {media_type[:60]!r}, not an image")
    data = _decode_base64(payload)
    if not data:
        raise InvalidImageUrl("the data URL is empty: the image has 0 bytes")
    return data


def _decode_base64(payload: str) -> bytes:
    try:
        text = unquote_to_bytes(payload) if "%" in payload else payload.encode("ascii")
    except UnicodeEncodeError:
        raise InvalidImageUrl("the data URL's base64 holds characters that are not base64") from None
    if any(char in text for char in _WHITESPACE):
        text = text.translate(None, delete=_WHITESPACE)
    stripped = text.rstrip(b"=")
    if len(stripped) % 4 == 1:
        raise InvalidImageUrl(f"the data URL's base64 is cut: {len(stripped)} characters cannot be whole bytes")
    if len(text) != len(stripped) and len(text) % 4:
        raise InvalidImageUrl("the data URL's base64 has the wrong amount of padding")
    try:
        return base64.b64decode(stripped + b"=" * (-len(stripped) % 4), validate=True)
    except binascii.Error:
        raise InvalidImageUrl("the data URL's base64 holds characters that are not base64") from None


def at_part(error: DiptychError, param: str) -> DiptychError:
    """The same error, saying which part of the request it is about."""
    if error.param == param:
        return error
    return type(error)(f"{param}: {error.message}", param=param, retry_after_s=error.retry_after_s)
