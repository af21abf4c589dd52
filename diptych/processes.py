"""Child processes: started together, watched, restarted with back-off, stopped in order. Knows nothing of Diptych.

Three promises: a child that dies while starting fails the start with the reason, which it tells in a line `error: ...`;
one that dies later is started again; and no child outlives this process, however it ends (stopped, crashed or killed
with SIGKILL).
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import re
import signal
import sys
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from shared.exit_status import how_it_ended

TAIL_LINES = 200
NUM_LAST_WORDS = 15
REASON = "error: "  # begins the line in which a child tells why it ends
MAX_LINE_BYTES = 1 << 20
PROBE_INTERVAL_S = 0.1
FIRST_BACKOFF_S = 0.5
MAX_BACKOFF_S = 30.0
STEADY_AFTER_S = 60.0  # a child that ran this long starts its next back-off from the beginning

_ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None

State = Literal["starting", "ready", "restarting"]
Probe = Callable[[], Awaitable[bool]]


class StartFailed(Exception):
    """A child ended before everything was ready; the message is one line with the reason.

    last_words   the child's last log lines, if it gave no reason itself
    """

    def __init__(self, message: str, last_words: str = "") -> None:
        super().__init__(message)
        self.last_words = last_words


@dataclass(frozen=True, slots=True)
class Command:
    """How to run one child.

    probe           true once the child does its work
    is_quiet        its output is kept for its last words, but not passed on
    stop_stage      children are stopped stage by stage, lowest first
    stop_timeout_s  time between SIGTERM and SIGKILL
    """

    name: str
    argv: Sequence[str]
    probe: Probe
    env: Mapping[str, str] = field(default_factory=lambda: dict(os.environ), repr=False)  # passwords are in both
    stdin: bytes | None = field(default=None, repr=False)
    is_quiet: bool = False
    stop_stage: int = 0
    stop_timeout_s: float = 35.0


class Child:
    """One running command: its process, state and last log lines."""

    def __init__(self, command: Command, on_line: Callable[[str, str], None]) -> None:
        self.command = command
        self.state: State = "starting"
        self.is_stopping = False
        self.num_restarts = 0
        self.tail: deque[str] = deque(maxlen=TAIL_LINES)
        self.process: asyncio.subprocess.Process | None = None
        self._on_line = on_line

    @property
    def name(self) -> str:
        return self.command.name

    @property
    def last_line(self) -> str:
        return self.tail[-1] if self.tail else ""

    async def run(self, on_ready: Callable[[], None]) -> int:
        """Run the command once, to its end; returns the exit status (negative: the signal's number)."""
        self.state = "starting"
        async with _pipe() as (lines, output):
            try:
                self.process = process = await self._spawn(output)
            finally:
                os.close(output)
            reading = asyncio.create_task(self._read(lines))
            probing = asyncio.create_task(self._probe(on_ready))
            try:
                return await process.wait()
            finally:
                probing.cancel()
                self._signal_group(signal.SIGKILL)  # workers that the child left behind
                await asyncio.wait([reading], timeout=1.0)
                reading.cancel()

    async def terminate(self) -> None:
        """SIGTERM, time to finish, then SIGKILL."""
        process = self.process
        if process is None or process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            # Not process.terminate(), which looks for its end first and would take the exit status from asyncio.
            os.kill(process.pid, signal.SIGTERM)
        try:
            await asyncio.wait_for(process.wait(), self.command.stop_timeout_s)
        except TimeoutError:
            self.kill()
            await process.wait()

    def kill(self) -> None:
        self._signal_group(signal.SIGKILL)

    def _signal_group(self, signum: signal.Signals) -> None:
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signum)

    async def _spawn(self, output: int) -> asyncio.subprocess.Process:
        process = await asyncio.create_subprocess_exec(
            *self.command.argv,
            env=dict(self.command.env),
            stdin=asyncio.subprocess.DEVNULL if self.command.stdin is None else asyncio.subprocess.PIPE,
            stdout=output,
            stderr=output,
            # A group of its own: Ctrl-C in the terminal reaches this process only, which then stops them in order.
            start_new_session=True,
            preexec_fn=_die_with_parent(os.getpid()),
        )
        if self.command.stdin is not None:
            assert process.stdin is not None
            process.stdin.write(self.command.stdin)
            process.stdin.close()
        return process

    async def _read(self, lines: asyncio.StreamReader) -> None:
        while True:
            try:
                raw = await lines.readline()
            except ValueError:  # a line beyond MAX_LINE_BYTES; asyncio has dropped it
                continue
            if not raw:
                return
            line = raw.decode(errors="replace").rstrip()
            self.tail.append(_ANSI.sub("", line))
            is_told_by_start = self.state == "starting" and line.startswith(REASON)
            if not self.command.is_quiet and not is_told_by_start:
                self._on_line(self.name, line)

    async def _probe(self, on_ready: Callable[[], None]) -> None:
        while not await self.command.probe():  # noqa: ASYNC110 - another process: it can only be asked
            await asyncio.sleep(PROBE_INTERVAL_S)
        self.state = "ready"
        on_ready()


