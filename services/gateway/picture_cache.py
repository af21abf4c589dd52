"""PictureCache: pictures fetched before, by URL, for as long as their servers allow.

A shared HTTP cache in the sense of RFC 9111, without heuristics: what says nothing about its life is asked for again.
Requests carry neither cookies nor credentials, so what one client may see every other could fetch as well.
"""

from __future__ import annotations

import re
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

# RFC 9111, 1.2.2: anything longer means for ever.
LONGEST_LIFE_S = 2**31
_DIRECTIVE = re.compile(rb'\s*([a-z-]+)\s*(?:=\s*(?:"([^"]*)"|([^",\s]*)))?\s*(?:,|$)')


@dataclass(frozen=True, slots=True)
class StoredPicture:
    """conditions   request headers that let the server answer "unchanged" (304) instead of sending it again"""

    data: bytes
    conditions: tuple[tuple[bytes, bytes], ...]
    fresh_until: float


class PictureCache:
    """Least recently used pictures go first. Response header names are expected in lower case."""

    def __init__(self, max_bytes: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._max_bytes = max_bytes
        self._clock = clock
        self._pictures: OrderedDict[str, StoredPicture] = OrderedDict()
        self.num_bytes = 0

    def get(self, url: str) -> StoredPicture | None:
        """Fresh or not; one that is stale may only be used if its server says that it is unchanged."""
        if url in self._pictures:
            self._pictures.move_to_end(url)
        return self._pictures.get(url)

    def is_fresh(self, picture: StoredPicture) -> bool:
        return self._clock() < picture.fresh_until

    def put(self, url: str, data: bytes, fields: Mapping[bytes, bytes]) -> None:
        """Keep what was just received, if the response's header fields allow it and it could be of any use."""
        self._drop(url)
        directives = _cache_control(fields)
        life_s = _life_s(fields, directives)
        conditions = _conditions(fields)
        if directives.keys() & {b"no-store", b"private"} or (life_s <= 0 and not conditions):
            return
        if fields.get(b"vary", b"accept-encoding").strip().lower() != b"accept-encoding" or len(data) > self._max_bytes:
            return
        self._pictures[url] = StoredPicture(data, conditions, self._clock() + life_s)
        self.num_bytes += len(data)
        while self.num_bytes > self._max_bytes:
            self._drop(next(iter(self._pictures)))

    def renew(self, url: str, fields: Mapping[bytes, bytes]) -> None:
        """Its server said that it is unchanged."""
        if (picture := self._pictures.get(url)) is not None:
            life_s = _life_s(fields, _cache_control(fields))
            self._pictures[url] = replace(picture, fresh_until=self._clock() + life_s)

    def _drop(self, url: str) -> None:
        if (picture := self._pictures.pop(url, None)) is not None:
            self.num_bytes -= len(picture.data)


def _cache_control(fields: Mapping[bytes, bytes]) -> dict[bytes, bytes]:
    matches = _DIRECTIVE.findall(fields.get(b"cache-control", b"").lower())
    return {name: quoted or plain for name, quoted, plain in matches}


def _life_s(fields: Mapping[bytes, bytes], directives: Mapping[bytes, bytes]) -> float:
    """Seconds from now for which it may be used unasked; the time that it spent in other caches is over."""
    if b"no-cache" in directives:
        return 0.0
    seconds = directives.get(b"s-maxage") or directives.get(b"max-age") or b""
    age = fields.get(b"age", b"0")
    if not seconds.isdigit() or not age.isdigit():
        return 0.0
    return float(min(int(seconds), LONGEST_LIFE_S) - min(int(age), LONGEST_LIFE_S))


def _conditions(fields: Mapping[bytes, bytes]) -> tuple[tuple[bytes, bytes], ...]:
    if b"etag" in fields:
        return ((b"If-None-Match", fields[b"etag"]),)
    if b"last-modified" in fields:
        return ((b"If-Modified-Since", fields[b"last-modified"]),)
    return ()
