"""How long a newcomer would wait in the queue, told from how fast the queue has been served.

An estimate exists only while there is a queue, and once it has been served for a while: a burst that meets an idle
engine is always taken, and only lasting overload is seen as such. What costs of steps and lengths of prompts could say
before that is a lower bound, for nobody knows how long answers will be; and of k times what the engine can do, a second
leaves no more than k seconds of work.
"""

from __future__ import annotations

import math
from typing import Final

SHORTEST_EVIDENCE_S: Final = 1.0
MEMORY_S: Final = 10.0  # of steps with a queue; older ones count less and less


class QueueWait:
    def __init__(self) -> None:
        self._busy_s = 0.0
        self._num_started = 0.0
        self._age_s = 0.0

    def note_step(self, seconds: float, num_started: int, num_queued: int) -> None:
        """A step took `seconds`, `num_started` requests began in it, and `num_queued` wait for room after it."""
        if num_queued == 0:
            self._busy_s = self._num_started = self._age_s = 0.0
            return
        kept = math.exp(-seconds / MEMORY_S)
        self._busy_s = self._busy_s * kept + seconds
        self._num_started = self._num_started * kept + num_started
        self._age_s += seconds

    def seconds(self, num_ahead: int) -> float:
        """Expected wait behind `num_ahead` others; 0 while too little is known."""
        if self._age_s < SHORTEST_EVIDENCE_S or num_ahead == 0:
            return 0.0
        if not self._num_started:  # all places may have been taken before there was a queue: it has waited so long
            return self._age_s
        return num_ahead * self._busy_s / (self._num_started + 1)
