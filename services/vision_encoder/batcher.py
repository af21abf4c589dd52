"""Batcher: single items from many requests to full batches for one thread.

Never waits for company: an idle thread takes what is there at once, and while it works the next batch gathers. So a
lone request is not delayed and a crowd is served in full batches, with nothing to tune. Whoever has several items there
gets them in the order in which it wants them, at nobody else's cost.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

from shared.log import get_logger

log = get_logger(__name__)
NUM_PAST_RUNS = 64
Item = TypeVar("Item")
Result = TypeVar("Result")


class Place(NamedTuple):
    """Which of its owner's items this one is: owners want theirs in ascending order of the number."""

    owner: str = ""
    number: int = 0


ANY_PLACE = Place()


@dataclass(slots=True)
class _Job(Generic[Item, Result]):
    item: Item
    shape: Hashable
    place: Place
    done: asyncio.Future[BatchedResult[Result]]
    submitted_at: float = field(default_factory=time.monotonic)


@dataclass(frozen=True, slots=True)
class BatchedResult(Generic[Result]):
    """One item's result, with seconds waited for the thread and seconds the whole batch took."""

    value: Result
    queue_s: float
    run_s: float
    batch_size: int


class PastRun(NamedTuple):
    """A batch that went through the thread."""

    number: int
    num_items: int
    seconds: float


class Batcher(Generic[Item, Result]):
    """Hands batches to one thread, one at a time.

    run     a batch of equal shape -> one result per item, in order
    thread  an executor of one thread, which `close` shuts down
    """

    def __init__(
        self,
        run: Callable[[Sequence[Item]], list[Result]],
        *,
        max_batch_size: int,
        thread: ThreadPoolExecutor | None = None,
    ) -> None:
        self._run = run
        self._max_batch_size = max_batch_size
        self._thread = thread or ThreadPoolExecutor(1, thread_name_prefix="tower")
        self._waiting: list[_Job[Item, Result]] = []
        self._arrived = asyncio.Event()
        self._busy_since: float | None = None
        self.past_runs: deque[PastRun] = deque(maxlen=NUM_PAST_RUNS)
        self.total_s = 0.0  # that the thread has worked
        self._loop = asyncio.create_task(self._serve())

    @property
    def num_waiting(self) -> int:
        return sum(not job.done.done() for job in self._waiting)

    @property
    def busy_s(self) -> float:
        """Seconds since the running batch began; 0 while idle."""
        return 0.0 if self._busy_since is None else time.monotonic() - self._busy_since

    async def submit(self, item: Item, shape: Hashable, place: Place = ANY_PLACE) -> BatchedResult[Result]:
        """Only items of equal `shape` share a batch. A cancelled caller's item is dropped if it still waits."""
        job: _Job[Item, Result] = _Job(item, shape, place, asyncio.get_running_loop().create_future())
        self._waiting.append(job)
        self._put_in_order(place.owner, shape)
        self._arrived.set()
        return await job.done

    def _put_in_order(self, owner: str, shape: Hashable) -> None:
        """Let the owner's waiting items of one shape change places among themselves: all batches are as large and of
        the shapes that they would be, and nobody else's item comes later."""
        waiting = self._waiting
        turns = [turn for turn, job in enumerate(waiting) if (job.place.owner, job.shape) == (owner, shape)]
        in_order = sorted((waiting[turn] for turn in turns), key=lambda job: job.place.number)
        for turn, job in zip(turns, in_order, strict=True):
            waiting[turn] = job

    async def close(self) -> None:
        self._loop.cancel()
        await asyncio.gather(self._loop, return_exceptions=True)
        for job in self._waiting:
            job.done.cancel()
        # A pass that is running cannot be interrupted; the process does not wait for it.
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _serve(self) -> None:
        while True:
            await self._arrived.wait()
            batch = self._next_batch()
            if batch:
                await self._run_batch(batch)
            else:
                self._arrived.clear()

    def _next_batch(self) -> list[_Job[Item, Result]]:
        """The first job and those that fit it, in their order; whoever went away is dropped."""
        alive = [job for job in self._waiting if not job.done.done()]
        batch = [job for job in alive if job.shape == alive[0].shape][: self._max_batch_size]
        chosen = set(map(id, batch))
        self._waiting = [job for job in alive if id(job) not in chosen]
        return batch

    async def _run_batch(self, batch: list[_Job[Item, Result]]) -> None:
        try:
            await self._run_in_thread(batch)
        except asyncio.CancelledError:
            for job in batch:
                job.done.cancel()
            raise
        except Exception as error:  # noqa: BLE001 - whatever it was, it belongs to the item that caused it
            if len(batch) > 1:  # one bad item must not fail its neighbours: find out which it is
                log.warning("a batch failed; running its items one by one", batch_size=len(batch), reason=repr(error))
                for job in batch:
                    await self._run_batch([job])
            elif not batch[0].done.done():
                batch[0].done.set_exception(error)

    async def _run_in_thread(self, batch: list[_Job[Item, Result]]) -> None:
        started = self._busy_since = time.monotonic()
        try:
            loop = asyncio.get_running_loop()
            values = await loop.run_in_executor(self._thread, self._run, [job.item for job in batch])
        finally:
            self._busy_since = None
        run_s = time.monotonic() - started
        self.total_s += run_s
        number = self.past_runs[-1].number + 1 if self.past_runs else 1
        self.past_runs.append(PastRun(number, len(batch), run_s))
        for job, value in zip(batch, values, strict=True):
            if not job.done.done():
                job.done.set_result(BatchedResult(value, started - job.submitted_at, run_s, len(batch)))
