"""Encoder: one image's story, from bytes to a stored embedding.

admit      verify the key, read the header, check limits, count tokens
join       an equal image under way, here or on another replica, is not encoded again
decode     in a worker process
encode     in the tower's thread, batched with whatever else is there
keep       in this process, for `GET /v1/embeddings`
store      in Redis
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from services.vision_encoder.admission import ImageLimits, Queue
from services.vision_encoder.batcher import Batcher
from services.vision_encoder.config import Storage
from services.vision_encoder.decode_pool import DecodePool
from services.vision_encoder.families.interface import Family, PreparedImage
from services.vision_encoder.flight import Flight
from services.vision_encoder.image_header import ImageHeader
from services.vision_encoder.metrics import EncoderMetrics
from services.vision_encoder.recent import RecentEmbeddings
from shared import tensor_blob
from shared.embedding_cache import EmbeddingCache
from shared.errors import DiptychError, EmbeddingNotFound, EncodeFailed, NotReady
from shared.hashing import image_key
from shared.http_errors import wire_error
from shared.log import get_logger
from shared.row_codec import SCALE_BYTES, quantize_rows
from shared.torch_io import tensor_to_blob
from shared.wire import Admitted, Encoded, EncodeEvent, EncodeFailedEvent, ImageMetadata, ImageRef

log = get_logger(__name__)

HASH_INLINE_BYTES = 1 << 20  # hashing more than this would hold up the event loop for a millisecond
# How long to wait for another replica that is encoding the same image before doing it here after all.
MAX_PEER_WAIT_S = 30.0


class Tower:
    """The model as a function of a batch; runs in the tower's thread."""

    def __init__(self, family: Family, metrics: EncoderMetrics, storage: Storage = "exact") -> None:
        self._family = family
        self._metrics = metrics
        self._storage = storage

    def __call__(self, batch: Sequence[PreparedImage]) -> list[bytes | EncodeFailed]:
        """One blob per image; an image whose output is wrong gets its error, its neighbours do not."""
        self._metrics.tower_passes.inc()
        self._metrics.batch_size.observe(len(batch))
        outputs = self._family.encode(batch)
        return [self._checked(rows, image) for rows, image in zip(outputs, batch, strict=True)]

    def _checked(self, rows: Tensor, image: PreparedImage) -> bytes | EncodeFailed:
        num_tokens = self._family.describe(image.width, image.height).num_tokens  # what was announced
        if tuple(rows.shape) != (num_tokens, self._family.hidden_size):
            return EncodeFailed(f"the tower gave {tuple(rows.shape)} for an image of {num_tokens} tokens")
        if not bool(torch.isfinite(rows).all()):
            return EncodeFailed("the tower gave values that are not finite for this image")
        return tensor_to_blob(quantize_rows(rows) if self._storage == "int8" else rows)


