"""DecodePool: worker processes that turn image bytes into the tower's 8-bit input.

Processes rather than threads: Pillow and NumPy hold the GIL between their inner loops, and a codec that crashes or is
taken over by a hostile image must not take the service with it. A worker that dies or overruns its time fails the one
image it was working on and is replaced.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import sys
import time
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from services.vision_encoder.decode_worker import FRAME, WorkerConfig, pack_request
from shared.errors import EncodeFailed, InvalidImage
from shared.image_header import ImageHeader
from shared.log import get_logger
from shared.wire.images import Detail

log = get_logger(__name__)
T = TypeVar("T")

WORKER_MODULE: Final = "services.vision_encoder.decode_worker"
MAX_REPLY_BYTES: Final = 1 << 28
PIPE_BUFFER_BYTES: Final = 1 << 20
START_TIMEOUT_S: Final = 60.0
RESTART_PAUSE_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class DecodedImage:
    """pixels [num_tiles, 3, height, width], 8-bit, channels R, G, B; timings in seconds per stage"""

    pixels: NDArray[np.uint8]
    timings: dict[str, float]


class WorkerDied(Exception):
    """The worker went away, at the start or in the middle of an image."""


class DecodePool:
    """`await start()`, then `decode` from any number of tasks; images wait their turn in order of arrival."""

    def __init__(self, config: WorkerConfig, *, num_workers: int, timeout_s: float) -> None:
        self._config = config
        self._num_workers = num_workers
        self._timeout_s = timeout_s
        self._idle: asyncio.Queue[_Worker] = asyncio.Queue()
        self._all: set[_Worker] = set()
        self._tasks: set[asyncio.Task[Any]] = set()

    async def start(self) -> None:
        """Returns when every worker is ready. Raises WorkerDied if one cannot start."""
        await asyncio.gather(*(self._add_worker() for _ in range(self._num_workers)))

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(worker.kill() for worker in self._all))
        self._all.clear()

    @property
    def pids(self) -> list[int]:
        return [worker.pid for worker in self._all]

    async def decode(self, data: bytes, header: ImageHeader, detail: Detail = "high") -> DecodedImage:
        """Raises InvalidImage if the bytes do not decode whole, EncodeFailed if the worker died or took too long."""
        started = time.monotonic()
        worker = await self._idle.get()
        while worker.is_dead:
            self._replace(worker)
            worker = await self._idle.get()
        queue_s = time.monotonic() - started
        # Shielded: a caller that goes away does not leave half a reply in the pipe for the next image to read.
        head, payload = await asyncio.shield(self._spawn(self._ask(worker, pack_request(header, detail, data))))
        if "invalid" in head:
            raise InvalidImage(str(head["invalid"]))
        timings = {stage: float(seconds) for stage, seconds in head["timings"].items()} | {"queue": queue_s}
        return DecodedImage(_to_array(head["shape"], payload), timings)

    async def _ask(self, worker: _Worker, request: tuple[bytes, bytes]) -> tuple[dict[str, Any], bytes]:
        try:
            async with asyncio.timeout(self._timeout_s):
                reply = await worker.ask(request)
        except TimeoutError:
            self._replace(worker)
            raise EncodeFailed(f"decoding the image took longer than {self._timeout_s:g} s") from None
        except WorkerDied:
            self._replace(worker)
            raise EncodeFailed("the process that decoded the image died") from None
        self._idle.put_nowait(worker)
        return reply

    def _replace(self, worker: _Worker) -> None:
        async def swap() -> None:
            await worker.kill()
            self._all.discard(worker)
            while True:
                try:
                    return await self._add_worker()
                except WorkerDied:
                    await asyncio.sleep(RESTART_PAUSE_S)

        log.error("replacing a decode worker", pid=worker.pid, died=worker.is_dead)
        self._spawn(swap())

    async def _add_worker(self) -> None:
        worker = await _Worker.start(self._config)
        self._all.add(worker)
        self._idle.put_nowait(worker)

    def _spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        def forget(task: asyncio.Task[T]) -> None:
            self._tasks.discard(task)
            if not task.cancelled():
                task.exception()  # its caller may be gone; an error nobody waits for is no news

        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(forget)
        return task


class _Worker:
    """One child process and the two pipes to it."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._process = process
        self._requests = process.stdin
        self._replies = process.stdout

    @classmethod
    async def start(cls, config: WorkerConfig) -> _Worker:
        """Returns when the worker is ready for its first image. Raises WorkerDied if it does not get there."""
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            WORKER_MODULE,
            config.to_json(),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=PIPE_BUFFER_BYTES,
            # One image at a time per worker: maths threads would only fight the tower for cores.
            env=os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
        )
        worker = cls(process)
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                await worker._read_reply()
        except BaseException as error:
            await worker.kill()
            if isinstance(error, TimeoutError):
                raise WorkerDied(f"a decode worker did not start within {START_TIMEOUT_S:g} s") from None
            raise
        return worker

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_dead(self) -> bool:
        return self._process.returncode is not None

    async def ask(self, request: tuple[bytes, bytes]) -> tuple[dict[str, Any], bytes]:
        try:
            for piece in request:
                self._requests.write(piece)
            await self._requests.drain()
        except OSError as error:
            raise WorkerDied("a decode worker died before its image") from error
        return await self._read_reply()

    async def _read_reply(self) -> tuple[dict[str, Any], bytes]:
        try:
            head_size, payload_size = FRAME.unpack(await self._replies.readexactly(FRAME.size))
            if head_size + payload_size > MAX_REPLY_BYTES:
                raise ValueError(f"a reply of {head_size + payload_size} bytes")
            head = json.loads(await self._replies.readexactly(head_size))
            return head, await self._replies.readexactly(payload_size)
        except (OSError, EOFError, ValueError) as error:
            raise WorkerDied("a decode worker died or spoke gibberish") from error

    async def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        self._requests.close()
        await self._process.wait()


def _to_array(shape: list[int], payload: bytes) -> NDArray[np.uint8]:
    """The reply of a process that hostile bytes ran through is checked like any input."""
    if len(shape) != 4 or shape[1] != 3 or math.prod(shape) != len(payload):
        raise EncodeFailed(f"the decode worker answered {len(payload)} bytes for pixels of shape {shape}")
    return np.frombuffer(bytearray(payload), dtype=np.uint8).reshape(shape)  # torch wants writable memory
