"""A throw-away certificate authority, the files it makes, and a TLS front for servers that speak none."""

from __future__ import annotations

import asyncio
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import trustme


@dataclass(frozen=True, slots=True)
class Files:
    """PEM files of one service, and of the authority that vouches for it."""

    cert: Path
    key: Path
    ca: Path


class Authority:
    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._ca = trustme.CA()
        self.ca_file = folder / "ca.pem"
        self._ca.cert_pem.write_to_path(self.ca_file)

    def issue(self, name: str, *, file: str = "", not_after: datetime | None = None) -> Files:
        """A certificate for `name` (a host or an address), in files called `file` or the same."""
        made = self._ca.issue_cert(name, not_after=not_after)
        stem = self._folder / (file or name)
        files = Files(stem.with_suffix(".crt"), stem.with_suffix(".key"), self.ca_file)
        made.private_key_pem.write_to_path(files.key)
        files.cert.write_bytes(b"".join(blob.bytes() for blob in made.cert_chain_pems))
        return files

    def issue_expired(self, name: str) -> Files:
        return self.issue(name, file=f"expired-{name}", not_after=datetime(2001, 2, 3, 4, 5, tzinfo=UTC))

    def client_context(self, files: Files | None = None) -> ssl.SSLContext:
        """Trusts this authority alone, and shows the certificate in `files`."""
        context = ssl.create_default_context(cafile=self.ca_file)
        if files is not None:
            context.load_cert_chain(files.cert, files.key)
        return context

    def server_context(self, files: Files) -> ssl.SSLContext:
        """Wants a certificate of this authority from everybody."""
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=self.ca_file)
        context.load_cert_chain(files.cert, files.key)
        context.verify_mode = ssl.CERT_REQUIRED
        return context


@contextmanager
def tls_front(target_port: int, context: ssl.SSLContext) -> Iterator[int]:
    """A loopback port that speaks TLS and passes everything on in clear; yields it."""
    loop = asyncio.new_event_loop()
    tasks: set[asyncio.Task[None]] = set()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        task.add_done_callback(tasks.discard)
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", target_port)
        with suppress(OSError, asyncio.CancelledError):
            await asyncio.gather(_pump(reader, far_writer), _pump(far_reader, writer))
        writer.close()
        far_writer.close()

    server = loop.run_until_complete(asyncio.start_server(accept, "127.0.0.1", 0, ssl=context))
    loop.set_exception_handler(lambda _loop, _context: None)  # handshakes that fail are what a test wants
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.run_until_complete(_end(server, tasks))
        loop.close()


async def _end(server: asyncio.Server, tasks: set[asyncio.Task[None]]) -> None:
    server.close()
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await asyncio.sleep(0.05)  # in which the connections' ends are worked off


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while chunk := await reader.read(65536):
        writer.write(chunk)
        await writer.drain()
    writer.close()
