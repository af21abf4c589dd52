"""Threads that run from the start, for an event loop to give blocking work to.

A pool starts its threads when it first needs them. Python waits until a thread that it starts says so, and one that
finds no memory to begin with never does: where an event loop starts it, the process hangs for good.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor


def started_threads(num_threads: int) -> ThreadPoolExecutor:
    """A pool all of whose threads run already."""
    pool = ThreadPoolExecutor(num_threads, thread_name_prefix="worker")
    all_run = threading.Barrier(num_threads + 1)
    for _ in range(num_threads):
        pool.submit(all_run.wait)  # each keeps its thread, so that the next one gets another
    all_run.wait()
    return pool