class Supervisor:
    """Keeps a set of children running from `start` to `stop`.

    say      one sentence for a person: a death, a restart
    on_line  (name of the child, line of its output)
    """

    def __init__(
        self, commands: Sequence[Command], *, say: Callable[[str], None], on_line: Callable[[str, str], None]
    ) -> None:
        self.children = [Child(command, on_line) for command in commands]
        self._say = say
        self._started = False
        self._tasks: dict[Child, asyncio.Task[None]] = {}

    async def start(self) -> None:
        """Start all children at once; returns when every one is ready. Raises StartFailed, with everything stopped."""
        ready = {child: asyncio.Event() for child in self.children}
        self._tasks = {child: asyncio.create_task(self._keep(child, ready[child].set)) for child in self.children}
        all_ready = asyncio.create_task(_wait_for_all(list(ready.values())))
        try:
            await asyncio.wait([all_ready, *self._tasks.values()], return_when=asyncio.FIRST_COMPLETED)
            for task in self._tasks.values():
                if task.done():
                    task.result()  # raises StartFailed
            self._started = True
        except BaseException:
            await self.stop(grace=False)
            raise
        finally:
            all_ready.cancel()

    async def stop(self, *, grace: bool = True) -> None:
        """Stop stage by stage: SIGTERM and time to finish, or with `grace=False` SIGKILL at once."""
        for stage in sorted({child.command.stop_stage for child in self.children}):
            members = [child for child in self.children if child.command.stop_stage == stage]
            for child in members:
                child.is_stopping = True  # first, so that an ending child is not started again
                if not grace:
                    child.kill()
            await asyncio.gather(*(child.terminate() for child in members))
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    def kill(self) -> None:
        """SIGKILL to every child and its workers, now."""
        for child in self.children:
            child.is_stopping = True
            child.kill()

    async def _keep(self, child: Child, on_ready: Callable[[], None]) -> None:
        backoff_s = FIRST_BACKOFF_S
        while True:
            since = time.monotonic()
            status = await child.run(on_ready)
            if child.is_stopping:
                return
            if not self._started:
                raise start_failed(child.name, status, list(child.tail))
            if time.monotonic() - since > STEADY_AFTER_S:
                backoff_s = FIRST_BACKOFF_S
            child.state = "restarting"
            child.num_restarts += 1
            self._say(f"{child.name} {how_it_ended(status)}; starting it again in {backoff_s:g} s")
            await asyncio.sleep(backoff_s)
            backoff_s = min(2 * backoff_s, MAX_BACKOFF_S)


async def _wait_for_all(events: Sequence[asyncio.Event]) -> None:
    for event in events:
        await event.wait()


@contextlib.asynccontextmanager
async def _pipe() -> AsyncIterator[tuple[asyncio.StreamReader, int]]:
    """A pipe's two ends: lines to read, and a descriptor to write to, which the caller closes.

    Not asyncio's own pipe to a child: waiting for the child would then also wait for whoever else holds the pipe, and
    the death of a child that leaves workers behind would go unnoticed.
    """
    read_end, write_end = os.pipe()
    lines = asyncio.StreamReader(limit=MAX_LINE_BYTES)
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(lines), os.fdopen(read_end, "rb")
    )
    try:
        yield lines, write_end
    finally:
        transport.close()


def start_failed(name: str, status: int, tail: Sequence[str]) -> StartFailed:
    """Why a child has not started: what it says in lines that begin with `error: `, else how it ended.

    tail   the last lines of its output
    """
    reasons = [line.removeprefix(REASON) for line in tail if line.startswith(REASON)]
    if reasons:
        return StartFailed(f"{name}: {'; '.join(reasons)}")
    lines = "\n".join(f"  {name} | {line}" for line in tail[-NUM_LAST_WORDS:]) or f"  {name} printed nothing."
    memory = "; perhaps this machine has too little memory" if status == -signal.SIGKILL else ""
    return StartFailed(f"{name} {how_it_ended(status)} while starting{memory}", lines)


def _die_with_parent(parent: int) -> Callable[[], None] | None:
    """Runs in the child before exec: the kernel kills it when this process is gone, however that happens.

    The library is loaded beforehand and nothing is allocated, as befits code between fork and exec.
    """
    if _LIBC is None:
        return None
    libc = _LIBC

    def ask() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:  # it died before we could ask
            os._exit(1)

    return ask
