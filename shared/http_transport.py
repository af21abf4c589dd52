"""HTTP/1.1 between the services, as a transport of httpx: the event loop's TLS, httptools' parser, one write.

httpx's own takes a millisecond of Python for every request, which would be a third of what the gateway adds to the
first token, and leaves a socket open where a TLS handshake is cancelled. This one does only what the services need: no
proxies, no HTTP/2, no HEAD, request bodies that are all there. It has no limit on connections; the services bound their
queues themselves.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Final, NamedTuple, cast

import httptools
import httpx

MAX_HEAD_BYTES: Final = 64 * 1024  # of an answer
MAX_BUFFERED_BYTES: Final = 1024 * 1024  # of an answer's body that nobody has read yet; then its sender has to wait
SHORTEST_TIMER_S: Final = 0.001
JOINED_BYTES: Final = 64 * 1024  # bodies up to this size are copied behind their head, into the same packet


class Origin(NamedTuple):
    """Whom a connection leads to. tls_name: whom the certificate must be of; None: without TLS"""

    host: str
    port: int
    tls_name: str | None

    @classmethod
    def of(cls, request: httpx.Request) -> Origin:
        """The certificate must be of the host that is asked, or of httpx's extension `sni_hostname`."""
        host, port = request.url.host, request.url.port
        if request.url.scheme == "https":
            return cls(host, port or 443, request.extensions.get("sni_hostname", host))
        return cls(host, port or 80, None)


