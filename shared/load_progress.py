"""Says now and then how far the reading of a checkpoint has come: a large one takes minutes, and silence worries."""

from __future__ import annotations

import time
from collections.abc import Callable

from shared.log import get_logger

log = get_logger(__name__)
INTERVAL_S = 2.0


class LoadProgress:
    """Told of every tensor that is read.

    size_bytes   of the whole checkpoint. Reading a part of it is done sooner, so the time left is the most it can be
    """

    def __init__(self, size_bytes: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._size_bytes = size_bytes
        self._clock = clock
        self._started = self._last_said = clock()
        self._num_bytes = 0

    def read(self, num_bytes: int) -> None:
        self._num_bytes += num_bytes
        now = self._clock()
        if now - self._last_said < INTERVAL_S:
            return
        self._last_said = now
        left_s = (now - self._started) * max(0, self._size_bytes - self._num_bytes) / max(1, self._num_bytes)
        log.info(
            f"reading weights: {gigabytes(self._num_bytes)} of a checkpoint of {gigabytes(self._size_bytes)}, "
            f"at most {left_s:.0f} s left"
        )


def gigabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.1f} GB" if num_bytes >= 1e8 else f"{num_bytes / 1e6:.0f} MB"
