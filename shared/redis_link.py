"""RedisLink: the one way to Redis. Bounded in time, skipped while Redis is out of order, never an exception.

Knows nothing of keys and values; what an outage means is up to the caller, who names the default.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final, TypeVar

from pydantic import SecretStr
from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.connection import SSLConnection, parse_url
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError, ResponseError

from shared.circuit_breaker import CircuitBreaker
from shared.tls import Tls

T = TypeVar("T")
MAX_CONNECTIONS: Final = 16


class RedisLink:
    """Create it on the event loop that uses it.

    url             None: no Redis, every operation has its default as the result
    op_timeout_s    the most that one operation may take
    subject         what is out of order when Redis is, for the log
    tls             for rediss:// whose URL names no files of its own
    """

    def __init__(
        self,
        url: str | SecretStr | None,
        *,
        op_timeout_s: float,
        subject: str,
        tls: Tls | None = None,
        failures_to_open: int = 3,
        probe_interval_s: float = 2.0,
        warn_interval_s: float = 30.0,
    ) -> None:
        self.num_errors = 0
        self._op_timeout_s = op_timeout_s
        self._redis = None if url is None else _connect(url, op_timeout_s, tls)
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
            with _keeping_cancellation():
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


@contextmanager
def _keeping_cancellation() -> Iterator[None]:
    """Raises a cancellation that the body has lost. Before Python 3.12 `asyncio.wait_for`, by which redis-py writes,
    loses one that comes together with its result, and the task would go on as if nobody had left."""
    task = asyncio.current_task()
    assert task is not None
    num_cancels = task.cancelling()
    yield
    if task.cancelling() > num_cancels:
        raise asyncio.CancelledError


class _TlsConnection(SSLConnection):
    """Connects with a context of ours: the client's own would read renewed certificates never."""

    def __init__(self, *, tls_context: ssl.SSLContext, **options: Any) -> None:
        super().__init__(**options)
        self.ssl_context.context = tls_context


def _connect(url: str | SecretStr, op_timeout_s: float, tls: Tls | None) -> Redis:
    plain = url.get_secret_value() if isinstance(url, SecretStr) else url
    options: dict[str, Any] = dict(parse_url(plain))
    if options.get("connection_class") is SSLConnection and not any(name.startswith("ssl_") for name in options):
        options |= {"connection_class": _TlsConnection, "tls_context": (tls or Tls("services")).redis_context()}
    pool = BlockingConnectionPool(
        **options,
        max_connections=MAX_CONNECTIONS,
        timeout=op_timeout_s,
        socket_timeout=op_timeout_s,
        socket_connect_timeout=op_timeout_s,
        # The client's own retries would multiply the operation timeout.
        retry=Retry(NoBackoff(), 0),
        protocol=2,
    )
    return Redis.from_pool(pool)
