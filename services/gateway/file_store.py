"""FileStore: uploaded files until they expire, in Redis for every gateway and in this gateway's memory for outages.

Redis decides where it can be asked. Where it cannot, or has lost a file, the gateway that took the upload still has it,
as long as its memory allows. A deletion leaves a mark in Redis for the rest of the file's life, so that no gateway
brings the file back from its memory. An owner's files may take so many bytes in Redis, whichever gateways they come
through; where Redis cannot be asked, so many in this gateway's memory.

    diptych:file:{id}       hash: info (JSON) and data, or only `gone` after a deletion
    diptych:files:{owner}   sorted set of the owner's ids, scored by when they expire
    diptych:file-name:{digest of owner and uuid}   the id of the owner's newest file under the name `uuid`
    diptych:file-account:{owner}, diptych:file-bytes:{owner}   see file_scripts
"""

from __future__ import annotations

import math
import secrets
import time
from collections import Counter, OrderedDict
from collections.abc import Sequence
from typing import Any, Final

from pydantic import BaseModel, ConfigDict, ValidationError
from redis.asyncio import Redis
from redis.exceptions import ConnectionError

from services.gateway.file_scripts import ACCOUNT_PREFIX, BYTES_PREFIX, FORGET, KEEP
from shared.errors import FileNotFound, FileQuotaExceeded, NotReady
from shared.hashing import digest
from shared.redis_link import RedisLink

FILE_ID_PREFIX: Final = "file-"
FILE_PREFIX: Final = "diptych:file:"
OWNER_PREFIX: Final = "diptych:files:"
NAME_PREFIX: Final = "diptych:file-name:"
LONGEST_LIFE_S: Final = 30 * 86_400
RETRY_AFTER_S: Final = 2.0
ENTRY_BYTES: Final = 2048  # what an entry takes beside its bytes
SWEEP_INTERVAL_S: Final = 1.0
MAX_LISTED: Final = 10_000

Argument = bytes | str | int  # of a script


class FileInfo(BaseModel):
    """What is known of a file besides its bytes.

    id        nobody can guess it, and it opens the file: whoever may use this gateway and knows it may read the file
    owner     in whose list it is
    uuid      the owner's own name for it, which opens it for the owner only
    content   sha256 of the bytes, where there is a uuid
    is_sent_along   it came within a request and has no use but by its name: a newer one of the name takes its place
    """

    model_config = ConfigDict(frozen=True)

    id: str
    owner: str
    filename: str
    purpose: str
    size_bytes: int
    created_at: int
    expires_at: int
    uuid: str | None = None
    content: str | None = None
    is_sent_along: bool = False


def new_file_id() -> str:
    return FILE_ID_PREFIX + secrets.token_hex(16)