class Encoder:
    """Everything is handed in, so that tests can hand in less."""

    def __init__(
        self,
        *,
        family: Family,
        fingerprint: str,
        storage: Storage,
        limits: ImageLimits,
        queue: Queue,
        pool: DecodePool,
        batcher: Batcher[PreparedImage, bytes | EncodeFailed],
        cache: EmbeddingCache,
        recent: RecentEmbeddings,
        metrics: EncoderMetrics,
        replica_name: str,
        public_url: str | None,
    ) -> None:
        self.fingerprint = fingerprint
        self.limits = limits
        self._stored_width = family.hidden_size + (SCALE_BYTES if storage == "int8" else 0)
        self._family = family
        self._queue = queue
        self._pool = pool
        self._batcher = batcher
        self._cache = cache
        self._recent = recent
        self._metrics = metrics
        self._replica_name = replica_name
        self._public_url = public_url
        self._flights: dict[str, Flight] = {}

    @property
    def busy_s(self) -> float:
        """Seconds since the running tower pass began."""
        return self._batcher.busy_s

    async def close(self) -> None:
        """Call off what still runs; its callers get errors."""
        await asyncio.gather(*(flight.called_off() for flight in list(self._flights.values())))

    def describe(self, width: int, height: int) -> ImageMetadata:
        """How a picture of this size would stand in a prompt. Raises ImageTooLarge where it would be refused."""
        self.limits.check_shape(width, height, self._family.preprocessing)
        return self._family.describe(width, height)

    # --- POST /v1/encode --------------------------------------------------------------------------------------------

    def receiving(self, size_bytes: int, claimed_key: str | None) -> AbstractContextManager[None]:
        """A place in the queue while a body is read. Raises Overloaded or PayloadTooLarge before anything is read."""
        self.limits.check_size(size_bytes)
        if claimed_key not in self._flights:  # joining costs nothing
            self._queue.check(size_bytes)
        return self._queue.place(size_bytes)

    async def encode(self, data: bytes, claimed_key: str | None, deadline_s: float) -> AsyncIterator[EncodeEvent]:
        """Admits or raises at once; then the events that follow."""
        key = await self._verified_key(data, claimed_key)
        flight = self._flights.get(key)
        blob = self._recent.get(key)
        if flight is not None:
            self._metrics.images.labels("joined").inc()
            return self._follow(key, flight, deadline_s)
        header = self.limits.admit(data, self._family.preprocessing)
        metadata = self._family.describe(*header.upright_size)
        if blob is not None:
            self._metrics.images.labels("recent").inc()
            return self._already_done(key, metadata, blob)
        return self._follow(key, self._take_off(key, data, header, metadata), deadline_s)

    async def _verified_key(self, data: bytes, claimed_key: str | None) -> str:
        if len(data) <= HASH_INLINE_BYTES:
            key = image_key(data, self.fingerprint)
        else:
            key = await asyncio.to_thread(image_key, data, self.fingerprint)
        if claimed_key is not None and claimed_key != key:
            # After a change of model a caller may still hold the old fingerprint. To it this replica is as good as
            # gone until it has asked /v1/info again; another one may still serve the version that it means.
            raise NotReady(
                "the image key was made for another model or for other bytes; this encoder's fingerprint begins with "
                f"{self.fingerprint[:12]}, see /v1/info",
                retry_after_s=1.0,
            )
        return key

    def _take_off(self, key: str, data: bytes, header: ImageHeader, metadata: ImageMetadata) -> Flight:
        flight = Flight(metadata)
        size_bytes = len(data)

        def ended() -> None:
            self._queue.leave(size_bytes)
            if self._flights.get(key) is flight:
                del self._flights[key]

        # Entered here and not in the task, which starts later: in between others would see a place that is taken.
        self._queue.enter(size_bytes)
        self._flights[key] = flight
        flight.take_off(self._fly(key, flight, data, header), ended)
        return flight

    async def _follow(self, key: str, flight: Flight, deadline_s: float) -> AsyncIterator[EncodeEvent]:
        with flight.followed():  # from the first line on: its reader may be slow, and others may leave meanwhile
            yield self._admitted(key, flight.metadata)
            try:
                yield await flight.encoded(deadline_s)
            except DiptychError as error:
                yield EncodeFailedEvent(error=wire_error(error))

    async def _already_done(self, key: str, metadata: ImageMetadata, blob: bytes) -> AsyncIterator[EncodeEvent]:
        yield self._admitted(key, metadata)
        # It is here because Redis forgot it, or was away when it was made.
        yield Encoded(stored=await self._cache.put(key, metadata, blob))

    def _admitted(self, key: str, metadata: ImageMetadata) -> Admitted:
        return Admitted(image=ImageRef.of(metadata, image_key=key, encoder_url=self._public_url))

    # --- GET /v1/embeddings/{key} -----------------------------------------------------------------------------------

    async def embedding(self, key: str, deadline_s: float) -> bytes:
        """Waits if the image is being encoded. Raises EmbeddingNotFound if this replica knows nothing of it."""
        blob = self._recent.get(key)
        if blob is not None:
            return blob
        flight = self._flights.get(key)
        if flight is None:
            raise EmbeddingNotFound(f"this encoder does not hold embedding {key[:12]}…; send the image again")
        return await flight.embedding(deadline_s)

    # --- the flight -------------------------------------------------------------------------------------------------

    async def _fly(self, key: str, flight: Flight, data: bytes, header: ImageHeader) -> Encoded:
        outcome = "failed"
        try:
            blob = await self._from_another_replica(key, flight.metadata)
            is_shared = blob is not None
            timings: dict[str, float] = {}
            if blob is None:
                blob, timings = await self._compute(data, header, flight.metadata)
            self._recent.put(key, blob)
            flight.blob.set_result(blob)
            started = time.monotonic()
            stored = is_shared or await self._cache.put(key, flight.metadata, blob)
            timings["store"] = time.monotonic() - started
            outcome = "shared" if is_shared else "encoded"
            self._metrics.observe_stages(timings)
            return Encoded(stored=stored, timings=timings)
        except asyncio.CancelledError:
            outcome = "cancelled"
            raise
        except DiptychError:
            raise
        except Exception as error:
            log.error("encoding failed", image_key=key[:12], exc_info=error)
            raise EncodeFailed("the vision encoder failed on this image; its log has the details") from error
        finally:
            self._metrics.images.labels(outcome).inc()
            await self._cache.release(key)

    async def _from_another_replica(self, key: str, metadata: ImageMetadata) -> bytes | None:
        """The blob, if Redis has it or another replica is making it; else None, and this one is to make it."""
        blob = await self._cache.get_or_claim(key, self._replica_name, max_wait_s=MAX_PEER_WAIT_S)
        if blob is None:
            return None
        shape = (metadata.num_tokens, self._stored_width)
        return blob if tensor_blob.unpack(blob).shape == shape else None

    async def _compute(
        self, data: bytes, header: ImageHeader, metadata: ImageMetadata
    ) -> tuple[bytes, dict[str, float]]:
        decoded = await self._pool.decode(data, header)
        image = PreparedImage(torch.from_numpy(decoded.pixels), metadata.width, metadata.height)
        batched = await self._batcher.submit(image, decoded.pixels.shape)
        if isinstance(batched.value, EncodeFailed):
            raise batched.value
        self._queue.observe(batched.run_s / batched.batch_size)
        queue_s = decoded.timings["queue"] + batched.queue_s
        return batched.value, decoded.timings | {"queue": queue_s, "encode": batched.run_s}
