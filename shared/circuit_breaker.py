"""A circuit breaker: after a few failures in a row a dependency is left alone until a probe finds it alive.

Probes run in the background, so no request pays for finding out; warnings are one per interval, not per request.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

from shared.log import get_logger, redact

log = get_logger(__name__)


class CircuitBreaker:
    """Closed: operations run. Open: the owner skips them, while `probe` is tried every `probe_interval_s`.

    probe   raises if the dependency is still out of order; must bound its own time
    """

    def __init__(
        self,
        probe: Callable[[], Awaitable[None]],
        *,
        subject: str,
        failures_to_open: int,
        probe_interval_s: float,
        warn_interval_s: float,
    ) -> None:
        self._probe = probe
        self._subject = subject
        self._failures_to_open = failures_to_open
        self._probe_interval_s = probe_interval_s
        self._warn_interval_s = warn_interval_s
        self._num_failures = 0
        self._prober: asyncio.Task[None] | None = None
        self._last_warning_at = float("-inf")

    @property
    def is_open(self) -> bool:
        return self._prober is not None

    def record_success(self) -> None:
        self._num_failures = 0

    def record_failure(self, error: BaseException) -> None:
        self._num_failures += 1
        self.warn(error)
        if self._num_failures >= self._failures_to_open and not self.is_open:
            self._prober = asyncio.create_task(self._probe_until_alive())

    def warn(self, error: BaseException) -> None:
        now = time.monotonic()
        if now - self._last_warning_at >= self._warn_interval_s:
            self._last_warning_at = now
            reason = redact(str(error)) or type(error).__name__
            log.warning(f"{self._subject} is out of order; going on without it", reason=reason)

    def close(self) -> None:
        """Stop probing, for good."""
        if self._prober is not None:
            self._prober.cancel()

    async def _probe_until_alive(self) -> None:
        while True:
            await asyncio.sleep(self._probe_interval_s)
            try:
                await self._probe()
            except Exception as error:  # noqa: BLE001 - whatever it is, the dependency is not usable yet
                self.warn(error)
            else:
                break
        self._num_failures = 0
        self._prober = None
        log.info(f"{self._subject} is back")
