"""Several processes compute one model together: what they say to each other, and who notices when one is gone.

Rank 0 is the engine's own process: it schedules, samples and speaks HTTP. The other ranks are its children, one for
each further GPU (`rank_worker`). They get each step's `BatchArrays` through a socket pair that they inherited and run
the same forward pass; what is computed travels through NCCL, on CPUs through gloo on the loopback interface.

A rank that ends or hangs makes the whole engine unusable: the collectives would never be complete again. `Workers`
notices, kills what is left, and says so once.
"""

from __future__ import annotations

import atexit
import contextlib
import datetime
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Final, Protocol, cast

import torch
from torch import distributed

from services.text_engine.config import TextEngineSettings
from services.text_engine.runner.batch_tensors import BatchArrays
from shared.exit_status import how_it_ended
from shared.log import get_logger

log = get_logger(__name__)

WORKER_MODULE: Final = "services.text_engine.rank_worker"
START_TIMEOUT_S: Final = 120.0  # until a worker has imported torch
LOAD_TIMEOUT_S: Final = 3600.0  # of a collective; what is late in a step is noticed by `Workers` long before
STOP_TIMEOUT_S: Final = 5.0
WATCH_INTERVAL_S: Final = 0.1


class RankFailed(ChildProcessError):
    """A process that holds a part of the model has ended or hangs; nothing can be computed any more."""


@dataclass(frozen=True, slots=True)
class RankSpec:
    """What a worker needs to become rank `index` of `size`.

    store  a folder of rank 0's where the ranks find each other
    """

    settings: TextEngineSettings
    index: int
    size: int
    store: Path


class ProcessRanks:
    """Satisfies `models.layers.Ranks`; one for each process. Every method is a collective: all ranks call it alike."""

    def __init__(self, index: int, size: int, store: Path, device: torch.device) -> None:
        """Returns when all ranks have met. store: see RankSpec"""
        self.index = index
        self.size = size
        self._device = device
        self._group = _process_group(index, size, store, device)

    def share(self, x: torch.Tensor) -> torch.Tensor:
        options = distributed.BroadcastOptions()
        options.rootRank = 0
        options.asyncOp = False
        _finish(self._group.broadcast([x], options))
        return x

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        return self._reduce(x, distributed.ReduceOp.SUM)

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        options = distributed.GatherOptions()
        options.rootRank = 0
        options.asyncOp = False
        parts = [torch.empty_like(x) for _ in range(self.size)] if self.index == 0 else []
        _finish(self._group.gather([parts] if parts else [], [x], options))
        return torch.cat(parts, dim=1) if parts else x

    def smallest(self, value: int) -> int:
        """The smallest of all ranks' values."""
        return int(self._reduce(torch.tensor([value], device=self._device), distributed.ReduceOp.MIN))

    def abort(self) -> None:
        """Wake all that wait for a rank that will not come; the ranks are of no use afterwards. From any thread."""
        with contextlib.suppress(RuntimeError):
            self._group.abort()

    def _reduce(self, x: torch.Tensor, operation: distributed.ReduceOp.RedOpType) -> torch.Tensor:
        options = distributed.AllreduceOptions()
        options.reduceOp = operation  # type: ignore[assignment]  # the stub leaves out the conversion
        options.asyncOp = False
        _finish(self._group.allreduce([x], options))
        return x


class _Group(Protocol):
    """What torch's NCCL and gloo groups have in common, and its type stubs leave out."""

    def broadcast(
        self, tensors: list[torch.Tensor], options: distributed.BroadcastOptions
    ) -> distributed.Work | None: ...

    def allreduce(
        self, tensors: list[torch.Tensor], options: distributed.AllreduceOptions
    ) -> distributed.Work | None: ...

    def gather(
        self,
        outputs: list[list[torch.Tensor]],
        inputs: list[torch.Tensor],
        options: distributed.GatherOptions,
    ) -> distributed.Work | None: ...

    def abort(self) -> None: ...


