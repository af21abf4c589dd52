"""Flight: one image on its way to an embedding, for all who want it; called off when the last of them leaves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from shared.errors import DiptychError, NotReady, UpstreamTimeout
from shared.wire.encoder import Encoded, EncodeEvent
from shared.wire.images import ImageMetadata


@dataclass(frozen=True, slots=True)
class EventStream:
    """What one caller is told about its image.

    close   call it when the caller has left or has read all, whether or not `events` was ever begun: a generator that
            was not has no `finally` to run, and the image would be encoded for nobody
    """

    events: AsyncIterator[EncodeEvent]
    close: Callable[[], None] = lambda: None


class Flight:
    """Start it with `take_off`; then any number of followers wait for the blob, or for the whole story.

    blob   done as soon as the embedding exists, which is before it has been stored
    """

    def __init__(self, metadata: ImageMetadata) -> None:
        self.metadata = metadata
        self.blob: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._num_followers = 0
        self._reason: DiptychError = NotReady("this vision encoder is shutting down", retry_after_s=1.0)
        self._task: asyncio.Task[Encoded]
        self._on_end: Callable[[], None] | None = None

    def take_off(self, work: Coroutine[Any, Any, Encoded], on_end: Callable[[], None]) -> None:
        """on_end   called once, when the work has ended or is called off: nobody new may join from then on"""
        self._on_end = on_end
        self._task = asyncio.create_task(work)
        self._task.add_done_callback(self._ended)

    async def encoded(self, deadline_s: float) -> Encoded:
        """Raises what the work raised, or UpstreamTimeout."""
        await self._wait({self._task}, deadline_s)
        return self._outcome()

    async def embedding(self, deadline_s: float) -> bytes:
        """Raises what the work raised, or UpstreamTimeout."""
        await self._wait({self._task, self.blob}, deadline_s)
        if not self.blob.done():
            self._outcome()  # it ended without an embedding: this raises the reason
        return self.blob.result()

    async def called_off(self, reason: DiptychError | None = None) -> None:
        """End the work, whoever waits for it. They get the reason; None: the service is shutting down."""
        self._reason = reason or self._reason
        self._task.cancel()
        await asyncio.wait({self._task})

    @contextmanager
    def followed(self) -> Iterator[None]:
        """While entered somebody wants it, waiting at this very moment or not."""
        self._num_followers += 1
        try:
            yield
        finally:
            self._num_followers -= 1
            if self._num_followers == 0 and not self.blob.done() and not self._task.done():
                self._end()
                self._task.cancel()

    async def _wait(self, awaited: set[asyncio.Future[Any]], deadline_s: float) -> None:
        with self.followed():
            done, _ = await asyncio.wait(awaited, timeout=deadline_s, return_when=asyncio.FIRST_COMPLETED)
        if not done:
            raise UpstreamTimeout(f"the image was not encoded within the {deadline_s:g} s that its caller waits")

    def _outcome(self) -> Encoded:
        if self._task.cancelled():  # while someone waits only `called_off` does that
            raise self._reason
        return self._task.result()

    def _ended(self, task: asyncio.Task[Encoded]) -> None:
        self._end()
        if not task.cancelled():
            task.exception()  # its followers may all be gone; an error nobody waits for is no news

    def _end(self) -> None:
        if self._on_end is not None:
            on_end, self._on_end = self._on_end, None
            on_end()
