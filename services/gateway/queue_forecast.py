"""When a replica will queue another request, as it said itself with its last answer.

An engine knows its queue; a gateway only repeats what it has heard, so that what would be refused is not sent.
"""

from __future__ import annotations

import math
from typing import Final

# A queue can empty sooner than its engine foresaw: every so often a request has to try.
LONGEST_BELIEF_S: Final = 1.0


class QueueForecast:
    """What one replica said of its queue. Times are those of whatever clock `now` is read from."""

    def __init__(self) -> None:
        self._priority = 0  # it is full for this one and those that come after it
        self._opens_at = -math.inf
        self._believed_until = -math.inf

    def told(self, priority: int, opens_in_s: float, now: float) -> None:
        """The replica would let a request of this priority in after so many seconds; 0: at once.

        How long the less urgent have to wait says nothing to those for whom it was full already.
        """
        if opens_in_s > 0 and self.is_full(now) and priority > self._priority:
            return
        if opens_in_s > 0:
            self._priority = min(priority, self._priority) if self.is_full(now) else priority
            self._opens_at = now + opens_in_s
            self._believed_until = now + min(opens_in_s, LONGEST_BELIEF_S)
        elif priority >= self._priority:
            self._opens_at = self._believed_until = now

    def is_full(self, now: float) -> bool:
        """For requests of some priority."""
        return now < self._believed_until

    def opens_in_s(self, priority: int, now: float) -> float:
        """0: a request of this priority may be sent."""
        is_open = priority < self._priority or not self.is_full(now)
        return 0.0 if is_open else self._opens_at - now
