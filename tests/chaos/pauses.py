"""Notices when this process did not run for a while: stopped by a signal, or on a machine that slept.

Nothing that was under way then can be judged by its clock. Whoever stops the services stops this process too, so that
both see the same pause.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

TICK_S: Final = 0.5
LEAST_PAUSE_S: Final = 5.0  # of a starved machine a few seconds are no surprise
RECOVERY_S: Final = 20.0  # afterwards every time limit is over at once, and probes find replicas again


class Pauses:
    """Pauses seen while `watching`, as [began, ended] by time.monotonic()."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.spans: list[tuple[float, float]] = []
        self._clock = clock
        self._lock = threading.Lock()
        self._last = clock()

    def tick(self) -> None:
        """To be called often; a long time since the last call is a pause."""
        with self._lock:
            now = self._clock()
            if now - self._last >= LEAST_PAUSE_S:
                self.spans.append((self._last, now))
            self._last = now

    def touch(self, began: float, ended: float) -> bool:
        """Something between these times ran into a pause, or into the recovery from one."""
        self.tick()
        return any(began <= until + RECOVERY_S and since <= ended for since, until in self.spans)

    def awake_s(self, began: float, ended: float) -> float:
        """The time between, without what was paused."""
        self.tick()
        paused = (min(until, ended) - max(since, began) for since, until in self.spans)
        return ended - began - sum(seconds for seconds in paused if seconds > 0)

    @contextmanager
    def watching(self) -> Iterator[None]:
        stop = threading.Event()

        def watch() -> None:
            while not stop.wait(TICK_S):
                self.tick()

        thread = threading.Thread(target=watch, name="pauses")
        self.tick()
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()
