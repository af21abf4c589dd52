"""What this process may use of its machine or container: cores and memory. Reads only what the system says."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")


def available_cores() -> int:
    """Cores this process may use: the CPU affinity, cut to the container's quota; at least 1."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with contextlib.suppress(OSError, ValueError):
        quota, period = (CGROUP / "cpu.max").read_text().split()
        cores = min(cores, max(1, int(quota) // int(period)))  # "max" (no quota) is no number: ValueError
    return cores


def available_memory_bytes() -> int | None:
    """Memory that can be had without swapping, cut to the container's limit; None where the system does not say."""
    available = None
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/meminfo").read_text().splitlines()
        available = int(next(line.split()[1] for line in lines if line.startswith("MemAvailable:"))) * 1024
    with contextlib.suppress(OSError, ValueError):
        room = int((CGROUP / "memory.max").read_text()) - int((CGROUP / "memory.current").read_text())
        available = room if available is None else min(available, room)
    return available
