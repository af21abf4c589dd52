"""The KV cache from outside: its numbers, its reset, and the engine's sleep, in which its memory is given back.

Asleep the engine is not ready, so that gateways send requests elsewhere; weights and everything else stay loaded.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Literal

from services.text_engine.core.host_blocks import HostBlocks
from services.text_engine.engine import Engine
from services.text_engine.engine_thread import EngineThread, in_engine
from shared.errors import Overloaded
from shared.log import get_logger
from shared.wire.engine_admin import CacheState

log = get_logger(__name__)
EndRequests = Callable[[], Awaitable[None]]


class CacheControl:
    """state   changes on the event loop; looked at before a request is admitted"""

    def __init__(self, thread: EngineThread) -> None:
        self.state: Literal["awake", "falling asleep", "asleep"] = "awake"
        self._thread = thread
        self._turn = asyncio.Lock()

    async def numbers(self) -> CacheState:
        return await in_engine(self._thread, self._numbers)

    async def reset(self) -> None:
        """Later requests find nothing of what has been computed until now."""
        await in_engine(self._thread, Engine.reset_cache)
        log.info("the prefix cache was reset")

    async def sleep(self, end_requests: EndRequests, timeout_s: float) -> None:
        """Give the KV cache's memory back as soon as no request needs it; nothing happens if it is asleep already.

        end_requests   returns when the last running request has ended; no new one is admitted meanwhile
        Raises Overloaded, and stays awake, if that takes longer than `timeout_s`.
        """
        async with self._turn:
            if self.state == "asleep":
                return
            self.state = "falling asleep"
            try:
                async with asyncio.timeout(timeout_s):
                    await end_requests()
                await in_engine(self._thread, Engine.sleep)
            except TimeoutError:
                raise Overloaded(
                    f"answers are still being written after {timeout_s:g} s, so the engine stays awake; "
                    "wait longer, or use the mode 'abort'"
                ) from None
            else:
                self.state = "asleep"
                log.info("asleep: the KV cache's memory is given back")
            finally:
                if self.state == "falling asleep":
                    self.state = "awake"

    async def wake(self) -> None:
        """Be ready again, with an empty cache; nothing happens if the engine is awake."""
        async with self._turn:
            if self.state == "asleep":
                await in_engine(self._thread, Engine.wake)
                self.state = "awake"
                log.info("awake again")

    def _numbers(self, engine: Engine) -> CacheState:
        blocks = engine.scheduler.blocks
        pool, host = blocks.pool, blocks.host or HostBlocks(0)
        num_queried, num_hit = blocks.num_queried_tokens, blocks.num_hit_tokens
        return CacheState(
            state=self.state,
            prefix_caching=blocks.enable_prefix_caching,
            size_bytes=engine.runner.kv_cache_bytes,
            block_size=blocks.block_size,
            num_blocks=pool.num_blocks,
            num_free=pool.num_free,
            num_cached=pool.num_cached,
            num_referenced=pool.num_referenced,
            num_shared=sum(count > 1 for count in pool.ref_counts()),
            num_image_blocks=sum(map(pool.is_published, blocks.image_blocks)),
            num_evictions=pool.num_evictions,
            num_queried_tokens=num_queried,
            num_hit_tokens=num_hit,
            hit_ratio=num_hit / num_queried if num_queried else 0.0,
            num_host_slots=host.num_slots,
            num_host_blocks=host.num_held,
            num_host_hits=host.num_hits,
            num_idle_embedding_bytes=engine.embeddings.num_idle_bytes,
        )
