"""From an `image_url` to the bytes behind it: data URLs decoded here, http(s) fetched, files that were uploaded read.

Everything else is refused.

The bytes are neither decoded nor judged by their type: the encoder looks at them.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import unquote_to_bytes

from services.gateway.chosen_ids import ChosenIds
from services.gateway.fetch import ImageFetcher
from services.gateway.file_store import FILE_ID_PREFIX, FileStore
from shared.errors import DiptychError, ImageTooLarge, InvalidEmbedding, InvalidImageUrl, InvalidRequest
from shared.wire import RequestedDetail

_SCHEME = re.compile(r"([a-z][a-z0-9+.-]*):", re.IGNORECASE)
_WHITESPACE = b" \t\r\n\f"
_ZIP = b"PK\x03\x04"
UNQUOTED_AT_ONCE = 64 * 1024  # characters
# What a data URL of a picture may call itself; "" is a sender who did not care, the encoder looks at the bytes anyway.
_ACCEPTED_TYPES = ("image/", "application/octet-stream", "")
_WANTED = "give a data: URL (data:image/png;base64,...), an http(s) URL or the id of an uploaded file"


@dataclass(frozen=True, slots=True)
class ImageSource:
    """An image part as the client wrote it. `param` names it: `messages[0].content[1].image_url`.

    url     a URL, or a file's id in its place; None: the picture that is kept as `uuid`
    uuid    the client's own name for the picture
    """

    url: str | None
    param: str
    detail: RequestedDetail = "auto"
    uuid: str | None = None


@dataclass(frozen=True, slots=True)
class EmbeddingSource:
    """An embedding in place of a picture, in base64."""

    payload: str
    param: str


@dataclass(frozen=True, slots=True)
class LoadedImage:
    """is_embedding          the bytes are no picture but its embedding
    asked_at, loaded_at   by time.perf_counter()
    """

    data: bytes
    param: str
    detail: RequestedDetail = "auto"
    is_embedding: bool = False
    asked_at: float = 0.0
    loaded_at: float = 0.0


Source = ImageSource | EmbeddingSource


class ImageLoader:
    def __init__(self, fetcher: ImageFetcher, files: FileStore, chosen_ids: ChosenIds, *, max_images: int) -> None:
        self._fetcher = fetcher
        self._files = files
        self._chosen_ids = chosen_ids
        self._max_images = max_images

    async def load(self, sources: Sequence[Source], max_bytes: int, owner: str) -> list[LoadedImage]:
        """The bytes of every image, fetched side by side. The first failure ends the others and names its part.

        owner   whose names `uuid`s are
        """
        if len(sources) > self._max_images:
            raise InvalidRequest(
                f"the request has {len(sources)} images; at most {self._max_images}",
                param=sources[self._max_images].param,
            )
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._load(source, max_bytes, owner)) for source in sources]
        except* DiptychError as failures:
            raise failures.exceptions[0] from None
        return [task.result() for task in tasks]

    async def _load(self, source: Source, max_bytes: int, owner: str) -> LoadedImage:
        asked_at = time.perf_counter()
        try:
            if isinstance(source, EmbeddingSource):
                data = decode_embedding(source.payload)
                _check_size(data, max_bytes)
                return LoadedImage(data, source.param, is_embedding=True, asked_at=asked_at, loaded_at=asked_at)
            data = await self._named_bytes(source, max_bytes, owner)
            return LoadedImage(data, source.param, source.detail, asked_at=asked_at, loaded_at=time.perf_counter())
        except DiptychError as error:
            raise at_part(error, source.param) from error

    async def _named_bytes(self, source: ImageSource, max_bytes: int, owner: str) -> bytes:
        if source.url is None:
            assert source.uuid is not None, "a part without a picture has a name"
            return await self._chosen_ids.read(source.uuid, owner)
        data = await self._bytes(source.url, max_bytes)
        if source.uuid is not None:
            await self._chosen_ids.keep(source.uuid, owner, data)
        return data

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
        _check_size(data, max_bytes)
        return data


def _check_size(data: bytes, max_bytes: int) -> None:
    if len(data) > max_bytes:
        raise ImageTooLarge(f"the image has {len(data)} bytes; at most {max_bytes}")


def decode_embedding(payload: str) -> bytes:
    """The bytes of a safetensors file. What is in them is the encoder's to judge."""
    try:
        data = _decode_base64(payload, "the embedding's")
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
    head, comma, payload = url.partition(",")
    if not comma:
        raise InvalidImageUrl("the data URL has no comma: data:image/png;base64,... is wanted")
    media_type, *parameters = (part.strip().lower() for part in head[len("data:") :].split(";"))
    if not parameters or parameters[-1] != "base64":
        raise InvalidImageUrl("the data URL is not base64: data:image/png;base64,... is wanted")
    if not media_type.startswith(_ACCEPTED_TYPES[:2]) and media_type:
        raise InvalidImageUrl(f"the data URL holds {media_type[:60]!r}, not an image")
    data = _decode_base64(payload, "the data URL's")
    if not data:
        raise InvalidImageUrl("the data URL is empty: the image has 0 bytes")
    return data


def _decode_base64(payload: str, whose: str) -> bytes:
    try:
        text = _unquoted(payload) if "%" in payload else payload.encode("ascii")
    except UnicodeEncodeError:
        raise InvalidImageUrl(f"{whose} base64 holds characters that are not base64") from None
    if any(char in text for char in _WHITESPACE):
        text = text.translate(None, delete=_WHITESPACE)
    stripped = text.rstrip(b"=")
    if len(stripped) % 4 == 1:
        raise InvalidImageUrl(f"{whose} base64 is cut: {len(stripped)} characters cannot be whole bytes")
    if len(text) != len(stripped) and len(text) % 4:
        raise InvalidImageUrl(f"{whose} base64 has the wrong amount of padding")
    try:
        return base64.b64decode(stripped + b"=" * (-len(stripped) % 4), validate=True)
    except binascii.Error:
        raise InvalidImageUrl(f"{whose} base64 holds characters that are not base64") from None


def _unquoted(payload: str) -> bytes:
    """Percent-encoding undone, piece by piece: `unquote_to_bytes` takes a hundred times a text of per cent signs."""
    text = bytearray()
    start = 0
    while start < len(payload):
        end = start + UNQUOTED_AT_ONCE
        if end < len(payload):  # an escape is not cut
            end -= max(payload[end - 1] == "%", 2 * (payload[end - 2] == "%"))
        text += unquote_to_bytes(payload[start:end])
        start = end
    return bytes(text)


def at_part(error: DiptychError, param: str) -> DiptychError:
    """The same error, saying which part of the request it is about."""
    if error.param == param:
        return error
    return type(error)(f"{param}: {error.message}", param=param, retry_after_s=error.retry_after_s)
