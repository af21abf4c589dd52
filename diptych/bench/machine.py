"""What the machine did during a run: the server's CPU and memory, the client's CPU, and everybody else's.

Read from /proc, so only for a server on this machine. Foreign CPU is what spoils figures on a shared machine: half a
foreign core halves a two-core engine.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from diptych.bench.errors import BenchError
from diptych.bench.figures import Figures

SAMPLE_EVERY_S = 0.25


def machine_busy_s(proc: Path = Path("/proc")) -> float:
    """CPU seconds spent by the whole machine since boot: all of /proc/stat but idle and waiting for I/O."""
    ticks = [int(field) for field in (proc / "stat").read_text().splitlines()[0].split()[1:9]]
    return (sum(ticks) - ticks[3] - ticks[4]) / os.sysconf("SC_CLK_TCK")


def own_cpu_s() -> float:
    return sum(os.times()[:2])


class ProcessTrees:
    """The processes `pids` with all their descendants, as they are at each sample."""

    def __init__(self, pids: Sequence[int], proc: Path = Path("/proc")) -> None:
        self.pids = tuple(pids)
        self.proc = proc
        for pid in pids:
            if not (proc / str(pid) / "stat").exists():
                raise BenchError(f"--pid {pid}: no such process on this machine")

    def sample(self) -> tuple[float, int]:
        """CPU seconds so far, those of ended children included, and resident bytes now.

        Pages shared between processes count once for each of them.
        """
        children: dict[int, list[int]] = {}
        cpu_ticks: dict[int, int] = {}
        resident_pages: dict[int, int] = {}
        for entry in os.listdir(self.proc):
            if not entry.isdigit():
                continue
            try:
                stat = (self.proc / entry / "stat").read_text()
            except OSError:  # it ended meanwhile
                continue
            fields = stat.rsplit(")", 1)[1].split()  # the name before it may hold spaces and brackets
            pid = int(entry)
            children.setdefault(int(fields[1]), []).append(pid)
            cpu_ticks[pid] = sum(int(ticks) for ticks in fields[11:15])
            resident_pages[pid] = int(fields[21])
        tree = _descendants(self.pids, children)
        cpu_s = sum(cpu_ticks.get(pid, 0) for pid in tree) / os.sysconf("SC_CLK_TCK")
        return cpu_s, sum(resident_pages.get(pid, 0) for pid in tree) * os.sysconf("SC_PAGE_SIZE")


def _descendants(roots: Sequence[int], children: dict[int, list[int]]) -> set[int]:
    found: set[int] = set()
    todo = list(roots)
    while todo:
        pid = todo.pop()
        if pid not in found:
            found.add(pid)
            todo += children.get(pid, [])
    return found


class Meter:
    """`async with Meter(server) as meter:` around the timed part of a run; then `meter.figures()`.

    Without a server to watch it only takes the time and the client's own CPU.
    """

    def __init__(self, server: ProcessTrees | None) -> None:
        self._server = server
        self._peak_bytes = 0
        self._sampling: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Meter:
        if self._server is not None:
            self._server_start_s, self._peak_bytes = self._server.sample()
            self._busy_start_s = machine_busy_s()
            self._sampling = asyncio.create_task(self._keep_sampling(self._server))
        self._own_start_s = own_cpu_s()
        self._started_at = time.perf_counter()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, failure: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.duration_s = time.perf_counter() - self._started_at
        self._own_s = own_cpu_s() - self._own_start_s
        if self._sampling is not None and self._server is not None:
            self._sampling.cancel()
            cpu_s, resident_bytes = self._server.sample()
            self._server_s = cpu_s - self._server_start_s
            self._peak_bytes = max(self._peak_bytes, resident_bytes)
            self._busy_s = machine_busy_s() - self._busy_start_s

    async def _keep_sampling(self, server: ProcessTrees) -> None:
        while True:
            await asyncio.sleep(SAMPLE_EVERY_S)
            self._peak_bytes = max(self._peak_bytes, server.sample()[1])

    def figures(self) -> Figures:
        """CPU in cores: seconds of CPU per second of the run."""
        figures: Figures = {"duration_s": self.duration_s, "client_cpu": self._own_s / self.duration_s}
        if self._server is not None:
            foreign_s = max(0.0, self._busy_s - self._own_s - self._server_s)
            figures["server_cpu"] = self._server_s / self.duration_s
            figures["other_cpu"] = foreign_s / self.duration_s
            figures["peak_rss_mib"] = self._peak_bytes // 2**20
        return figures


async def wait_until_quiet(server: ProcessTrees, max_foreign_cores: float, *, timeout_s: float = 40.0) -> float:
    """Wait at most `timeout_s` until others than the server leave the machine alone. Returns their cores at the end."""
    window_s = 2.0
    give_up_at = time.perf_counter() + timeout_s
    while True:
        async with Meter(server) as meter:
            await asyncio.sleep(window_s)
        foreign_cores = meter.figures()["other_cpu"] or 0.0
        if foreign_cores <= max_foreign_cores or time.perf_counter() > give_up_at:
            return foreign_cores
