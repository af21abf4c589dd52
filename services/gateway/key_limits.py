"""KeyLimits: how many requests one API key may begin per minute, and have running at a time."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from shared.errors import RateLimited

MINUTE_S = 60.0
CONCURRENCY_RETRY_S = 1.0


@dataclass(slots=True)
class _Account:
    """tokens: requests that may begin now (a bucket that fills evenly over a minute); num_running: those that run"""

    tokens: float
    filled_at: float
    num_running: int = 0


class KeyLimits:
    """Accounts are by the key's name; there are as many as keys, and one for those who need none.

    max_per_minute, max_running   None: no limit
    """

    def __init__(
        self, *, max_per_minute: int | None, max_running: int | None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._max_per_minute = max_per_minute
        self._max_running = max_running
        self._clock = clock
        self._accounts: dict[str, _Account] = {}

    def enter(self, name: str) -> None:
        """Count a request that begins; `leave` must follow. Raises RateLimited, and counts nothing, if it may not."""
        account = self._filled(name)
        if self._max_running is not None and account.num_running >= self._max_running:
            raise RateLimited(
                f"{account.num_running} requests of this API key are running; at most {self._max_running} at a time",
                retry_after_s=CONCURRENCY_RETRY_S,
            )
        if self._max_per_minute is not None:
            if account.tokens < 1:
                wait_s = (1 - account.tokens) * MINUTE_S / self._max_per_minute
                raise RateLimited(
                    f"this API key may begin {self._max_per_minute} requests per minute; try again in "
                    f"{math.ceil(wait_s)} s",
                    retry_after_s=wait_s,
                )
            account.tokens -= 1
        account.num_running += 1

    def headers(self, name: str) -> dict[str, str]:
        """What is left of a limit of requests, in OpenAI's headers; `reset` is when all of it is there again."""
        if self._max_per_minute is None:
            return {}
        account = self._filled(name)
        reset_s = (self._max_per_minute - account.tokens) * MINUTE_S / self._max_per_minute
        return {
            "x-ratelimit-limit-requests": str(self._max_per_minute),
            "x-ratelimit-remaining-requests": str(int(account.tokens)),
            "x-ratelimit-reset-requests": _duration(reset_s),
        }

    def leave(self, name: str) -> None:
        """A request that entered is over, however it ended."""
        self._accounts[name].num_running -= 1

    def _filled(self, name: str) -> _Account:
        now = self._clock()
        full = float(self._max_per_minute or 0)
        account = self._accounts.setdefault(name, _Account(full, now))
        account.tokens = min(full, account.tokens + (now - account.filled_at) * full / MINUTE_S)
        account.filled_at = now
        return account


def _duration(seconds: float) -> str:
    """As OpenAI writes it: 120ms, 59s, 1m0s; never less than it is."""
    if seconds < 1:
        return f"{math.ceil(seconds * 1000)}ms"
    minutes, rest = divmod(math.ceil(seconds), 60)
    return f"{minutes}m{rest}s" if minutes else f"{rest}s"
