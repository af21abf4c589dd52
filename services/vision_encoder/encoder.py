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
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass

import torch
from torch import Tensor

from services.vision_encoder.admission import ImageLimits, Queue
from services.vision_encoder.batcher import ANY_PLACE, Batcher, Place
from services.vision_encoder.config import Storage
from services.vision_encoder.decode_pool import DecodePool
from services.vision_encoder.families.interface import Family, PreparedImage
from services.vision_encoder.flight import EventStream, Flight
from services.vision_encoder.given_embeddings import read_embedding
from services.vision_encoder.metrics import EncoderMetrics
from services.vision_encoder.recent import RecentEmbeddings
from services.vision_encoder.stage_clock import StageClock
from shared.embedding_cache import EmbeddingCache
from shared.errors import DiptychError, EmbeddingNotFound, EncodeFailed, NotReady, UnsupportedFeature
from shared.hashing import embedding_key, image_key, off_loop
from shared.http_errors import wire_error
from shared.image_header import ImageHeader
from shared.log import get_logger
from shared.row_codec import quantize_rows, stored_width
from shared.torch_io import blob_to_tensor, tensor_to_blob
from shared.wire.encoder import EMBEDDINGS_REFUSED, Admitted, Encoded, EncodeEvent, EncodeFailedEvent, ImageSize
from shared.wire.images import Detail, ImageMetadata, ImageRef

log = get_logger(__name__)

# How long to wait for another replica that is encoding the same image before doing it here after all.
MAX_PEER_WAIT_S = 30.0


@dataclass(frozen=True, slots=True)
class Reading:
    """The model as it reads pictures of one detail; the fingerprint names everything their embeddings depend on."""

    family: Family
    fingerprint: str


@dataclass(frozen=True, slots=True)
class Picture:
    """One that is admitted and not decoded. place: which of its request's pictures it is"""

    data: bytes
    header: ImageHeader
    metadata: ImageMetadata
    detail: Detail
    place: Place


class Tower:
    """The model as a function of a batch of one detail; runs in the tower's thread."""

    def __init__(self, families: Mapping[Detail, Family], metrics: EncoderMetrics, storage: Storage = "exact") -> None:
        self._families = families
        self._metrics = metrics
        self._storage = storage

    def __call__(self, batch: Sequence[PreparedImage]) -> list[bytes | EncodeFailed]:
        """One blob per image; an image whose output is wrong gets its error, its neighbours do not."""
        self._metrics.tower_passes.inc()
        self._metrics.batch_size.observe(len(batch))
        family = self._families[batch[0].detail]
        with self._metrics.tower_seconds.time():
            outputs = family.encode(batch)
        return [self._checked(rows, image, family) for rows, image in zip(outputs, batch, strict=True)]

    def _checked(self, rows: Tensor, image: PreparedImage, family: Family) -> bytes | EncodeFailed:
        num_tokens = family.describe(image.width, image.height).num_tokens  # what was announced
        if tuple(rows.shape) != (num_tokens, family.num_row_parts * family.hidden_size):
            return EncodeFailed(f"the tower gave {tuple(rows.shape)} for an image of {num_tokens} tokens")
        if not bool(torch.isfinite(rows).all()):
            return EncodeFailed("the tower gave values that are not finite for this image")
        return to_blob(rows, self._storage, family.num_row_parts)


def to_blob(rows: Tensor, storage: Storage, num_row_parts: int) -> bytes:
    return tensor_to_blob(quantize_rows(rows, num_row_parts) if storage == "int8" else rows)


