"""RedisLink: the one way to Redis. Bounded in time, skipped while Redis is out of order, never an exception.

Knows nothing of keys and values; what an outage means is up to whoever names the default.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError, ResponseError

from shared.circuit_breaker import CircuitBreaker

T = TypeVar("T")
MAX_CONNECTIONS: Final = 16


class RedisLink:
    """Create it on the event loop that uses it.

    url             None: no Redis, every operation has its default as the result
    op_timeout_s    the most that one operation may take
    subject         what is out of order when Redis is, for the log
    """

    def __init__(
        self,
        url: str | None,
        *,
        op_timeout_s: float,
        subject: str,
        failures_to_open: int = 3,
        probe_interval_s: float = 2.0,
        warn_interval_s: float = 30.0,
    ) -> None:
        self.num_errors = 0
        self._op_timeout_s = op_timeout_s
        self._redis = None if url is None else _connect(url, op_timeout_s)
        self._breaker = CircuitBreaker(
            self._ping,
            failures_to_open=failures_to_open,
            probe_interval_s=probe_interval_s,
            warn_interval_s=warn_interval_s,
            subject=subject,
        )

    @property
    def enabled(self) -> bool:
        return self._redis is not None

    @property
    def breaker_open(self) -> bool:
        """True while operations are answered without asking Redis, because it was found dead or paused."""
        return self._breaker.is_open

    async def close(self) -> None:
        self._breaker.close()
        if self._redis is not None:
            await self._redis.aclose()

    async def attempt(self, operation: Callable[[Redis], Awaitable[T]], *, default: T) -> T:
        """The operation's result; `default` if there is no Redis, or if it fails or takes too long."""
        if self._redis is None or self._breaker.is_open:
            return default
        try:
            async with asyncio.timeout(self._op_timeout_s):
                result = await operation(self._redis)
        except ResponseError as error:
            # Alive but unwilling (full, read-only, wrong type): no reason to stop asking.
            self.num_errors += 1
            self._breaker.warn(error)
            return default
        except (RedisError, OSError, TimeoutError) as error:
            self.num_errors += 1
            self._breaker.record_failure(error)
            return default
        self._breaker.record_success()
        return result

    async def _ping(self) -> None:
        assert self._redis is not None
        async with asyncio.timeout(self._op_timeout_s):
            await self._redis.ping()


def _connect(url: str, op_timeout_s: float) -> Redis:
    pool = BlockingConnectionPool.from_url(
        url,
        max_connections=MAX_CONNECTIONS,
        timeout=op_timeout_s,
        socket_timeout=op_timeout_s,
        socket_connect_timeout=op_timeout_s,
        # The client's own retries would multiply the operation timeout.
        retry=Retry(NoBackoff(), 0),
        protocol=2,
    )
    return Redis.from_pool(pool)
