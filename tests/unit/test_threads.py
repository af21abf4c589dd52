"""Threads that are there before memory is short. Memory is taken from a process of its own, which may hang over it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from shared.threads import started_threads

STARVED = """
import asyncio, os, resource, threading
from concurrent.futures import ThreadPoolExecutor
from shared.threads import started_threads

async def main():
    pool = {pool}
    asyncio.get_running_loop().set_default_executor(pool)
    ended = threading.Thread(target=len, args=("",))  # the next one may have its stack, which is then no new memory
    ended.start()
    ended.join()
    resource.setrlimit(resource.RLIMIT_AS, (0, resource.RLIM_INFINITY))
    print(await asyncio.to_thread(sum, [1, 2]), flush=True)
    os._exit(0)  # the loop would end with a new thread

asyncio.run(main())
"""


def starved(pool: str, timeout_s: float) -> str:
    words = [sys.executable, "-c", STARVED.format(pool=pool)]
    return subprocess.run(words, capture_output=True, text=True, timeout=timeout_s, check=False).stdout


def test_a_loop_without_memory_for_a_new_thread_works_on_with_those_it_has():
    assert starved("started_threads(2)", timeout_s=30).startswith("3")


def test_python_itself_waits_for_ever_for_a_thread_that_finds_no_memory():
    """Why there are such threads; should this fail one day, they need not be."""
    with pytest.raises(subprocess.TimeoutExpired):
        starved("ThreadPoolExecutor(2)", timeout_s=5)


def test_all_threads_are_there_and_take_work():
    pool = started_threads(3)
    assert len(pool._threads) == 3
    assert list(pool.map(abs, [-1, 2, -3, 4])) == [1, 2, 3, 4]
    assert len(pool._threads) == 3
    pool.shutdown()