class Encoder:
    """Everything is handed in, so that tests can hand in less."""

    def __init__(
        self,
        *,
        readings: Mapping[Detail, Reading],
        dtype: torch.dtype,
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
        accepts_embeddings: bool,
    ) -> None:
        self.limits = limits
        self._readings = readings
        self._dtype = dtype
        self._storage: Storage = storage
        family = readings["high"].family
        self._num_row_parts = family.num_row_parts
        self._row_size = family.num_row_parts * family.hidden_size
        self._stored_width = (
            stored_width(family.hidden_size, family.num_row_parts) if storage == "int8" else self._row_size
        )
        self._accepts_embeddings = accepts_embeddings
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
    def fingerprint(self) -> str:
        """Of the model as it reads pictures by default."""
        return self._readings["high"].fingerprint

    @property
    def num_flights(self) -> int:
        """Images under way."""
        return len(self._flights)

    @property
    def busy_s(self) -> float:
        """Seconds since the running tower pass began."""
        return self._batcher.busy_s

    async def close(self) -> None:
        """Call off what still runs; its callers get errors."""
        await self.call_off()

    async def call_off(self, reason: DiptychError | None = None) -> None:
        """Nothing that is under way comes to an end: its callers get the reason. None: the service is shutting down."""
        await asyncio.gather(*(flight.called_off(reason) for flight in list(self._flights.values())))

    def describe(self, size: ImageSize) -> ImageMetadata:
        """How a picture of this size would stand in a prompt. Raises ImageTooLarge where it would be refused."""
        family = self._readings["low" if size.detail == "low" else "high"].family
        self.limits.check_shape(size.width, size.height, family.preprocessing)
        return family.describe(size.width, size.height)

    # --- POST /v1/encode --------------------------------------------------------------------------------------------

    def receiving(self, size_bytes: int, claimed_key: str | None) -> AbstractContextManager[None]:
        """A place in the queue while a body is read. Raises Overloaded or PayloadTooLarge before anything is read."""
        self.limits.check_size(size_bytes)
        if claimed_key not in self._flights:  # joining costs nothing
            self._queue.check(size_bytes)
        return self._queue.place(size_bytes)

    async def encode(
        self,
        data: bytes,
        claimed_key: str | None,
        deadline_s: float,
        detail: Detail = "high",
        place: Place = ANY_PLACE,
    ) -> EventStream:
        """Admits or raises at once; then the events that follow."""
        reading = self._readings[detail]
        key = await off_loop(image_key, data, reading.fingerprint)
        self._verify(key, claimed_key)
        flight = self._flights.get(key)
        blob = self._recent.get(key)
        if flight is not None:
            self._metrics.images.labels("joined").inc()
            return self._follow(key, flight, deadline_s)
        header = self.limits.admit(data, reading.family.preprocessing)
        metadata = reading.family.describe(*header.upright_size)
        if blob is not None:
            self._metrics.images.labels("recent").inc()
            return EventStream(self._already_done(key, metadata, blob))
        picture = Picture(data, header, metadata, detail, place)
        return self._follow(key, self._take_off(key, picture), deadline_s)

    async def adopt(self, data: bytes, claimed_key: str | None) -> EventStream:
        """The same for an embedding that the client sent in place of a picture: checked, then kept as if made here."""
        if not self._accepts_embeddings:
            raise UnsupportedFeature(EMBEDDINGS_REFUSED)
        key = await off_loop(embedding_key, data, self.fingerprint)
        self._verify(key, claimed_key)
        metadata, blob = await asyncio.to_thread(self._given, data)
        self._recent.put(key, blob)
        self._metrics.images.labels("given").inc()
        return EventStream(self._already_done(key, metadata, blob))

    def _given(self, data: bytes) -> tuple[ImageMetadata, bytes]:
        metadata, rows = read_embedding(data, row_size=self._row_size, dtype=self._dtype, describe=self.describe)
        return metadata, to_blob(rows, self._storage, self._num_row_parts)

    def _verify(self, key: str, claimed_key: str | None) -> None:
        if claimed_key is not None and claimed_key != key:
            # After a change of model a caller may still hold the old fingerprint. To it this replica is as good as
            # gone until it has asked /v1/info again; another one may still serve the version that it means.
            raise NotReady(
                "the image key was made for another model or for other bytes; this encoder's fingerprint begins with "
                f"{self.fingerprint[:12]}, see /v1/info",
                retry_after_s=1.0,
            )

    def _take_off(self, key: str, picture: Picture) -> Flight:
        flight = Flight(picture.metadata)
        size_bytes = len(picture.data)

        def ended() -> None:
            self._queue.leave(size_bytes)
            if self._flights.get(key) is flight:
                del self._flights[key]

        # Entered here and not in the task, which starts later: in between others would see a place that is taken.
        self._queue.enter(size_bytes)
        self._flights[key] = flight
        flight.take_off(self._fly(key, flight, picture), ended)
        return flight

    def _follow(self, key: str, flight: Flight, deadline_s: float) -> EventStream:
        async def events() -> AsyncIterator[EncodeEvent]:
            yield self._admitted(key, flight.metadata)
            try:
                yield await flight.encoded(deadline_s)
            except DiptychError as error:
                yield EncodeFailedEvent(error=wire_error(error))

        # From now on, not from the first wait: its reader may be slow or never come, and others may leave meanwhile.
        place = ExitStack()
        place.enter_context(flight.followed())
        return EventStream(events(), place.close)

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

    async def _fly(self, key: str, flight: Flight, picture: Picture) -> Encoded:
        outcome = "failed"
        clock = StageClock()
        try:
            blob = await self._from_another_replica(key, flight.metadata)
            is_shared = blob is not None
            if blob is None:
                blob = await self._compute(picture, clock)
            else:
                clock.note(("transfer", time.monotonic() - clock.began_at), source="redis")
            self._recent.put(key, blob)
            flight.blob.set_result(blob)
            started = time.monotonic()
            stored = is_shared or await self._cache.put(key, flight.metadata, blob)
            clock.note(("store", time.monotonic() - started))
            outcome = "shared" if is_shared else "encoded"
            timings = clock.timings()
            self._metrics.observe_stages(timings)
            return Encoded(stored=stored, timings=timings, spans=clock.spans)
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
        rows = blob_to_tensor(blob)
        is_sound = tuple(rows.shape) == (metadata.num_tokens, self._stored_width)
        return blob if is_sound and bool(torch.isfinite(rows).all()) else None

    async def _compute(self, picture: Picture, clock: StageClock) -> bytes:
        metadata, detail = picture.metadata, picture.detail
        decoded = await self._pool.decode(picture.data, picture.header, detail)
        clock.note(*((stage, decoded.timings[stage]) for stage in ("queue", "decode", "preprocess")))
        image = PreparedImage(torch.from_numpy(decoded.pixels), metadata.width, metadata.height, detail)
        batched = await self._batcher.submit(image, (detail, decoded.pixels.shape), picture.place)
        if isinstance(batched.value, EncodeFailed):
            raise batched.value
        self._queue.observe(batched.run_s / batched.batch_size)
        clock.note(("queue", batched.queue_s), ("encode", batched.run_s))
        return batched.value
