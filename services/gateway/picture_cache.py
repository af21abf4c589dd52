"""PictureCache: pictures fetched before, by URL, for as long as their servers allow.

A shared HTTP cache in the sense of RFC 9111, without heuristics: what says nothing about its life is asked for again.
Requests carry neither cookies nor credentials, so what one client may see every other could fetch as well.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

# RFC 9111, 1.2.2: anything longer means for ever.
LONGEST_LIFE_S = 2**31
ENTRY_BYTES = 500  # what an entry takes beside its picture, its URL and its validator
MAX_VALIDATOR_BYTES = 1024


@dataclass(frozen=True, slots=True)
class StoredPicture:
    """conditions   request headers that let the server answer "unchanged" (304) instead of sending it again

    life_s   how long it may be used unasked after it came, or was said to be unchanged
    """

    data: bytes
    conditions: tuple[tuple[bytes, bytes], ...]
    life_s: float
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
        picture = StoredPicture(data, conditions, life_s, self._clock() + life_s)
        size_bytes = _size_bytes(url, picture)
        if (
            fields.get(b"vary", b"accept-encoding").strip().lower() != b"accept-encoding"
            or size_bytes > self._max_bytes
        ):
            return
        self._pictures[url] = picture
        self.num_bytes += size_bytes
        while self.num_bytes > self._max_bytes:
            self._drop(next(iter(self._pictures)))

    def renew(self, url: str, fields: Mapping[bytes, bytes]) -> None:
        """Its server said that it is unchanged."""
        if (picture := self._pictures.get(url)) is not None:
            says_nothing = b"cache-control" not in fields
            life_s = picture.life_s if says_nothing else _life_s(fields, _cache_control(fields))
            self._pictures[url] = replace(picture, life_s=life_s, fresh_until=self._clock() + life_s)

    def _drop(self, url: str) -> None:
        if (picture := self._pictures.pop(url, None)) is not None:
            self.num_bytes -= _size_bytes(url, picture)


def parse_seconds(value: bytes) -> int | None:
    """Delta-seconds of a header; None if it is none. Any number that is too large means for ever."""
    if not value.isdigit():
        return None
    return min(int(value), LONGEST_LIFE_S) if len(value) <= len(str(LONGEST_LIFE_S)) else LONGEST_LIFE_S


def _size_bytes(url: str, picture: StoredPicture) -> int:
    return ENTRY_BYTES + len(url) + len(picture.data) + sum(len(value) for _, value in picture.conditions)


def _cache_control(fields: Mapping[bytes, bytes]) -> dict[bytes, bytes]:
    """By hand: a pattern for it can be made to take seconds. A comma in quotes gives names that mean nothing."""
    directives = {}
    for part in fields.get(b"cache-control", b"").lower().split(b","):
        name, _, value = part.partition(b"=")
        directives[name.strip()] = value.strip().strip(b'"')
    return directives


def _life_s(fields: Mapping[bytes, bytes], directives: Mapping[bytes, bytes]) -> float:
    """Seconds from now for which it may be used unasked; the time that it spent in other caches is over."""
    if b"no-cache" in directives:
        return 0.0
    seconds = parse_seconds(directives.get(b"s-maxage") or directives.get(b"max-age") or b"")
    age = parse_seconds(fields.get(b"age", b"0"))
    return 0.0 if seconds is None or age is None else float(seconds - age)


def _conditions(fields: Mapping[bytes, bytes]) -> tuple[tuple[bytes, bytes], ...]:
    for field, condition in ((b"etag", b"If-None-Match"), (b"last-modified", b"If-Modified-Since")):
        if field in fields and len(fields[field]) <= MAX_VALIDATOR_BYTES:
            return ((condition, fields[field]),)
    return ()