class FileStore:
    """max_bytes_per_owner   of one owner's files, each with ENTRY_BYTES beside its own; 0: no limit"""

    def __init__(self, link: RedisLink, *, max_memory_bytes: int, max_bytes_per_owner: int = 0) -> None:
        self._link = link
        self._memory = FileMemory(max_memory_bytes)
        self._max_bytes_per_owner = max_bytes_per_owner

    async def put(self, info: FileInfo, data: bytes) -> None:
        """Raises FileQuotaExceeded, and keeps nothing, if the owner's files would take too many bytes."""
        size_bytes = _size_in_account(info)

        async def keep(redis: Redis) -> tuple[bool, int]:
            keys = _keys_of(info)
            if info.uuid is not None:
                keys.append(_name_key(info.uuid, info.owner))
            args: list[Argument] = [info.id, info.model_dump_json(), data, size_bytes, info.expires_at]
            limits: list[Argument] = [self._max_bytes_per_owner, LONGEST_LIFE_S, FILE_PREFIX]
            is_kept, used_bytes = await redis.register_script(KEEP)(keys, [*args, *limits])
            return bool(is_kept), int(used_bytes)

        unanswered: tuple[bool, int] | None = None
        answer = await self._link.attempt(keep, default=unanswered)
        is_kept, used_bytes = answer or self._fits_in_memory(info.owner, size_bytes)
        if not is_kept:
            raise FileQuotaExceeded(
                f"the files of this API key take {used_bytes} bytes, and this one would take {size_bytes}; at most "
                f"{self._max_bytes_per_owner}: delete some (DELETE /v1/files/{{id}}), or wait until they expire"
            )
        self._memory.put(info, data)

    def _fits_in_memory(self, owner: str, size_bytes: int) -> tuple[bool, int]:
        used_bytes = self._memory.num_bytes_of(owner)
        limit = self._max_bytes_per_owner
        return not limit or used_bytes + size_bytes <= limit, used_bytes

    async def info(self, file_id: str) -> FileInfo:
        """Raises FileNotFound; NotReady if Redis may hold the file and cannot be asked."""
        replies = await self._ask([file_id])
        found = self._judged(file_id, replies[0] if replies else None)
        if found is None and replies is None and self._link.enabled:
            raise NotReady("files cannot be looked up at the moment; try again", retry_after_s=RETRY_AFTER_S)
        if found is None:
            raise _not_found(file_id)
        return found

    async def named(self, uuid: str, owner: str) -> FileInfo:
        """The owner's newest file of this name. Raises what `info` raises."""

        async def ask(redis: Redis) -> object:
            return await redis.get(_name_key(uuid, owner))

        unanswered = object()
        reply: object = await self._link.attempt(ask, default=unanswered)
        shared = reply.decode(errors="replace") if isinstance(reply, bytes) else None
        # Both: while Redis was away, this gateway may have been given a newer one.
        ids = [file_id for file_id in dict.fromkeys((shared, self._memory.named(uuid, owner))) if file_id is not None]
        replies = await self._ask(ids) or [None] * len(ids)
        found = [self._judged(file_id, reply) for file_id, reply in zip(ids, replies, strict=True)]
        theirs = [info for info in found if info is not None and (info.uuid, info.owner) == (uuid, owner)]
        if theirs:
            return max(theirs, key=lambda info: info.created_at)
        if reply is unanswered and self._link.enabled:
            raise NotReady("files cannot be looked up at the moment; try again", retry_after_s=RETRY_AFTER_S)
        raise FileNotFound(f"no picture is kept as {uuid[:80]!r} for this API key (any more); send it along once more")

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
        """The owner's files, oldest first; of more than MAX_LISTED those that live longest."""

        async def ask(redis: Redis) -> list[Any]:
            owned = OWNER_PREFIX + owner
            return list(await redis.zrevrangebyscore(owned, "+inf", time.time(), start=0, num=MAX_LISTED))

        nothing: list[Any] = []
        shared = [file_id.decode(errors="replace") for file_id in await self._link.attempt(ask, default=nothing)]
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
            args: list[Argument] = [file_id, _size_in_account(info), info.expires_at]
            await redis.register_script(FORGET)(_keys_of(info), args)
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
    """Files of this process within a bound on their bytes. The owner of most makes room for new ones, with what they
    have not used for longest: nobody loses their files because of how much another sends.

    The newest is kept in any case: an upload that was accepted can be used.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._files: dict[str, tuple[FileInfo, bytes]] = {}
        self._owned: dict[str, OrderedDict[str, None]] = {}  # owner -> ids, the least recently used first
        self._num_bytes: Counter[str] = Counter()  # by owner
        self._names: dict[tuple[str, str], str] = {}  # (uuid, owner) -> the newest file's id
        self._swept_at = -math.inf

    @property
    def num_bytes(self) -> int:
        return self._num_bytes.total()

    def put(self, info: FileInfo, data: bytes) -> None:
        self._files[info.id] = (info, data)
        self._owned.setdefault(info.owner, OrderedDict())[info.id] = None
        self._num_bytes[info.owner] += len(data) + ENTRY_BYTES
        if info.uuid is not None:
            self._names[info.uuid, info.owner] = info.id
        self._sweep()
        while self.num_bytes > self._max_bytes and len(self._files) > 1:
            self.discard(self._first_to_go(info.id))

    def _sweep(self) -> None:
        """Now and then let go of what has expired."""
        # By the timer: after the clock has jumped back it would not be time again for as long as the jump.
        if (tick := time.monotonic()) - self._swept_at <= SWEEP_INTERVAL_S:
            return
        self._swept_at = tick
        now = time.time()
        for file_id in [info.id for info, _ in self._files.values() if info.expires_at <= now]:
            self.discard(file_id)

    def _first_to_go(self, newest: str) -> str:
        firsts = {owner: next(iter(ids)) for owner, ids in self._owned.items()}
        others = [owner for owner, first in firsts.items() if first != newest]
        return firsts[max(others, key=self._num_bytes.__getitem__)]

    def info(self, file_id: str) -> FileInfo | None:
        held = self._files.get(file_id)
        return held[0] if held is not None and held[0].expires_at > time.time() else None

    def data(self, file_id: str) -> bytes | None:
        info = self.info(file_id)
        if info is None:
            return None
        self._owned[info.owner].move_to_end(file_id)
        return self._files[file_id][1]

    def num_bytes_of(self, owner: str) -> int:
        """Of the owner's files, what has just expired included."""
        self._sweep()
        return self._num_bytes[owner]

    def owned_by(self, owner: str) -> list[str]:
        return list(self._owned.get(owner, ()))

    def named(self, uuid: str, owner: str) -> str | None:
        return self._names.get((uuid, owner))

    def discard(self, file_id: str) -> None:
        if (held := self._files.pop(file_id, None)) is None:
            return
        info, data = held
        self._num_bytes[info.owner] -= len(data) + ENTRY_BYTES
        del self._owned[info.owner][file_id]
        if not self._owned[info.owner]:
            del self._owned[info.owner], self._num_bytes[info.owner]
        if info.uuid is not None and self._names.get((info.uuid, info.owner)) == file_id:
            del self._names[info.uuid, info.owner]


def _name_key(uuid: str, owner: str) -> str:
    return NAME_PREFIX + digest(owner.encode(), uuid.encode()).hex()


def _not_found(file_id: str) -> FileNotFound:
    return FileNotFound(f"there is no file {file_id[:80]!r} here: it was never uploaded, was deleted, or has expired")


def _size_in_account(info: FileInfo) -> int:
    return info.size_bytes + ENTRY_BYTES


def _keys_of(info: FileInfo) -> list[str]:
    """What both scripts touch."""
    return [FILE_PREFIX + info.id, *(prefix + info.owner for prefix in (OWNER_PREFIX, ACCOUNT_PREFIX, BYTES_PREFIX))]
