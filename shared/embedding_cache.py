"""EmbeddingCache: image embeddings in Redis, shared by gateways, encoders and text engines.

A cache, never a point of failure: Redis down, paused, full or lying costs a miss, not an exception. Knows blobs, not
tensors; what it returns has been verified as a whole tensor blob, and nothing is ever unpickled.

One hash per image, so that Redis evicts metadata and blob together:
    diptych:emb:{image_key}    meta (JSON), blob (tensor_blob)
    diptych:lease:{image_key}  owner of the encode under way, with a short expiry
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from pydantic import SecretStr, ValidationError
from redis.asyncio import Redis
from redis.exceptions import RedisError

from shared import tensor_blob
from shared.redis_link import RedisLink
from shared.tls import Tls
from shared.wire.images import ImageMetadata

EMBEDDING_PREFIX: Final = "diptych:emb:"
LEASE_PREFIX: Final = "diptych:lease:"
VERIFY_INLINE_BYTES: Final = 1 << 20  # a larger checksum would hold up the event loop for a millisecond or more
POLL_S: Final = (0.01, 0.02, 0.05, 0.1)  # how a follower looks for the leader's result: eagerly, then patiently

# Only the owner may end or renew a lease: after a pause its own may have expired and be another's by now.
_RELEASE: Final = "if redis.call('get', KEYS[1]) == ARGV[1] then return redis.call('del', KEYS[1]) end return 0"
_RENEW: Final = (
    "if redis.call('get', KEYS[1]) == ARGV[1] then return redis.call('pexpire', KEYS[1], ARGV[2]) end return 0"
)


@dataclass(slots=True)
class CacheStats:
    """Counts since start, for `/metrics`. Corrupt entries count as misses too."""

    hits: int = 0
    misses: int = 0
    stores: int = 0
    corrupt: int = 0


class EmbeddingCache:
    """Look-ups and stores that never raise for an outage. Create it on the event loop that uses it.

    url             None: no cache, every look-up misses and every lease is granted
    ttl_s           life of an entry since it was stored or last looked up
    op_timeout_s    the most that one operation may add to a request
    tls             for rediss://
    lease_ttl_s     how soon a follower takes over from a leader that died
    """

    def __init__(
        self,
        url: str | SecretStr | None,
        *,
        ttl_s: float = 86_400.0,
        op_timeout_s: float = 0.3,
        tls: Tls | None = None,
        lease_ttl_s: float = 5.0,
        failures_to_open: int = 3,
        probe_interval_s: float = 2.0,
        warn_interval_s: float = 30.0,
    ) -> None:
        self.stats = CacheStats()
        self._ttl_s = ttl_s
        self._lease_ttl_s = lease_ttl_s
        self._leases: dict[str, str] = {}
        self._renewer: asyncio.Task[None] | None = None
        self._link = RedisLink(
            url,
            op_timeout_s=op_timeout_s,
            subject="embedding cache",
            tls=tls,
            failures_to_open=failures_to_open,
            probe_interval_s=probe_interval_s,
            warn_interval_s=warn_interval_s,
        )

    @property
    def enabled(self) -> bool:
        return self._link.enabled

    @property
    def num_errors(self) -> int:
        """Operations that failed, since start."""
        return self._link.num_errors

    @property
    def breaker_open(self) -> bool:
        """True while operations are answered without asking Redis, because it was found dead or paused."""
        return self._link.breaker_open

    async def close(self) -> None:
        if self._renewer is not None:
            self._renewer.cancel()
        await self._link.close()

    # --- entries ----------------------------------------------------------------------------------------------------

    async def get_metadata(self, keys: Sequence[str]) -> list[ImageMetadata | None]:
        """Metadata of all `keys` in one round trip; None for a miss. A hit starts the entry's life anew."""

        async def ask(redis: Redis) -> list[Any]:
            pipeline = redis.pipeline(transaction=False)
            for key in keys:
                pipeline.hget(EMBEDDING_PREFIX + key, "meta")
                pipeline.pexpire(EMBEDDING_PREFIX + key, round(self._ttl_s * 1000))
            replies: list[Any] = await pipeline.execute(raise_on_error=False)
            return replies[::2]

        replies = await self._link.attempt(ask, default=None) if keys else []
        found = [_parse_metadata(reply) for reply in replies or [None] * len(keys)]
        self._count(found)
        return found

    async def get(self, keys: Sequence[str]) -> list[bytes | None]:
        """Blobs of all `keys` in one round trip, each verified; None for a miss. Corrupt entries are deleted."""
        found = await self._fetch(keys)
        self._count(found)
        return found

    async def _fetch(self, keys: Sequence[str]) -> list[bytes | None]:
        async def ask(redis: Redis) -> list[Any]:
            pipeline = redis.pipeline(transaction=False)
            for key in keys:
                pipeline.hget(EMBEDDING_PREFIX + key, "blob")
            replies: list[Any] = await pipeline.execute(raise_on_error=False)
            return replies

        replies = await self._link.attempt(ask, default=None) if keys else []
        found: list[bytes | None] = [None] * len(keys)
        for index, (key, reply) in enumerate(zip(keys, replies or [], strict=False)):
            if not isinstance(reply, bytes):  # absent, or an entry that is no hash: the next `put` replaces it
                continue
            if await _is_whole_blob(reply):
                found[index] = reply
            else:
                self.stats.corrupt += 1
                await self.discard(key)
        return found

    async def put(self, key: str, metadata: ImageMetadata, blob: bytes) -> bool:
        """Store one embedding, metadata and blob at once; False if it could not be stored."""

        async def store(redis: Redis) -> bool:
            # One HSET writes both fields at once. No MULTI and no raise_on_error: for an error message redis-py would
            # spell out the command, blob and all, which holds up the event loop for 100 ms per MB.
            pipeline = redis.pipeline(transaction=False)
            pipeline.unlink(EMBEDDING_PREFIX + key)  # whatever is there, of whatever type
            fields = {"meta": metadata.model_dump_json(exclude_defaults=True), "blob": blob}
            pipeline.hset(EMBEDDING_PREFIX + key, mapping=fields)  # type: ignore[arg-type]
            pipeline.pexpire(EMBEDDING_PREFIX + key, round(self._ttl_s * 1000))
            replies = await pipeline.execute(raise_on_error=False)
            for reply in replies:
                if isinstance(reply, RedisError):
                    raise reply
            return True

        stored = await self._link.attempt(store, default=False)
        self.stats.stores += stored
        return stored

    async def discard(self, key: str) -> None:
        """Forget one entry, for example because its blob does not fit the model that reads it."""
        await self._link.attempt(lambda redis: redis.unlink(EMBEDDING_PREFIX + key), default=0)

    # --- single flight across replicas ------------------------------------------------------------------------------

    async def get_or_claim(self, key: str, owner: str, *, max_wait_s: float) -> bytes | None:
        """The blob, or None if the caller is now the one to compute it (then `release` afterwards).

        While another owner holds the lease this waits for its result. None also comes when that owner dies, when
        `max_wait_s` has passed, and when Redis is out of order: computing twice is better than not answering.
        """
        loop = asyncio.get_running_loop()
        give_up = loop.time() + max_wait_s
        num_polls = 0
        while True:
            # Claim first, look second: a leader that stores and releases in between is then still seen.
            claimed = await self.claim(key, owner)
            found = await self._fetch([key])
            if found[0] is not None or claimed or loop.time() >= give_up:
                break
            await asyncio.sleep(POLL_S[min(num_polls, len(POLL_S) - 1)])
            num_polls += 1
        self._count(found)
        if found[0] is not None and claimed:
            await self.release(key)
        return found[0]

    async def claim(self, key: str, owner: str) -> bool:
        """True if `owner` now holds the lease on `key`, or if Redis cannot tell. It is renewed until `release`."""

        async def take(redis: Redis) -> bool:
            lease_ms = round(self._lease_ttl_s * 1000)
            return bool(await redis.set(LEASE_PREFIX + key, owner, nx=True, px=lease_ms))

        granted = await self._link.attempt(take, default=True)
        if granted and self.enabled:
            self._leases[key] = owner
            if self._renewer is None:
                self._renewer = asyncio.create_task(self._renew_leases())
        return granted

    async def release(self, key: str) -> None:
        """End this process's lease on `key`, if it holds one; followers see the result or take over at once."""
        owner = self._leases.pop(key, None)
        if owner is not None:
            await self._link.attempt(lambda redis: redis.eval(_RELEASE, 1, LEASE_PREFIX + key, owner), default=0)

    async def _renew_leases(self) -> None:
        """A lease is short so that a dead leader is noticed soon, and renewed because a queue may be long."""

        async def renew(redis: Redis) -> None:
            pipeline = redis.pipeline(transaction=False)
            for key, owner in self._leases.items():
                pipeline.eval(_RENEW, 1, LEASE_PREFIX + key, owner, round(self._lease_ttl_s * 1000))
            await pipeline.execute(raise_on_error=False)

        while True:
            await asyncio.sleep(self._lease_ttl_s / 3)
            if self._leases:
                await self._link.attempt(renew, default=None)

    def _count(self, found: Sequence[object | None]) -> None:
        misses = sum(entry is None for entry in found)
        self.stats.misses += misses
        self.stats.hits += len(found) - misses


async def _is_whole_blob(blob: bytes) -> bool:
    try:
        if len(blob) <= VERIFY_INLINE_BYTES:
            tensor_blob.unpack(blob)
        else:
            await asyncio.to_thread(tensor_blob.unpack, blob)
    except tensor_blob.BlobError:
        return False
    return True


def _parse_metadata(reply: object) -> ImageMetadata | None:
    """Whatever does not parse is a miss: Redis is not trusted to hold what we put there."""
    if not isinstance(reply, bytes):
        return None
    try:
        return ImageMetadata.model_validate_json(reply, strict=True)
    except ValidationError:
        return None
