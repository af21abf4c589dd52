"""Encodes under way: equal images share one, a replica that gives out is replaced by another.

Knows encoders; what is remembered about images, and which requests wait for them, is others' business.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from services.gateway.backends import EncoderClient
from services.gateway.balancer import (
    Pool,
    Replica,
    by_rendezvous,
    is_replica_fault,
    is_worth_another_replica,
    without_latest_failure,
)
from shared.errors import DiptychError, NotReady, UpstreamFailed
from shared.wire import Admitted, Encoded, EncoderInfo, ImageRef

RETRY_AFTER_S = 2.0
MAX_FAULTS = 1  # replicas that may break over one image before another is not worth the risk


@dataclass(frozen=True, slots=True)
class EncodeJob:
    """An image to encode, by encoders of one fingerprint.

    again   it was encoded before and the result is lost: not by the replica that failed last, if there is another
    """

    key: str
    image: bytes
    fingerprint: str
    request_id: str
    again: bool


class Encoding:
    """One encode call in flight, shared by every request that wants this image now."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.admitted: asyncio.Future[ImageRef] = loop.create_future()
        self.encoded: asyncio.Future[Encoded] = loop.create_future()
        self.task: asyncio.Task[None] | None = None
        self._num_waiters = 0
        self._is_cancelled = False
        for outcome in (self.admitted, self.encoded):
            outcome.add_done_callback(_is_seen)

    @property
    def has_failed(self) -> bool:
        return self.encoded.done() and self.encoded.exception() is not None

    @property
    def can_be_joined(self) -> bool:
        return not self._is_cancelled and not self.has_failed

    def admit(self, ref: ImageRef) -> None:
        if not self.admitted.done():
            self.admitted.set_result(ref)

    def finish(self, encoded: Encoded) -> None:
        if not self.encoded.done():
            self.encoded.set_result(encoded)

    def fail(self, error: DiptychError) -> None:
        for outcome in (self.admitted, self.encoded):
            if not outcome.done():
                outcome.set_exception(error)

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
    """on_encoded   told of every image whose embedding is there"""

    def __init__(self, pool: Pool[EncoderInfo], client: EncoderClient, on_encoded: Callable[[ImageRef], None]) -> None:
        self._pool = pool
        self._client = client
        self._on_encoded = on_encoded
        self._in_flight: dict[str, Encoding] = {}

    def __len__(self) -> int:
        return len(self._in_flight)

    def running(self, key: str) -> Encoding | None:
        """The encode of this image that a request may join."""
        encoding = self._in_flight.get(key)
        return encoding if encoding is not None and encoding.can_be_joined else None

    def start(self, job: EncodeJob) -> Encoding:
        encoding = Encoding()
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
        try:
            await self._run_somewhere(job, encoding)
        except DiptychError as error:
            encoding.fail(error)
        except BaseException:
            encoding.fail(UpstreamFailed("the encode was abandoned"))
            raise

    async def _run_somewhere(self, job: EncodeJob, encoding: Encoding) -> None:
        tried: list[Replica[EncoderInfo]] = []
        num_faults = 0
        failure: DiptychError = no_encoder()
        while (replica := self._choose(job, avoid=tried)) is not None:
            try:
                return await self._run_on(replica, job, encoding)
            except DiptychError as error:
                num_faults += is_replica_fault(error)
                if encoding.admitted.done() or not is_worth_another_replica(error) or num_faults > MAX_FAULTS:
                    raise
                failure = error
                tried.append(replica)
        raise failure

    async def _run_on(self, replica: Replica[EncoderInfo], job: EncodeJob, encoding: Encoding) -> None:
        try:
            events = self._client.encode(replica.url, job.image, job.key, job.request_id)
            with replica.lease():
                async with aclosing(events):
                    async for event in events:
                        self._follow(event, replica.url, encoding)
        except DiptychError as error:
            self._pool.note(replica, error)
            raise
        self._pool.note(replica, None)

    def _follow(self, event: Admitted | Encoded, url: str, encoding: Encoding) -> None:
        if isinstance(event, Admitted):
            # Its own address, if it says one, is what engines can reach; ours is the next best.
            ref = event.image
            encoding.admit(ref if ref.encoder_url else ref.model_copy(update={"encoder_url": url}))
        elif encoding.admitted.done():
            self._on_encoded(encoding.admitted.result())
            encoding.finish(event)

    def _choose(self, job: EncodeJob, avoid: list[Replica[EncoderInfo]]) -> Replica[EncoderInfo] | None:
        candidates = self._pool.available(avoid, lambda info: info.fingerprint == job.fingerprint)
        if job.again:
            candidates = without_latest_failure(candidates)
        return by_rendezvous(candidates, bytes.fromhex(job.key))


def no_encoder() -> NotReady:
    return NotReady("no vision encoder is ready; requests without images are answered", retry_after_s=RETRY_AFTER_S)
