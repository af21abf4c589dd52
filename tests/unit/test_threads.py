"""Threads that are there before memory is short. Memory is taken from a process of its own, which may hang over it."""

from __future__ import annotations

import subprocess
import sys

from shared.threads import started_threads

# With concurrent.futures' own pool in place of ours this hangs in most runs: whether CPython finds memory is luck.
STARVED = """
import asyncio, os, resource, threading
from shared.threads import started_threads

async def main():
    pool = started_threads(2)
    asyncio.get_running_loop().set_default_executor(pool)
    ended = threading.Thread(target=len, args=("",))  # the next one may have its stack, which is then no new memory
    ended.start()
    ended.join()
    resource.setrlimit(resource.RLIMIT_AS, (0, resource.RLIM_INFINITY))
    print(await asyncio.to_thread(sum, [1, 2]), flush=True)
    os._exit(0)  # the loop would end with a new thread

asyncio.run(main())
"""


def test_a_loop_without_memory_for_a_new_thread_works_on_with_those_it_has():
    words = [sys.executable, "-c", STARVED]
    starved = subprocess.run(words, capture_output=True, text=True, timeout=30, check=False)
    assert starved.stdout.startswith("3")


def test_all_threads_are_there_and_take_work():
    pool = started_threads(3)
    assert len(pool._threads) == 3
    assert list(pool.map(abs, [-1, 2, -3, 4])) == [1, 2, 3, 4]
    assert len(pool._threads) == 3
    pool.shutdown()
