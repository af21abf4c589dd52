"""Who may still join a scheduler's queue: it is bounded in number and, where that is wanted, in time.

An answer that comes too late costs as much as one in time, and makes all behind it late.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from typing import Final, NamedTuple

from services.text_engine.core.queue_wait import QueueWait
from services.text_engine.core.scheduler import Scheduler
from shared.errors import InvalidRequest, Overloaded

RETRY_FULL_S: Final = 2.0  # to come back after, where only the number is too high
DRAINED_SHARE: Final = 0.1  # of a full queue, before more are asked for


class Verdict(NamedTuple):
    """What a newcomer is told.

    opens_in_s   when it should try, if nobody else came: 0 is now
    reason       why not now; "" where it may join
    """

    opens_in_s: float
    reason: str = ""


class Newcomers:
    """Counts the sequences that were let in and are not in the scheduler's queue yet; from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num = 0

    @property
    def num(self) -> int:
        return self._num

    def enter(self, num_choices: int) -> Callable[[], None]:
        """Count so many more until the returned function is called; calling it again changes nothing."""
        with self._lock:
            self._num += num_choices
        remaining = [num_choices]

        def leave() -> None:
            with self._lock:
                self._num -= remaining[0]
                remaining[0] = 0

        return leave


class QueueLimit:
    """Reads the scheduler's queue; all but `note_step` may be called from any thread, and costs little.

    max_waiting_requests   more waiting sequences than this are refused; a request with more choices than this, for good
    max_queue_wait_s       so is a request that would wait longer than this for its first step
    """

    def __init__(
        self, scheduler: Scheduler, *, max_waiting_requests: int = 1024, max_queue_wait_s: float = math.inf
    ) -> None:
        self.max_waiting_requests = max_waiting_requests
        self.max_queue_wait_s = max_queue_wait_s
        self._scheduler = scheduler
        self._estimate = QueueWait()
        self._num_starts = 0

    def note_step(self, seconds: float) -> None:
        """The scheduler's last step took so long."""
        num_started = self._scheduler.num_starts - self._num_starts
        self._num_starts = self._scheduler.num_starts
        num_queued = sum(sequence.awaited_image is None for sequence in self._scheduler.waiting)
        self._estimate.note_step(seconds, num_started, num_queued)

    def wait_s(self, priority: int, num_newcomers: int = 0) -> float:
        """Expected wait of another newcomer; 0 while too little is known.

        num_newcomers   sequences that have been let in and will be queued before it
        """
        return self._estimate.seconds(self._scheduler.num_ahead(priority) + num_newcomers)

    def opens_in_s(self, priority: int, num_choices: int = 1, num_newcomers: int = 0) -> float:
        """When a newcomer should try, if nobody else came: 0 is now, where `check` lets it in."""
        return self.verdict(priority, num_choices, num_newcomers).opens_in_s

    def check(self, priority: int, num_choices: int = 1, num_newcomers: int = 0) -> None:
        """Raises Overloaded while a newcomer may not join, InvalidRequest if it never may."""
        if num_choices > self.max_waiting_requests:
            raise InvalidRequest(
                f"n is {num_choices}; this server queues at most {self.max_waiting_requests} choices, so ask for fewer "
                "in each request",
                param="n",
            )
        verdict = self.verdict(priority, num_choices, num_newcomers)
        if verdict.reason:
            raise Overloaded(verdict.reason, retry_after_s=verdict.opens_in_s)

    def verdict(self, priority: int, num_choices: int = 1, num_newcomers: int = 0) -> Verdict:
        """On a newcomer of so many sequences. A full queue has to drain a little first, or there would be a refusal for
        every place that becomes free."""
        num_waiting = len(self._scheduler.waiting) + num_newcomers
        if num_waiting + num_choices > self.max_waiting_requests:
            return Verdict(
                RETRY_FULL_S, f"{num_waiting} requests are waiting; this server queues {self.max_waiting_requests}"
            )
        num_ahead = self._scheduler.num_ahead(priority) + num_newcomers
        wait_s = self._estimate.seconds(num_ahead)
        if wait_s <= self.max_queue_wait_s:
            return Verdict(0.0)
        return Verdict(
            wait_s - self.max_queue_wait_s + DRAINED_SHARE * self.max_queue_wait_s,
            f"{num_ahead} requests are ahead, about {wait_s:.0f} s; this server lets nobody wait longer than "
            f"{self.max_queue_wait_s:g} s",
        )
