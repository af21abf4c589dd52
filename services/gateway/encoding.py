"""Encodes under way: equal images share one, a replica that gives out or falls silent is replaced by another.

Knows encoders; what is remembered about images, and which requests wait for them, is others' business.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import Any

from services.gateway.attempts import on_a_replica
from services.gateway.backends import EncoderClient
from services.gateway.balancer import (
    Pool,
    Replica,
    by_rendezvous,
    without_latest_failure,
)
from shared.errors import DiptychError, NotReady, UpstreamFailed
from shared.wire.encoder import Admitted, Encoded, EncoderInfo
from shared.wire.images import Detail, ImageRef

RETRY_AFTER_S = 2.0


@dataclass(frozen=True, slots=True)
class EncodeJob:
    """An image to encode, by encoders of one fingerprint.

    again          it was encoded before and the result is lost: not by the replica that failed last, if there is
                   another
    number         which of its request's pictures it is
    is_embedding   the bytes are no picture but its embedding, to be checked and kept
    """

    key: str
    image: bytes
    fingerprint: str
    request_id: str
    again: bool
    number: int = 0
    detail: Detail = "high"
    is_embedding: bool = False

    def suits(self, info: EncoderInfo) -> bool:
        """Whether an encoder can take it."""
        return info.fingerprint == self.fingerprint and (info.accepts_embeddings or not self.is_embedding)


class Encoding:
    """One encode call in flight, shared by every request that wants this image now.

    asked_at, admitted_at, encoded_at   by time.perf_counter(); the last two are 0 until then
    replica                             that took it, or was asked last
    """

    def __init__(self, job: EncodeJob) -> None:
        loop = asyncio.get_running_loop()
        self.job = job
        self.admitted: asyncio.Future[ImageRef] = loop.create_future()
        self.encoded: asyncio.Future[Encoded] = loop.create_future()
        self.task: asyncio.Task[None] | None = None
        self.asked_at = time.perf_counter()
        self.admitted_at = self.encoded_at = 0.0
        self.replica: Replica[EncoderInfo] | None = None
        self._patience: asyncio.Timeout | None = None
        self._num_waiters = 0
        self._is_cancelled = False
        for outcome in (self.admitted, self.encoded):
            outcome.add_done_callback(_is_seen)

    @property
    def where(self) -> str:
        return "vision_encoder" if self.replica is None else f"vision_encoder-{self.replica.number}"

    @property
    def has_failed(self) -> bool:
        return self.encoded.done() and self.encoded.exception() is not None

    @property
    def can_be_joined(self) -> bool:
        return not self._is_cancelled and not self.has_failed

    def admit(self, ref: ImageRef) -> None:
        if not self.admitted.done():
            self.admitted_at = time.perf_counter()
            self.admitted.set_result(ref)

    def finish(self, encoded: Encoded) -> None:
        if not self.encoded.done():
            self.encoded_at = time.perf_counter()
            self.encoded.set_result(encoded)

    def fail(self, error: DiptychError) -> None:
        for outcome in (self.admitted, self.encoded):
            if not outcome.done():
                outcome.set_exception(error)

    @asynccontextmanager
    async def at(self, replica: Replica[EncoderInfo]) -> AsyncIterator[None]:
        """Entered while `replica` has it. Raises NotReady when it is given up there."""
        self.replica = replica
        try:
            with replica.lease():
                async with asyncio.timeout(None) as self._patience:
                    yield
        except TimeoutError:
            raise NotReady("the vision encoder has fallen silent", retry_after_s=RETRY_AFTER_S) from None
        finally:
            self._patience = None

    def give_up_there(self) -> None:
        """Its replica will not finish it."""
        if self._patience is not None and not self._patience.expired():
            self._patience.reschedule(-math.inf)

    def join(self) -> None:
        self._num_waiters += 1

    def leave(self, *, abandoned: bool) -> None:
        """An encode that nobody waits for is ended, unless its last request went well: the next one may want it."""
        self._num_waiters -= 1
        if abandoned and not self._num_waiters:
            self.cancel()

    def cancel(self) -> None:
        self._is_cancelled = True
        if self.task is not None:
            self.task.cancel()


def _is_seen(outcome: asyncio.Future[Any]) -> None:
    """Fetches the exception: a failure that every waiter has left behind is no error of ours."""
    if not outcome.cancelled():
        outcome.exception()


class Encodes:
    """on_encoded   told of every image whose embedding is there, and of the replica that has it"""

    def __init__(
        self,
        pool: Pool[EncoderInfo],
        client: EncoderClient,
        on_encoded: Callable[[ImageRef, Replica[EncoderInfo]], None],
    ) -> None:
        self._pool = pool
        self._client = client
        self._on_encoded = on_encoded
        self._in_flight: dict[str, Encoding] = {}
        pool.on_silence(self._leave)

    def __len__(self) -> int:
        return len(self._in_flight)

    def running(self, key: str) -> Encoding | None:
        """The encode of this image that a request may join."""
        encoding = self._in_flight.get(key)
        return encoding if encoding is not None and encoding.can_be_joined else None

    def start(self, job: EncodeJob) -> Encoding:
        encoding = Encoding(job)
        encoding.task = asyncio.create_task(self._run(job, encoding))
        self._in_flight[job.key] = encoding

        def ended(_task: asyncio.Task[None]) -> None:
            if self._in_flight.get(job.key) is encoding:
                del self._in_flight[job.key]

        encoding.task.add_done_callback(ended)
        return encoding

    async def close(self) -> None:
        encodings = list(self._in_flight.values())
        for encoding in encodings:
            encoding.cancel()
        await asyncio.gather(*(encoding.task for encoding in encodings if encoding.task), return_exceptions=True)

    async def _run(self, job: EncodeJob, encoding: Encoding) -> None:
        """One encode to its end. A replica that takes nothing is passed over; one that breaks is replaced once."""

        def choose(tried: list[Replica[EncoderInfo]], _failure: DiptychError) -> Replica[EncoderInfo] | None:
            # Once admitted the image has been promised by that replica: its failure is told, not tried again.
            return None if encoding.admitted.done() else self._choose(job, tried)

        async def work(replica: Replica[EncoderInfo], _num_tries: int) -> None:
            async with encoding.at(replica):
                await self._run_on(replica, encoding)
            self._pool.note(replica, None)

        try:
            await on_a_replica(self._pool, choose, work, nobody=no_encoder())
        except DiptychError as error:
            encoding.fail(error)
        except BaseException:
            encoding.fail(UpstreamFailed("the encode was abandoned"))
            raise

    async def _run_on(self, replica: Replica[EncoderInfo], encoding: Encoding) -> None:
        job = encoding.job
        events = self._client.encode(
            replica.url,
            job.image,
            job.key,
            job.request_id,
            detail=job.detail,
            number=job.number,
            is_embedding=job.is_embedding,
        )
        async with aclosing(events):
            async for event in events:
                self._follow(event, replica, encoding)

    def _follow(self, event: Admitted | Encoded, replica: Replica[EncoderInfo], encoding: Encoding) -> None:
        if isinstance(event, Admitted):
            # Its own address, if it says one, is what engines can reach; ours is the next best.
            ref = event.image
            encoding.admit(ref if ref.encoder_url else ref.model_copy(update={"encoder_url": replica.url}))
        elif encoding.admitted.done():
            self._on_encoded(encoding.admitted.result(), replica)
            encoding.finish(event)

    def _leave(self, silent: Replica[EncoderInfo]) -> None:
        """Let others encode what a silent replica has, as far as there are others: it may come to itself.

        A picture is taken from its replica once: where all answer late, pictures would go round and none be encoded.
        """
        for encoding in self._in_flight.values():
            if encoding.replica is silent and not encoding.job.again and self._choose(encoding.job, [silent]):
                encoding.give_up_there()

    def _choose(self, job: EncodeJob, tried: list[Replica[EncoderInfo]]) -> Replica[EncoderInfo] | None:
        candidates = self._pool.available(tried, job.suits)
        if job.again:
            candidates = without_latest_failure(candidates)
        return by_rendezvous(candidates, bytes.fromhex(job.key))


def no_encoder() -> NotReady:
    return NotReady("no vision encoder is ready; requests without images are answered", retry_after_s=RETRY_AFTER_S)