class HttpTransport(httpx.AsyncBaseTransport):
    """keepalive_s   how long an idle connection may be used again; below the 5 s after which many servers close one
    max_idle      connections to one origin that are kept for that
    tls           for https; None: the public authorities are trusted, and no certificate is shown

    Of a request's timeouts `connect` is for a whole handshake, `write` for the whole request, and `read` for the head
    of its answer and then for each further piece.
    """

    def __init__(self, *, keepalive_s: float = 4.0, max_idle: int = 256, tls: ssl.SSLContext | None = None) -> None:
        self._keepalive_s = keepalive_s
        self._max_idle = max_idle
        self._tls = tls
        self._idle: dict[Origin, deque[Connection]] = {}  # the longest idle first
        self._swept_at = time.monotonic()

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Raises httpx.TransportError of the usual kinds; LocalProtocolError also for a body without a length."""
        head = _head(request)
        timeouts = request.extensions.get("timeout", {})
        origin = Origin.of(request)
        body = await request.aread()
        connection = self._take(origin) or await self._connect(origin, timeouts.get("connect"))
        try:
            await connection.ask(head, body, timeouts.get("write"), timeouts.get("read"))
        except BaseException:
            connection.close()
            raise
        answer = _Answer(connection, timeouts.get("read"), lambda: self._give_back(origin, connection))
        return httpx.Response(connection.status, headers=connection.headers, stream=answer, request=request)

    async def aclose(self) -> None:
        self._max_idle = 0  # what is still in use is not kept afterwards
        for idle in self._idle.values():
            for connection in idle:
                connection.close()
        self._idle.clear()

    async def _connect(self, origin: Origin, timeout_s: float | None) -> Connection:
        host, port, tls_name = origin
        if tls_name is not None and self._tls is None:
            self._tls = ssl.create_default_context()
        tls = self._tls if tls_name is not None else None
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(timeout_s):
                _, connection = await loop.create_connection(
                    lambda: Connection(loop), host, port, ssl=tls, server_hostname=tls_name
                )
        except TimeoutError:
            raise httpx.ConnectTimeout(f"no connection to {host}:{port} within {timeout_s} s") from None
        except (OSError, ValueError, OverflowError) as error:  # the others: of hosts and ports that nobody can have
            raise httpx.ConnectError(f"no connection to {host}:{port}: {error}") from error
        return connection

    def _take(self, origin: Origin) -> Connection | None:
        """The one that was used last; the others may grow too old meanwhile."""
        idle = self._idle.get(origin, ())
        while idle:
            connection = idle.pop()
            if connection.is_reusable and connection.idle_since > time.monotonic() - self._keepalive_s:
                return connection
            connection.close()
        return None

    def _give_back(self, origin: Origin, connection: Connection) -> None:
        if not connection.is_reusable:
            connection.close()
            return
        connection.idle_since = now = time.monotonic()
        idle = self._idle.setdefault(origin, deque())
        idle.append(connection)
        while len(idle) > self._max_idle:
            idle.popleft().close()
        if now > self._swept_at + self._keepalive_s:
            self._sweep(now)

    def _sweep(self, now: float) -> None:
        """Close what is too old, connections to servers that are gone included."""
        self._swept_at = now
        for origin, idle in list(self._idle.items()):
            while idle and idle[0].idle_since < now - self._keepalive_s:
                idle.popleft().close()
            if not idle:
                del self._idle[origin]


class Connection(asyncio.Protocol):
    """One socket and the answer that is coming in on it. Streams are read a token at a time, so what `read` does for
    each piece is kept small: no lookup of the running loop, which is a system call, and no timer.

    status, headers   of the answer, once `ask` has returned
    idle_since        by time.monotonic(); kept by whoever keeps the connection
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.status = 0
        self.headers: list[tuple[bytes, bytes]] = []
        self.idle_since = 0.0
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._chunks: list[bytes] = []
        self._num_head_bytes = 0
        self._num_buffered_bytes = 0
        self._is_asked = False
        self._has_head = False
        self._is_complete = True
        self._is_last = False  # the other side closes the connection after this answer
        self._is_writable = True
        self._is_paused = False  # reading is
        self._failure: httpx.TransportError | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._loop = loop
        self._alarm = _Alarm(loop, self._wake)

    @property
    def is_reusable(self) -> bool:
        transport = self._transport
        is_open = transport is not None and not transport.is_closing() and self._failure is None
        is_read = self._is_complete and not self._chunks and not self._is_paused
        # What is still to be written belongs to a request that was answered before it was read.
        return is_open and is_read and not self._is_last and self._is_writable

    async def ask(self, head: bytes, body: bytes, write_timeout_s: float | None, read_timeout_s: float | None) -> None:
        """Send a request and wait for the head of its answer."""
        assert self._transport is not None
        assert self._is_complete, "one request at a time"
        self.headers = []
        self._num_head_bytes = 0
        self._is_asked, self._has_head, self._is_complete = True, False, False
        if len(body) <= JOINED_BYTES:
            self._transport.write(head + body)
        else:
            self._transport.write(head)
            self._transport.write(body)
        # The answer may come before all is written: then it is a refusal.
        await self._until(
            lambda: self._is_writable or self._has_head,
            write_timeout_s,
            httpx.WriteTimeout,
            "the request was not taken",
        )
        await self._until(lambda: self._has_head, read_timeout_s, httpx.ReadTimeout, "no answer came")

    async def read(self, timeout_s: float | None) -> bytes:
        """More of the answer's body; nothing at its end."""
        await self._until(self._has_news, timeout_s, httpx.ReadTimeout, "no more of the answer came")
        data = b"".join(self._chunks)
        self._chunks.clear()
        self._num_buffered_bytes = 0
        if self._is_paused and self._transport is not None and not self._transport.is_closing():
            self._is_paused = False
            self._transport.resume_reading()
        return data

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    async def _until(
        self,
        is_met: Callable[[], bool],
        timeout_s: float | None,
        timed_out: type[httpx.TimeoutException],
        complaint: str,
    ) -> None:
        ends_at = None if timeout_s is None else self._loop.time() + timeout_s
        while not is_met():
            if self._failure is not None:
                raise self._failure
            if ends_at is not None:
                if self._loop.time() >= ends_at:
                    raise timed_out(f"{complaint} within {timeout_s} s")
                self._alarm.set(ends_at)
            assert self._waiter is None or self._waiter.done(), "two tasks read one connection"
            self._waiter = self._loop.create_future()
            await self._waiter

    def _has_news(self) -> bool:
        return bool(self._chunks) or self._is_complete

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _fail(self, failure: httpx.TransportError) -> None:
        self._failure = self._failure or failure
        self.close()
        self._wake()

    # --- called by the event loop -----------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are it by their methods only

    def data_received(self, data: bytes) -> None:
        if not self._is_asked or self._is_complete:
            self._fail(httpx.RemoteProtocolError("the other side spoke without being asked"))
            return
        if not self._has_head:
            self._num_head_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._fail(httpx.RemoteProtocolError(f"the answer is no HTTP: {error}"))
        if not self._has_head and self._num_head_bytes > MAX_HEAD_BYTES:
            self._fail(httpx.RemoteProtocolError(f"the answer's head has more than {MAX_HEAD_BYTES} bytes"))
        self._wake()

    def connection_lost(self, error: Exception | None) -> None:
        self._alarm.cancel()
        is_orderly = error is None and self._failure is None
        if is_orderly and self._has_head and not self._tells_its_end():
            self._is_complete = True
        self._fail(httpx.ReadError(str(error)) if error else httpx.RemoteProtocolError("the connection was closed"))

    def pause_writing(self) -> None:
        self._is_writable = False

    def resume_writing(self) -> None:
        self._is_writable = True
        self._wake()

    # --- called by the parser ---------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        if self._is_complete:
            raise ValueError("a second answer to one request")

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name, value))

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()
        if self.status < 200:  # what comes before an answer
            self.headers = []
            return
        self._has_head = True
        self._is_last = not self._parser.should_keep_alive()

    def on_body(self, data: bytes) -> None:
        assert self._transport is not None
        self._chunks.append(data)
        self._num_buffered_bytes += len(data)
        if self._num_buffered_bytes > MAX_BUFFERED_BYTES and not self._is_paused:
            self._is_paused = True
            self._transport.pause_reading()

    def on_message_complete(self) -> None:
        self._is_complete = self._has_head
        self._alarm.cancel()

    def _tells_its_end(self) -> bool:
        return any(name.lower() in (b"content-length", b"transfer-encoding") for name, _ in self.headers)


