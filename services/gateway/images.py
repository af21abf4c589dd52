"""From an `image_url` to the bytes behind it: data URLs decoded, http(s) fetched, files that were uploaded read.

Everything else is refused.

The bytes are neither decoded nor judged by their type: the encoder looks at them.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from services.gateway.chosen_ids import ChosenIds
from services.gateway.data_urls import decode_data_url, decode_embedding, decoded
from services.gateway.fetch import ImageFetcher
from services.gateway.file_store import FILE_ID_PREFIX, FileStore
from shared.errors import DiptychError, FileQuotaExceeded, ImageTooLarge, InvalidImageUrl, InvalidRequest
from shared.wire.images import RequestedDetail

_SCHEME = re.compile(r"([a-z][a-z0-9+.-]*):", re.IGNORECASE)
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
                data = await decoded(decode_embedding, source.payload)
                _check_size(data, max_bytes)
                loaded_at = time.perf_counter()
                return LoadedImage(data, source.param, is_embedding=True, asked_at=asked_at, loaded_at=loaded_at)
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
            # The picture is here; a client that later sends the name alone is asked for the picture once more.
            with suppress(FileQuotaExceeded):
                await self._chosen_ids.keep(source.uuid, owner, data)
        return data

    async def _bytes(self, url: str, max_bytes: int) -> bytes:
        if url.startswith(FILE_ID_PREFIX):
            data = await self._files.read(url)
        else:
            scheme = _SCHEME.match(url)
            match scheme and scheme.group(1).lower():
                case "data":
                    data = await decoded(decode_data_url, url)
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


def at_part(error: DiptychError, param: str) -> DiptychError:
    """The same error, saying which part of the request it is about."""
    if error.param == param:
        return error
    return type(error)(f"{param}: {error.message}", param=param, retry_after_s=error.retry_after_s)
