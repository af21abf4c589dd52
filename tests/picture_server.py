"""A picture server that misbehaves on request, and a canary that must never be visited; both on loopback sockets."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import parse_qs, unquote, urlsplit

from tests.scripted import png

PICTURE = png(seed=4242)
DRIP_S = 0.2


class PictureServer:
    """Serves by path: good, status/404, empty, silent, drip, reset, large, endless, gzip, to?url=, hops/5.

    flaky/2          fails as often before it delivers; flaky-reset/2 by breaking the connection
    later/2          answers "503, Retry-After: 2" once before it delivers
    cached?control=  with this Cache-Control and the ETag "v1", which a conditional request is answered 304 for
    """

    def __init__(self) -> None:
        self.port = 0
        self.requests: list[str] = []
        self.num_waiting = 0  # connections kept silent
        self.num_failures: Counter[str] = Counter()  # by path

    @property
    def base(self) -> str:
        """By name: the name is on the allow-list of tests, the bare address is not."""
        return f"http://localhost:{self.port}"

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            path = head.split(" ")[1]
            self.requests.append(head)
            await self._answer(path, head, reader, writer)
            await writer.drain()
        except (OSError, asyncio.IncompleteReadError):
            pass  # the other side left, which is what some tests are about
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    async def _answer(self, path: str, head: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        parts = urlsplit(path)
        name, _, argument = parts.path.strip("/").partition("/")
        match name:
            case "good":
                _respond(writer, 200, PICTURE)
            case "status":
                _respond(writer, int(argument), b"sorry")
            case "flaky" | "flaky-reset" if self.num_failures[path] < int(argument):
                self.num_failures[path] += 1
                if name == "flaky":
                    _respond(writer, 503, b"sorry")
                else:
                    _reset(writer)
            case "flaky" | "flaky-reset":
                _respond(writer, 200, PICTURE)
            case "later" if not self.num_failures[path]:
                self.num_failures[path] += 1
                _respond(writer, 503, b"sorry", f"Retry-After: {argument}")
            case "later":
                _respond(writer, 200, PICTURE)
            case "cached":
                fields = [f"Cache-Control: {parse_qs(parts.query)['control'][0]}", 'ETag: "v1"']
                is_known = 'If-None-Match: "v1"' in head
                _respond(writer, 304 if is_known else 200, b"" if is_known else PICTURE, *fields)
            case "empty":
                _respond(writer, 200, b"")
            case "gzip":
                _respond(writer, 200, PICTURE, "Content-Encoding: gzip")
            case "large":
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 999999999\r\n\r\n")
            case "to":
                _respond(writer, 302, b"", f"Location: {unquote(parse_qs(parts.query)['url'][0])}")
            case "hops":
                left = int(argument)
                _respond(writer, 302, b"", f"Location: /hops/{left - 1}" if left > 1 else "Location: /good")
            case "reset":
                _reset(writer)
            case "silent":
                self.num_waiting += 1
                await reader.read()  # until the other side gives up
                self.num_waiting -= 1
            case "drip" | "endless":
                await _trickle(writer, fast=name == "endless")


def _respond(writer: asyncio.StreamWriter, status: int, body: bytes, *extra: str) -> None:
    head = [f"HTTP/1.1 {status} X", f"Content-Length: {len(body)}", "Connection: close", *extra]
    writer.write("\r\n".join(head).encode() + b"\r\n\r\n" + body)


def _reset(writer: asyncio.StreamWriter) -> None:
    raw = writer.get_extra_info("socket")
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")
    writer.transport.abort()


async def _trickle(writer: asyncio.StreamWriter, *, fast: bool) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
    while True:
        writer.write(b"10000\r\n" + bytes(0x10000) + b"\r\n" if fast else b"1\r\nx\r\n")
        await writer.drain()
        if not fast:
            await asyncio.sleep(DRIP_S)


class Canary:
    """Counts connections; the right number is none."""

    def __init__(self) -> None:
        self.num_connections = 0
        self.port = 0

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        writer.close()


@contextmanager
def serving(server: PictureServer | Canary) -> Iterator[None]:
    """In a thread, on 127.0.0.1 and, where there is one, on ::1."""
    loop = asyncio.new_event_loop()
    started = threading.Event()
    stop = asyncio.Event()

    async def run() -> None:
        first = await asyncio.start_server(server.handle, "127.0.0.1", 0)
        server.port = first.sockets[0].getsockname()[1]
        listening = [first]
        with contextlib.suppress(OSError):
            listening.append(await asyncio.start_server(server.handle, "::1", server.port))
        started.set()
        await stop.wait()
        for each in listening:
            each.close()
        current = asyncio.current_task()
        remaining = [task for task in asyncio.all_tasks() if task is not current]
        for task in remaining:
            task.cancel()
        await asyncio.gather(*remaining, return_exceptions=True)

    thread = threading.Thread(target=loop.run_until_complete, args=(run(),), daemon=True)
    thread.start()
    assert started.wait(5)
    try:
        yield
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(5)
        loop.close()
