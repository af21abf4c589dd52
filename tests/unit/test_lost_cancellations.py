"""Libraries that lose a cancellation, as `asyncio.wait_for` does before Python 3.12, keep no request alive."""

from __future__ import annotations

import asyncio

import pytest

from services.gateway import lifecycle
from services.gateway.lifecycle import Lifecycle
from shared.errors import RequestAborted
from shared.redis_link import RedisLink


@pytest.mark.asyncio
async def test_a_cancellation_that_the_redis_client_loses_is_raised_all_the_same():
    link = RedisLink("redis://127.0.0.1:1", op_timeout_s=5.0, subject="a test")
    is_waiting = asyncio.Event()

    async def losing(_redis: object) -> str:
        is_waiting.set()
        try:
            await asyncio.sleep(10)
        except asyncio.CancelledError:
            return "a value that came just then"
        return "never"

    task = asyncio.create_task(link.attempt(losing, default="nothing"))
    await is_waiting.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await link.close()


@pytest.mark.asyncio
async def test_what_is_done_after_a_cancellation_may_still_use_redis():
    link = RedisLink("redis://127.0.0.1:1", op_timeout_s=5.0, subject="a test")
    freed: list[str] = []

    async def free(_redis: object) -> str:
        return "freed"

    async def work() -> None:
        try:
            await asyncio.sleep(10)
        finally:
            freed.append(await link.attempt(free, default="nothing"))

    task = asyncio.create_task(work())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert freed == ["freed"]
    await link.close()


@pytest.mark.asyncio
async def test_work_that_lost_its_cancellation_is_cancelled_again(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(lifecycle, "CANCEL_AGAIN_S", 0.01)
    num_cancelled = 0

    async def stubborn() -> None:
        nonlocal num_cancelled
        while num_cancelled < 3:
            try:
                await asyncio.sleep(10)
            except asyncio.CancelledError:
                num_cancelled += 1

    async def leaves() -> dict[str, str]:
        return {"type": "http.disconnect"}

    with pytest.raises(RequestAborted):
        async with asyncio.timeout(5):
            await Lifecycle(drain_delay_s=0, drain_timeout_s=0).attend(leaves, stubborn())
    assert num_cancelled == 3
