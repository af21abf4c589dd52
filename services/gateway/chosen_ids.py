"""Pictures under names that clients choose: `uuid` beside a picture keeps it, `uuid` alone stands for it later.

A name means something only to the API key it was given under: the holder of another key may use the same name for a
picture of their own. Without API keys everybody is one client. A name given again means the newer picture.
"""

from __future__ import annotations

import hashlib
import time
from contextlib import suppress
from typing import Final

from services.gateway.file_store import FileInfo, FileStore, new_file_id
from shared.errors import FileNotFound, FileQuotaExceeded, NotReady
from shared.hashing import off_loop
from shared.image_header import read_header

MAX_UUID_CHARS: Final = 256


class ChosenIds:
    """ttl_s   how long a picture is kept under its name, from when it was sent"""

    def __init__(self, store: FileStore, *, ttl_s: int) -> None:
        self._store = store
        self._ttl_s = ttl_s

    async def read(self, uuid: str, owner: str) -> bytes:
        """Raises FileNotFound; NotReady if Redis may hold the picture and cannot be asked."""
        found = await self._store.named(uuid, owner)
        try:
            return await self._store.read(found.id)
        except FileNotFound:  # a newer one has taken its place in between
            return await self._store.read((await self._store.named(uuid, owner)).id)

    async def keep(self, uuid: str, owner: str, data: bytes) -> None:
        """Stored anew only where the name is new, its picture is, or half of its time is over; what it replaces goes.

        Raises InvalidImage for what begins as none; FileQuotaExceeded.
        """
        read_header(data)
        content = await content_digest(data)
        now = int(time.time())
        found = None
        with suppress(FileNotFound, NotReady):  # unknown, or not to be asked: then it is kept here at least
            found = await self._store.named(uuid, owner)
            if found.content == content and found.expires_at - now > self._ttl_s / 2:
                return
        info = FileInfo(
            id=new_file_id(),
            owner=owner,
            filename="picture",
            purpose="vision",
            size_bytes=len(data),
            created_at=now,
            expires_at=now + self._ttl_s,
            uuid=uuid,
            content=content,
            is_sent_along=True,
        )
        replaced = found if found is not None and found.is_sent_along else None
        try:
            await self._store.put(info, data)
        except FileQuotaExceeded:
            if replaced is None or replaced.size_bytes < info.size_bytes:
                raise
            await self._give_up(replaced)  # before its time: the newer one fits into its place
            await self._store.put(info, data)
        else:
            if replaced is not None:
                await self._give_up(replaced)

    async def _give_up(self, info: FileInfo) -> None:
        with suppress(FileNotFound, NotReady):  # then it goes when its time is over
            await self._store.delete(info.id, info.owner)


async def content_digest(data: bytes) -> str:
    """sha256 in hexadecimal digits."""
    return (await off_loop(hashlib.sha256, data)).hexdigest()
