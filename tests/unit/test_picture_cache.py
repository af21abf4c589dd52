"""Fetched pictures: how long they may be used unasked, and when they are forgotten."""

from __future__ import annotations

import time

import pytest

from services.gateway.net_guard import HostResolver, NetGuard
from services.gateway.picture_cache import ENTRY_BYTES, PictureCache
from shared.errors import ForbiddenUrl

URL = "https://pictures.example/cat.png"


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def is_fresh(cache: PictureCache, url: str = URL) -> bool:
    picture = cache.get(url)
    return picture is not None and cache.is_fresh(picture)


@pytest.mark.parametrize(
    ("fields", "life_s"),
    [
        ({b"cache-control": b"max-age=60"}, 60),
        ({b"cache-control": b"Public, Max-Age=60"}, 60),
        ({b"cache-control": b'max-age="60"'}, 60),
        ({b"cache-control": b"max-age=60, s-maxage=10"}, 10),
        ({b"cache-control": b"max-age=60", b"age": b"45"}, 15),
        ({b"cache-control": b"max-age=99999999999999999999"}, 2**31),
    ],
)
def test_it_is_used_unasked_for_as_long_as_its_server_said(clock: Clock, fields: dict[bytes, bytes], life_s: float):
    cache = PictureCache(1000, clock)
    cache.put(URL, b"cat", fields)
    clock.now += life_s - 1
    assert is_fresh(cache)
    clock.now += 1
    assert not is_fresh(cache)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {b"cache-control": b"no-store, max-age=60", b"etag": b'"v1"'},
        {b"cache-control": b"private, max-age=60", b"etag": b'"v1"'},
        {b"cache-control": b"max-age=60", b"vary": b"Cookie"},
        {b"cache-control": b"max-age=-1"},
        {b"cache-control": b"max-age=soon"},
        {b"cache-control": b"max-age=10", b"age": b"10"},
    ],
)
def test_what_may_not_be_kept_or_would_be_of_no_use_is_not_kept(clock: Clock, fields: dict[bytes, bytes]):
    cache = PictureCache(1000, clock)
    cache.put(URL, b"cat", fields)
    assert cache.get(URL) is None
    assert cache.num_bytes == 0


@pytest.mark.parametrize(
    ("fields", "condition"),
    [
        ({b"etag": b'W/"v1"', b"last-modified": b"yesterday"}, (b"If-None-Match", b'W/"v1"')),
        ({b"last-modified": b"yesterday"}, (b"If-Modified-Since", b"yesterday")),
    ],
)
def test_its_server_is_asked_whether_it_changed(
    clock: Clock, fields: dict[bytes, bytes], condition: tuple[bytes, bytes]
):
    cache = PictureCache(1000, clock)
    cache.put(URL, b"cat", {**fields, b"cache-control": b"no-cache"})
    picture = cache.get(URL)
    assert picture is not None
    assert picture.conditions == (condition,)
    assert not is_fresh(cache)
    cache.renew(URL, {b"cache-control": b"max-age=5"})
    assert is_fresh(cache)


def test_the_pictures_that_were_not_asked_for_longest_make_room(clock: Clock):
    cache = PictureCache(2 * (ENTRY_BYTES + 6), clock)
    fields = {b"cache-control": b"max-age=60"}
    for name in ("a", "b"):
        cache.put(name, bytes(5), fields)
    cache.get("a")
    cache.put("c", bytes(5), fields)
    assert [cache.get(name) is not None for name in "abc"] == [True, False, True]
    cache.put("d", bytes(2 * ENTRY_BYTES), fields)
    assert cache.get("d") is None
    assert cache.num_bytes == 2 * (ENTRY_BYTES + 6)
    cache.put("a", bytes(2), {})
    assert cache.num_bytes == ENTRY_BYTES + 6


def test_what_a_server_sends_beside_the_picture_counts_too(clock: Clock):
    cache = PictureCache(100_000, clock)
    for number in range(1000):
        cache.put(f"https://a.example/{number}{'x' * 1000}", b"1", {b"etag": b"v" * 1000})
    held = sum(len(url) + 1000 for url in cache._pictures)
    assert held < cache.num_bytes <= 100_000
    cache.put(URL, b"cat", {b"etag": b"v" * 1025})
    assert cache.get(URL) is None


@pytest.mark.parametrize("control", [b"a" + b" " * 60_000 + b"!", b"a" * 30_000 + b" " * 30_000, b'"' * 60_000])
def test_a_hostile_cache_control_takes_no_time(clock: Clock, control: bytes):
    begun = time.perf_counter()
    PictureCache(1000, clock).put(URL, b"cat", {b"cache-control": control, b"age": b"9" * 60_000})
    assert time.perf_counter() - begun < 0.1


def test_a_server_that_only_says_unchanged_keeps_its_word_of_before(clock: Clock):
    cache = PictureCache(1000, clock)
    cache.put(URL, b"cat", {b"cache-control": b"max-age=60", b"etag": b'"v1"'})
    clock.now += 61
    assert not is_fresh(cache)
    cache.renew(URL, {})
    clock.now += 59
    assert is_fresh(cache)


def test_a_listed_domain_covers_what_is_below_it_and_nothing_else():
    guard = NetGuard(HostResolver(), denied_hosts=(".example.com", "exact.test"))
    for host in ("a.example.com", "A.B.Example.COM", "a.example.com.", "exact.test"):
        with pytest.raises(ForbiddenUrl):
            guard.check_host(host)
    for host in ("example.com", "badexample.com", "example.com.evil.test", "sub.exact.test"):
        guard.check_host(host)