def _process_group(index: int, size: int, store: Path, device: torch.device) -> _Group:
    """A group of its own, not torch's global one: nothing else in the process is touched.

    Found through a file, so that no port is open to others; gloo listens on the loopback interface only.
    """
    met = distributed.FileStore(str(store / "ranks"), size)  # type: ignore[attr-defined]
    timeout = datetime.timedelta(seconds=LOAD_TIMEOUT_S)
    if device.type == "cuda":
        nccl = distributed.ProcessGroupNCCL.Options()
        nccl._timeout = timeout
        group = distributed.ProcessGroupNCCL(met, index, size, nccl)
        group.eager_connect_single_device(device)
        return cast(_Group, group)
    gloo = distributed.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    gloo._devices = [distributed.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    gloo._timeout = timeout
    return cast(_Group, distributed.ProcessGroupGloo(met, index, size, gloo))


def _finish(work: distributed.Work | None) -> None:
    if work is not None:  # on CUDA the current stream waits, not this thread
        work.wait()


class Workers:
    """Ranks 1, 2, … of one model, started, fed and watched by rank 0.

    on_failure  called once, from any thread, with what happened, if a rank ends or hangs before `close`
    """

    def __init__(self, settings: TextEngineSettings, on_failure: Callable[[str], None]) -> None:
        """Starts the processes and returns when each has come up. Raises RankFailed if one does not."""
        self._size = settings.tensor_parallel_size
        self._on_failure = on_failure
        self._folder = tempfile.TemporaryDirectory(prefix="diptych-ranks-", ignore_cleanup_errors=True)
        self._lock = threading.Lock()
        self._failure: str | None = None
        self._is_closed = threading.Event()
        self._step_started: float | None = None
        self._step_timeout_s: float | None = None
        self._ranks: ProcessRanks | None = None
        self._processes: list[subprocess.Popen[bytes]] = []
        self._connections: list[Connection] = []
        try:
            for index in range(1, self._size):
                self._start(RankSpec(settings, index, self._size, self.store))
            for index, connection in enumerate(self._connections, start=1):
                self._await_start(index, connection)
        except BaseException:
            self.close()
            raise
        atexit.register(self.close)  # a program that embeds an engine may just end
        threading.Thread(target=self._watch, name="rank watcher", daemon=True).start()

    @property
    def store(self) -> Path:
        return Path(self._folder.name)

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes]

    def join(self, device: torch.device) -> ProcessRanks:
        """Become rank 0."""
        self._ranks = ProcessRanks(0, self._size, self.store, device)
        return self._ranks

    def expect_steps_within(self, timeout_s: float) -> None:
        """From now on a step that takes longer means that a rank hangs; before, kernels are compiled."""
        self._step_timeout_s = timeout_s

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """A step and all that waits for its results: none of it may take longer than a step may."""
        self._step_started = time.monotonic()
        try:
            yield
        finally:
            self._step_started = None

    @contextlib.contextmanager
    def step(self, arrays: BatchArrays) -> Iterator[None]:
        """Have the workers run a step while the body runs it here. Whatever is raised in it, the ranks are out of step
        for good: it becomes RankFailed."""
        if self._failure is not None:
            raise RankFailed(self._failure)
        try:
            for connection in self._connections:
                connection.send(arrays)
            yield
        except Exception as error:
            reason = f"a step failed: {error}"
            self._fail(reason)
            raise RankFailed(self._failure or reason) from error

    def close(self) -> None:
        """End the processes: in order if they are well. Steps are over. Safe to call twice."""
        if self._is_closed.is_set():
            return
        self._is_closed.set()
        atexit.unregister(self.close)
        for connection in self._connections:
            with contextlib.suppress(OSError):
                connection.send(None)
        deadline = time.monotonic() + (STOP_TIMEOUT_S if self._failure is None else 0.0)
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
        self._kill()
        for connection in self._connections:
            connection.close()
        self._folder.cleanup()

    def _start(self, spec: RankSpec) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-m", WORKER_MODULE, str(theirs.fileno())]
            # An inherited socket, and no child of multiprocessing: that would run the caller's main module again.
            self._processes.append(subprocess.Popen(command, pass_fds=[theirs.fileno()]))  # noqa: S603 - our own module
        connection = Connection(ours.detach())
        self._connections.append(connection)
        connection.send(spec)

    def _await_start(self, index: int, connection: Connection) -> None:
        if not connection.poll(START_TIMEOUT_S):
            raise RankFailed(f"rank {index} has not come up within {START_TIMEOUT_S:.0f} s")
        try:
            connection.recv()
        except EOFError:
            raise RankFailed(f"rank {index} ended while it was starting") from None

    def _watch(self) -> None:
        while not self._is_closed.wait(WATCH_INTERVAL_S) and self._failure is None:
            for index, process in enumerate(self._processes, start=1):
                if (status := process.poll()) is not None and not self._is_closed.is_set():
                    self._fail(f"rank {index} (pid {process.pid}) {how_it_ended(status)}")
            started, timeout_s = self._step_started, self._step_timeout_s
            if started is not None and timeout_s is not None and time.monotonic() - started > timeout_s:
                self._fail(f"a step has been running for {timeout_s:.0f} s: a rank hangs")

    def _fail(self, reason: str) -> None:
        with self._lock:
            if self._failure is not None or self._is_closed.is_set():
                return
            self._failure = reason
        log.error("a rank of the model failed: this engine cannot go on", reason=reason)
        self._folder.cleanup()  # first: `on_failure` may end this process
        self._on_failure(reason)
        self._kill()
        if self._ranks is not None:
            self._ranks.abort()

    def _kill(self) -> None:
        for process in self._processes:
            if process.poll() is None:
                process.kill()
        for process in self._processes:
            process.wait()


def end_without_cleanup(status: int) -> None:
    """End this process even if a thread of it is stuck in a collective."""
    sys.stderr.flush()
    os._exit(status)
