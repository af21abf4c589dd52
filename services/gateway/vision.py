"""From image bytes to ImageRefs: what is known is not asked again, equal images in flight are encoded once.

Three places know an image, asked in this order: this gateway's memory, Redis (one pipelined look-up), the encoders. A
request goes on as soon as all of its images are admitted; their encoding goes on in the background.
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict
from collections.abc import Sequence
from typing import Protocol

from services.gateway.admission import Admission, AdmittedImage
from services.gateway.attempts import on_a_replica
from services.gateway.backends import EncoderClient
from services.gateway.balancer import Pool, Replica
from services.gateway.encoding import EncodeJob, Encodes, no_encoder
from services.gateway.images import LoadedImage, at_part
from services.gateway.trace import Trace
from shared.errors import DiptychError, UnsupportedFeature
from shared.hashing import embedding_key, image_key, off_loop
from shared.wire.encoder import EMBEDDINGS_REFUSED, DescribeRequest, DescribeResponse, EncoderInfo, ImageSize
from shared.wire.images import ImageMetadata, ImageRef

NO_IMAGE = "0" * 64  # the key of pictures of which only the size is known


class MetadataCache(Protocol):
    async def get_metadata(self, keys: Sequence[str]) -> list[ImageMetadata | None]: ...


class Vision:
    """known_images   how many images' token counts are remembered, least recently used forgotten first"""

    def __init__(
        self, pool: Pool[EncoderInfo], client: EncoderClient, cache: MetadataCache, *, known_images: int
    ) -> None:
        self._pool = pool
        self._client = client
        self._encodes = Encodes(pool, client, self._encoded)
        self._cache = cache
        self._max_known = known_images
        self._known: OrderedDict[str, tuple[ImageRef, Replica[EncoderInfo] | None]] = OrderedDict()
        self._info: EncoderInfo | None = None
        self.sources: Counter[str] = Counter()  # where refs came from, for the metrics

    def max_image_bytes(self, limit: int) -> int:
        """`limit` or the encoders' own, whichever is smaller: what passes here must not be refused there."""
        return min([limit, *(info.max_image_bytes for info in self._infos())])

    @property
    def num_in_flight(self) -> int:
        return len(self._encodes)

    async def admit(
        self, images: Sequence[LoadedImage], trace: Trace, *, fresh: bool = False, num_others: int = 0
    ) -> Admission:
        """All images admitted, in order. The first refusal ends the wait and names its part.

        fresh        believe neither memory nor Redis: an engine has just failed to get what they promised
        num_others   pictures of the conversation beside these
        """
        if self._info is None:  # else its pictures may be known, and need no encoder
            await self._pool.until_available()
        info = self._current_info()
        num_images = len(images) + num_others
        jobs = await asyncio.gather(
            *(
                self._job(image, number, info, num_images, trace.request_id, again=fresh)
                for number, image in enumerate(images)
            )
        )
        keys = [job.key for job in jobs]
        refs = {} if fresh else self._recall(keys)
        remembered = set(refs)
        await self._look_up([key for key in dict.fromkeys(keys) if key not in refs], refs, fresh=fresh)
        admission = Admission()
        is_admitted = False
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(self._admit_one(image, job, refs.get(job.key), remembered, admission))
                    for image, job in zip(images, jobs, strict=True)
                ]
            admission.images = [task.result() for task in tasks]
            is_admitted = True
        except* DiptychError as failures:
            raise failures.exceptions[0] from None
        finally:
            if not is_admitted:
                admission.release(abandoned=True)
        return admission

    async def describe(self, sizes: Sequence[ImageSize], *, num_others: int = 0) -> list[ImageRef]:
        """How pictures of these sizes would stand in a prompt; the refs are for counting only, no embedding is theirs.

        num_others   pictures of the conversation beside these
        Raises ImageTooLarge naming the size that no picture may have.
        """
        await self._pool.until_available()
        info = self._current_info()
        fingerprint, num_images = info.fingerprint, len(sizes) + num_others
        details = [info.detail_of(size.detail, num_images) for size in sizes]
        sizes = [size.model_copy(update={"detail": read}) for size, read in zip(sizes, details, strict=True)]

        def choose(tried: list[Replica[EncoderInfo]], _failure: DiptychError) -> Replica[EncoderInfo] | None:
            others = self._pool.available(tried, lambda info: info.fingerprint == fingerprint)
            return min(others, key=lambda each: each.outstanding, default=None)

        async def work(replica: Replica[EncoderInfo], _num_tries: int) -> DescribeResponse:
            answer = await self._client.describe(replica.url, DescribeRequest(images=sizes))
            self._pool.note(replica, None)
            return answer

        answer = await on_a_replica(self._pool, choose, work, nobody=no_encoder())
        return [ImageRef.of(metadata, image_key=NO_IMAGE) for metadata in answer.images]

    async def close(self) -> None:
        await self._encodes.close()

    # --- what is known ----------------------------------------------------------------------------------------------

    def _recall(self, keys: Sequence[str]) -> dict[str, ImageRef]:
        known = {key: self._known[key] for key in keys if key in self._known}
        for key in known:
            self._known.move_to_end(key)
        found = {key: ref for key, (ref, holder) in known.items() if not self._is_better_forgotten(holder)}
        self.sources["memory"] += len(found)
        return found

    def _is_better_forgotten(self, holder: Replica[EncoderInfo] | None) -> bool:
        """Nobody will hear from the encoder that holds the embedding, and another could make it anew."""
        return holder is not None and holder.is_silent and bool(self._pool.available())

    async def _look_up(self, keys: list[str], refs: dict[str, ImageRef], *, fresh: bool) -> None:
        unknown = [key for key in keys if self._encodes.running(key) is None]
        if fresh or not unknown:
            return
        for key, found in zip(unknown, await self._cache.get_metadata(unknown), strict=True):
            if found is not None:
                ref = ImageRef.of(found, image_key=key)
                refs[key] = ref
                self._remember(ref)
                self.sources["redis"] += 1

    def _remember(self, ref: ImageRef, holder: Replica[EncoderInfo] | None = None) -> None:
        self._known[ref.image_key] = (ref, holder)
        self._known.move_to_end(ref.image_key)
        while len(self._known) > self._max_known:
            self._known.popitem(last=False)

    def _encoded(self, ref: ImageRef, holder: Replica[EncoderInfo]) -> None:
        """Counted only now: a picture that is refused, by its header or when it is decoded, was not encoded."""
        self.sources["encoder"] += 1
        self._remember(ref, holder)

    def _infos(self) -> list[EncoderInfo]:
        return [replica.info for replica in self._pool.available() if replica.info is not None]

    def _current_info(self) -> EncoderInfo:
        """Of the version that most ready encoders are of; of equal ones the one in use; of none the last one.

        While a roll-out replaces the encoders every request uses one version, and its keys say which.
        """
        infos = {info.fingerprint: info for info in self._infos()}
        if infos:
            counts = Counter(info.fingerprint for info in self._infos())
            current = None if self._info is None else self._info.fingerprint
            self._info = infos[max(counts, key=lambda each: (counts[each], each == current))]
        if self._info is None:
            raise no_encoder()
        return self._info

    async def _job(
        self, image: LoadedImage, number: int, info: EncoderInfo, num_images: int, request_id: str, *, again: bool
    ) -> EncodeJob:
        detail = info.detail_of(image.detail, num_images)
        if image.is_embedding and not info.accepts_embeddings:
            raise UnsupportedFeature(EMBEDDINGS_REFUSED, param=image.param)
        if image.is_embedding:
            key = await off_loop(embedding_key, image.data, info.fingerprint)
        else:
            key = await off_loop(image_key, image.data, info.fingerprint_of(detail))
        return EncodeJob(
            key, image.data, info.fingerprint, request_id, again, number, detail, is_embedding=image.is_embedding
        )

    # --- admitting one image ----------------------------------------------------------------------------------------

    async def _admit_one(
        self, image: LoadedImage, job: EncodeJob, known: ImageRef | None, remembered: set[str], admission: Admission
    ) -> AdmittedImage:
        if known is not None:
            return AdmittedImage(known, image.param, None, "gateway" if job.key in remembered else "redis")
        encoding = self._encodes.running(job.key)
        admitted_by = "vision_encoder" if encoding is None else "shared"
        encoding = encoding or self._encodes.start(job)
        admission.join(encoding)
        try:
            ref = await asyncio.shield(encoding.admitted)
        except DiptychError as error:
            raise at_part(error, image.param) from error
        self.sources["joined"] += admitted_by == "shared"
        return AdmittedImage(ref, image.param, encoding, admitted_by)
