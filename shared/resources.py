"""What this process may use of its machine or container: cores, threads, memory. Reads only what the system says."""

from __future__ import annotations

import contextlib
import os
import shlex
from pathlib import Path
from typing import Final

CGROUP = Path("/sys/fs/cgroup")
MAX_THREADS: Final = 1024  # of one model; OpenMP ends the process where it cannot start as many as it is told to


def available_cores() -> int:
    """Cores this process may use: the CPU affinity, cut to the container's quota; at least 1."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with contextlib.suppress(OSError, ValueError):
        quota, period = (CGROUP / "cpu.max").read_text().split()
        cores = min(cores, max(1, int(quota) // int(period)))  # "max" (no quota) is no number: ValueError
    return cores


def omp_num_threads() -> int | None:
    """What OMP_NUM_THREADS says, None if it is not set: of a list, one number for each nested level, the first.

    Raises ValueError, naming the variable, for what is no number of threads.
    """
    given = os.environ.get("OMP_NUM_THREADS", "").strip()
    if not given:
        return None
    first = given.partition(",")[0].strip()
    if not (first.isascii() and first.isdigit() and 1 <= int(first) <= MAX_THREADS):
        raise ValueError(
            f"OMP_NUM_THREADS={shlex.quote(given)} is no number of threads; "
            f"give a whole number from 1 to {MAX_THREADS}, or unset it"
        )
    return int(first)


def default_threads() -> int:
    """CPU threads of a model whose settings name none: OMP_NUM_THREADS, else every core. Raises ValueError as that."""
    return omp_num_threads() or available_cores()


def available_memory_bytes() -> int | None:
    """Memory that can be had without swapping, cut to the container's limit; None where the system does not say."""
    available = None
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/meminfo").read_text().splitlines()
        available = int(next(line.split()[1] for line in lines if line.startswith("MemAvailable:"))) * 1024
    with contextlib.suppress(OSError, ValueError):
        below_limit = int((CGROUP / "memory.max").read_text()) - int((CGROUP / "memory.current").read_text())
        available = below_limit if available is None else min(available, below_limit)
    return available
