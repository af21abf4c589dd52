"""FileStore: uploaded files until they expire, in Redis for every gateway and in this gateway's memory for outages.

Redis decides where it can be asked. Where it cannot, or has lost a file, the gateway that took the upload still has it,
as long as its memory allows. A deletion leaves a mark in Redis for the rest of the file's life, so that no gateway
brings the file back from its memory.

    diptych:file:{id}       hash: info (JSON) and data, or only `gone` after a deletion
    diptych:files:{owner}   sorted set of the owner's ids, scored by when they expire
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, Final

from pydantic import BaseModel, ConfigDict, ValidationError
from redis.asyncio import Redis
from redis.exceptions import ConnectionError, RedisError

from shared.errors import FileNotFound, NotReady
from shared.redis_link import RedisLink

FILE_ID_PREFIX: Final = "file-"
FILE_PREFIX: Final = "diptych:file:"
OWNER_PREFIX: Final = "diptych:files:"
LONGEST_LIFE_S: Final = 30 * 86_400
RETRY_AFTER_S: Final = 2.0
ENTRY_BYTES: Final = 2048  # what an entry takes beside its bytes
SWEEP_INTERVAL_S: Final = 1.0


class FileInfo(BaseModel):
    """What is known of a file besides its bytes.

    id      nobody can guess it, and it opens the file: whoever may use this gateway and knows the id may read the file
    owner   in whose list it is
    """

    model_config = ConfigDict(frozen=True)

    id: str
    owner: str
    filename: str
    purpose: str
    size_bytes: int
    created_at: int
    expires_at: int


class FileStore:
    def __init__(self, link: RedisLink, *, max_memory_bytes: int) -> None:
        self._link = link
        self._memory = FileMemory(max_memory_bytes)

    async def put(self, info: FileInfo, data: bytes) -> None:
        self._memory.put(info, data)

        async def store(redis: Redis) -> None:
            pipeline = redis.pipeline(transaction=False)
            pipeline.hset(FILE_PREFIX + info.id, mapping={"info": info.model_dump_json(), "data": data})
            pipeline.expireat(FILE_PREFIX + info.id, info.expires_at)
            owned = OWNER_PREFIX + info.owner
            pipeline.zadd(owned, {info.id: info.expires_at})
            pipeline.zremrangebyscore(owned, 0, time.time())
            pipeline.expire(owned, LONGEST_LIFE_S)
            await _run(pipeline)

        await self._link.attempt(store, default=None)

    async def info(self, file_id: str) -> FileInfo:
        """Raises FileNotFound; NotReady if Redis may hold the file and cannot be asked."""
        replies = await self._ask([file_id])
        found = self._judged(file_id, replies[0] if replies else None)
        if found is None and replies is None and self._link.enabled:
            raise NotReady("files cannot be looked up at the moment; try again", retry_after_s=RETRY_AFTER_S)
        if found is None:
            raise _not_found(file_id)
        return found

    async def read(self, file_id: str) -> bytes:
        """Raises what `info` raises."""
        await self.info(file_id)

        async def ask(redis: Redis) -> object:
            return await redis.hget(FILE_PREFIX + file_id, "data")

        unanswered = object()
        data: object = self._memory.data(file_id) or await self._link.attempt(ask, default=unanswered)
        if data is unanswered:
            raise NotReady("files cannot be read at the moment; try again", retry_after_s=RETRY_AFTER_S)
        if not isinstance(data, bytes):  # it expired in between
            raise _not_found(file_id)
        return data

    async def owned_by(self, owner: str) -> list[FileInfo]:
        """The owner's files, oldest first."""

        async def ask(redis: Redis) -> list[Any]:
            return list(await redis.zrangebyscore(OWNER_PREFIX + owner, time.time(), "+inf"))

        nothing: list[Any] = []
        shared = [file_id.decode() for file_id in await self._link.attempt(ask, default=nothing)]
        ids = list(dict.fromkeys([*shared, *self._memory.owned_by(owner)]))
        replies = await self._ask(ids) or [None] * len(ids)
        found = [self._judged(file_id, reply) for file_id, reply in zip(ids, replies, strict=True)]
        return sorted((info for info in found if info is not None), key=lambda info: (info.created_at, info.id))

    async def delete(self, file_id: str, owner: str) -> None:
        """Raises what `info` raises, for another's file as for none; NotReady if Redis may hold the file and cannot be
        told."""
        info = await self.info(file_id)
        if info.owner != owner:
            raise _not_found(file_id)

        async def forget(redis: Redis) -> bool:
            pipeline = redis.pipeline(transaction=False)
            pipeline.hset(FILE_PREFIX + file_id, "gone", "1")
            pipeline.hdel(FILE_PREFIX + file_id, "info", "data")
            pipeline.expireat(FILE_PREFIX + file_id, info.expires_at)
            pipeline.zrem(OWNER_PREFIX + info.owner, file_id)
            await _run(pipeline)
            return True

        if self._link.enabled and not await self._link.attempt(forget, default=False):
            raise NotReady("files cannot be deleted at the moment; try again", retry_after_s=RETRY_AFTER_S)
        self._memory.discard(file_id)

    async def close(self) -> None:
        await self._link.close()

    async def _ask(self, file_ids: Sequence[str]) -> list[Any] | None:
        """What Redis says of each file, in one round trip; None if it cannot be asked."""

        async def ask(redis: Redis) -> list[Any] | None:
            pipeline = redis.pipeline(transaction=False)
            for file_id in file_ids:
                pipeline.hmget(FILE_PREFIX + file_id, ["info", "gone"])
            replies: list[Any] = await pipeline.execute(raise_on_error=False)
            if broken := next((reply for reply in replies if isinstance(reply, ConnectionError)), None):
                raise broken  # it is loading, or has lost its master: it cannot say
            return replies

        return await self._link.attempt(ask, default=None) if file_ids else []

    def _judged(self, file_id: str, reply: object) -> FileInfo | None:
        """What Redis says of a file, or memory where Redis says nothing that makes sense."""
        match reply:
            case [_, b"1"]:
                self._memory.discard(file_id)
                return None
            case [bytes(text), None]:
                try:
                    return FileInfo.model_validate_json(text)
                except ValidationError:
                    return self._memory.info(file_id)
            case _:
                return self._memory.info(file_id)


