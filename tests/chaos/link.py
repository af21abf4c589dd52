"""A TCP link that can be made slow, lossy or half-open: what stands between two machines and not between two processes.

Loss is what TCP makes of it: the bytes come, late, after the sender's retransmission timeout. A half-open link swallows
what it is given and says nothing, as a machine does that has lost its power.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
from dataclasses import dataclass
from typing import Final

CHUNK_BYTES: Final = 16384
RETRANSMIT_S: Final = 0.2  # Linux's shortest retransmission timeout


@dataclass(frozen=True, slots=True)
class Weather:
    """What a link does to every chunk that passes, in either direction.

    delay_s      one way
    loss         share of chunks that have to be sent again
    reset        share of chunks at which the connection breaks instead
    is_half_open nothing passes, and nobody is told
    """

    delay_s: float = 0.0
    loss: float = 0.0
    reset: float = 0.0
    is_half_open: bool = False


FAIR: Final = Weather()


class Link:
    """Listens on a loopback port and passes everything on to another; `weather` may be changed at any time."""

    def __init__(self, port: int, target_port: int, seed: int = 0) -> None:
        self.port = port
        self.target_port = target_port
        self.weather = FAIR
        self._rng = random.Random(seed)
        self._loop = asyncio.new_event_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_listening = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"link-{port}", daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        self._thread.start()
        if not self._is_listening.wait(10):
            raise RuntimeError(f"no link on port {self.port}")

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        server = self._loop.run_until_complete(asyncio.start_server(self._accept, "127.0.0.1", self.port))
        self._is_listening.set()
        self._loop.run_forever()
        server.close()
        for task in self._tasks:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*self._tasks, return_exceptions=True))
        self._loop.close()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        with contextlib.suppress(OSError, asyncio.CancelledError):
            await self._connect(reader, writer)
        writer.close()

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await self._until_open()  # the connection waits in the dark, as its first packet would
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self.target_port)
        pumps = [
            asyncio.create_task(self._pump(reader, far_writer)),
            asyncio.create_task(self._pump(far_reader, writer)),
        ]
        try:
            await asyncio.gather(*pumps)
        finally:
            for pump in pumps:
                pump.cancel()
            far_writer.close()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while chunk := await reader.read(CHUNK_BYTES):
            weather = self.weather
            if weather.reset and self._rng.random() < weather.reset:
                raise ConnectionResetError
            delay_s = weather.delay_s + (RETRANSMIT_S if self._rng.random() < weather.loss else 0.0)
            if delay_s:
                await asyncio.sleep(delay_s)
            await self._until_open()
            writer.write(chunk)
            await writer.drain()
        if writer.can_write_eof():
            writer.write_eof()

    async def _until_open(self) -> None:
        while self.weather.is_half_open:  # noqa: ASYNC110 - the weather is set from other threads
            await asyncio.sleep(0.05)