class _Alarm:
    """Calls `ring` when the time that was set last has come. Setting a later time costs next to nothing: the timer runs
    on, and looks when it ends whether there is time left.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, ring: Callable[[], None]) -> None:
        self._loop = loop
        self._ring = ring
        self._at = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._timer_ends_at = 0.0

    def set(self, at: float) -> None:
        """at   by the loop's clock; it takes the place of the time before"""
        self._at = at
        if self._timer is None or self._timer_ends_at > at:
            self._start_timer()

    def cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _start_timer(self) -> None:
        self.cancel()
        # Loops keep time in milliseconds: one that ends a little early must not start itself again at once, and again.
        self._timer_ends_at = max(self._at, self._loop.time() + SHORTEST_TIMER_S)
        self._timer = self._loop.call_at(self._timer_ends_at, self._timer_ended)

    def _timer_ended(self) -> None:
        self._timer = None
        if self._loop.time() >= self._at:
            self._ring()
        else:
            self._start_timer()


class _Answer(httpx.AsyncByteStream):
    def __init__(self, connection: Connection, timeout_s: float | None, give_back: Callable[[], None]) -> None:
        self._connection = connection
        self._timeout_s = timeout_s
        self._give_back: Callable[[], None] | None = give_back

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while data := await self._connection.read(self._timeout_s):
            yield data

    async def aclose(self) -> None:
        """An answer that was not read to its end costs its connection: the other side learns of it."""
        if self._give_back is not None:
            self._give_back()
            self._give_back = None


def _head(request: httpx.Request) -> bytes:
    """Raises httpx.LocalProtocolError."""
    if any(name.lower() == b"transfer-encoding" for name, _ in request.headers.raw):
        raise httpx.LocalProtocolError("bodies are sent in one piece, with a length and without transfer-encoding")
    lines = [b"%s %s HTTP/1.1" % (request.method.encode(), request.url.raw_path)]
    lines += [name + b": " + value for name, value in request.headers.raw]
    head = b"\r\n".join(lines)
    if head.count(b"\n") != len(lines) - 1 or head.count(b"\r") != len(lines) - 1:
        raise httpx.LocalProtocolError("a header's value has a line end in it")
    return head + b"\r\n\r\n"