class FileMemory:
    """Files of this process within a bound on their bytes: the least recently used make room for new ones.

    The newest is kept in any case: an upload that was accepted can be used.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._files: OrderedDict[str, tuple[FileInfo, bytes]] = OrderedDict()
        self._swept_at = 0.0
        self.num_bytes = 0

    def put(self, info: FileInfo, data: bytes) -> None:
        self._files[info.id] = (info, data)
        self.num_bytes += len(data) + ENTRY_BYTES
        if (now := time.time()) - self._swept_at > SWEEP_INTERVAL_S:
            self._swept_at = now
            for file_id in [other.id for other, _ in self._files.values() if other.expires_at <= now]:
                self.discard(file_id)
        while self.num_bytes > self._max_bytes and len(self._files) > 1:
            self.discard(next(iter(self._files)))

    def info(self, file_id: str) -> FileInfo | None:
        held = self._files.get(file_id)
        return held[0] if held is not None and held[0].expires_at > time.time() else None

    def data(self, file_id: str) -> bytes | None:
        if self.info(file_id) is None:
            return None
        self._files.move_to_end(file_id)
        return self._files[file_id][1]

    def owned_by(self, owner: str) -> list[str]:
        return [info.id for info, _ in self._files.values() if info.owner == owner]

    def discard(self, file_id: str) -> None:
        if (held := self._files.pop(file_id, None)) is not None:
            self.num_bytes -= len(held[1]) + ENTRY_BYTES


def _not_found(file_id: str) -> FileNotFound:
    return FileNotFound(f"there is no file {file_id[:80]!r} here: it was never uploaded, was deleted, or has expired")


async def _run(pipeline: Any) -> None:
    # No MULTI and no raise_on_error: for an error message redis-py would spell out the command, the file and all.
    for reply in await pipeline.execute(raise_on_error=False):
        if isinstance(reply, RedisError):
            raise reply
