"""What can end a request early: its client leaves, or the gateway does.

Draining: not ready at once, no new requests, running ones go on; when time is up they are told so.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.types import Receive

from shared.errors import NotReady, RequestAborted
from shared.http_protocol import until_disconnected

T = TypeVar("T")
RETRY_AFTER_S = 1.0
CANCEL_AGAIN_S = 5.0  # what a request may take to clean up; then whatever it waits for has lost the cancellation


class Lifecycle:
    """Whether this gateway takes requests, and how many it is working on."""

    def __init__(self, *, drain_delay_s: float, drain_timeout_s: float) -> None:
        self._drain_delay_s = drain_delay_s
        self._drain_timeout_s = drain_timeout_s
        self._draining_since: float | None = None
        self._running: set[asyncio.Task[Any]] = set()
        self.is_cut_off = False
        self.num_in_flight = 0

    @property
    def is_draining(self) -> bool:
        return self._draining_since is not None

    def drain(self) -> None:
        """Begin to leave; asked again, leave at once."""
        if self._draining_since is None:
            self._draining_since = time.monotonic()
        else:
            self.cut_off()

    def may_exit(self) -> bool:
        """To be asked now and then while draining; also ends what has not ended in time."""
        if self._draining_since is None:
            return False
        waited_s = time.monotonic() - self._draining_since
        if waited_s > self._drain_timeout_s:
            self.cut_off()
        return self.is_cut_off or (self.num_in_flight == 0 and waited_s >= self._drain_delay_s)

    def cut_off(self) -> None:
        self.is_cut_off = True
        for task in self._running:
            task.cancel()

    async def attend(self, receive: Receive, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`, cancelled as soon as the client is gone (RequestAborted) or time is up (NotReady).

        The request's body must have been read: from then on all that `receive` can bring is the client's leaving.
        """
        task = asyncio.ensure_future(work)
        watcher = asyncio.ensure_future(until_disconnected(receive))
        self._running.add(task)
        try:
            await asyncio.wait((task, watcher), return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise RequestAborted("the client went away")
            if task.cancelled():
                raise NotReady("this gateway is shutting down", retry_after_s=RETRY_AFTER_S)
            return task.result()
        finally:
            self._running.discard(task)
            watcher.cancel()
            await _end(task)


async def _end(task: asyncio.Future[Any]) -> None:
    """Cancel it until it is over, whatever it ends with. Once is not always enough: see `shared.redis_link`."""
    while not task.done():
        task.cancel()
        await asyncio.wait((task,), timeout=CANCEL_AGAIN_S)
    if not task.cancelled():
        task.exception()  # seen: nobody waits for it
