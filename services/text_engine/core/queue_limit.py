"""Who may still join a scheduler's queue: it is bounded in number and, where that is wanted, in time.

An answer that comes too late costs as much as one in time, and makes everybody behind it late, too.
"""

from __future__ import annotations

import math
from typing import Final

from services.text_engine.core.queue_wait import QueueWait
from services.text_engine.core.scheduler import Scheduler
from shared.errors import Overloaded

RETRY_FULL_S: Final = 2.0  # to come back after, where only the number is too high
DRAINED_SHARE: Final = 0.1  # of a full queue, before more are asked for


class QueueLimit:
    """Reads the scheduler's queue; all but `note_step` may be called from any thread, and costs little.

    max_waiting_requests   more waiting sequences than this are refused
    max_queue_wait_s       so is whoever would wait longer than this for the first step
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

    def wait_s(self, priority: int, num_preparing: int = 0) -> float:
        """Expected wait of a newcomer; 0 while too little is known.

        num_preparing   requests that have been let in and will be queued before it
        """
        return self._estimate.seconds(self._num_ahead(priority, num_preparing))

    def room_in_s(self, priority: int, num_preparing: int = 0) -> float:
        """When a newcomer should try, if nobody else came: 0 is now. A full queue has to drain a little first, or there
        would be a refusal for every place that becomes free."""
        if len(self._scheduler.waiting) + num_preparing >= self.max_waiting_requests:
            return RETRY_FULL_S
        excess_s = self.wait_s(priority, num_preparing) - self.max_queue_wait_s
        return excess_s + DRAINED_SHARE * self.max_queue_wait_s if excess_s > 0 else 0.0

    def check(self, priority: int, num_choices: int = 1, num_preparing: int = 0) -> None:
        """Raises Overloaded where there is no room for a newcomer."""
        num_waiting = len(self._scheduler.waiting) + num_preparing
        if num_waiting + num_choices > self.max_waiting_requests:
            raise Overloaded(
                f"{num_waiting} requests are waiting; this server queues {self.max_waiting_requests}",
                retry_after_s=RETRY_FULL_S,
            )
        room_in_s = self.room_in_s(priority, num_preparing)
        if room_in_s > 0:
            num_ahead = self._num_ahead(priority, num_preparing)
            raise Overloaded(
                f"{num_ahead} requests are ahead, about {self._estimate.seconds(num_ahead):.0f} s; this server lets "
                f"nobody wait longer than {self.max_queue_wait_s:g} s",
                retry_after_s=max(1.0, room_in_s),
            )

    def _num_ahead(self, priority: int, num_preparing: int) -> int:
        """Whoever waits for a picture is overtaken."""
        waiting = self._scheduler.waiting
        return num_preparing + sum(s.awaited_image is None and s.priority <= priority for s in waiting)
