"""The gateway's own HTTP transport, against servers that say exactly what a test wants, over real sockets."""

from __future__ import annotations

import asyncio
import gc
import socket
import ssl
import struct
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
import uvloop

from shared import http_transport
from shared.http_transport import MAX_BUFFERED_BYTES, MAX_HEAD_BYTES, Connection, HttpTransport
from tests.authority import Authority
from tests.ports import refusing_port

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
Script = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class Server:
    """num_connections   that were made to it; heads: of the requests that came"""

    def __init__(self, script: Script) -> None:
        self._script = script
        self.num_connections = 0
        self.num_closed = 0
        self.url = ""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        try:
            await self._script(reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            self.num_closed += 1
            writer.close()


@asynccontextmanager
async def talking(script: Script) -> AsyncIterator[tuple[Server, httpx.AsyncClient]]:
    server = Server(script)
    listening = await asyncio.start_server(server.serve, "127.0.0.1", 0)
    port = listening.sockets[0].getsockname()[1]
    transport = HttpTransport(keepalive_s=4, max_idle=2)
    timeout = httpx.Timeout(5, connect=2)
    base_url = f"http://127.0.0.1:{port}"
    client = httpx.AsyncClient(transport=transport, base_url=base_url, timeout=timeout, trust_env=False)
    async with listening, client:
        yield server, client


def answering(*answers: bytes, then_closes: bool = False) -> Script:
    """One answer a request, the last one for all further ones too."""

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        rest = list(answers)
        while True:
            await read_request(reader)
            writer.write(rest.pop(0) if len(rest) > 1 else rest[0])
            await writer.drain()
            if then_closes:
                return

    return script


async def read_request(reader: asyncio.StreamReader) -> tuple[bytes, bytes]:
    head = await reader.readuntil(b"\r\n\r\n")
    lengths = [line.split(b":")[1] for line in head.split(b"\r\n") if line.lower().startswith(b"content-length")]
    return head, await reader.readexactly(int(lengths[0])) if lengths else b""


async def eventually(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not condition():  # noqa: ASYNC110 - of the other side's counters, which wake nobody
            await asyncio.sleep(0.01)


# --- good answers ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_bytes", [0, 1, http_transport.JOINED_BYTES, http_transport.JOINED_BYTES + 1, 5 * 2**20])
async def test_a_body_of_any_size_arrives_as_it_was_sent_and_comes_back_so(num_bytes: int):
    sent = bytes(range(256)) * (num_bytes // 256) + bytes(num_bytes % 256)

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head, body = await read_request(reader)
        assert head.startswith(b"POST /path?a=1 HTTP/1.1\r\n")
        assert b"\r\nX-One: two\r\n" in head
        writer.write(b"HTTP/1.1 201 Made\r\nContent-Length: %d\r\nX-Three: four\r\n\r\n" % len(body) + body)
        await writer.drain()

    async with talking(echo) as (_, client):
        answer = await client.post("/path?a=1", content=sent, headers={"X-One": "two"})
    assert (answer.status_code, answer.headers["x-three"], answer.content) == (201, "four", sent)


async def test_chunks_are_handed_on_as_they_come():
    go_on = asyncio.Event()

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        for number in range(3):
            writer.write((CHUNKED if number == 0 else b"") + b"5\r\nline%d\r\n" % number)
            await writer.drain()
            await go_on.wait()
            go_on.clear()
        writer.write(b"0\r\n\r\n")
        await writer.drain()

    async with talking(script) as (_, client), client.stream("GET", "/") as response:
        chunks = []
        async for chunk in response.aiter_raw():
            chunks.append(chunk)
            go_on.set()
    assert chunks == [b"line0", b"line1", b"line2"]


async def test_an_answer_without_a_length_ends_with_its_connection():
    script = answering(b"HTTP/1.1 200 OK\r\n\r\nall of it", then_closes=True)
    async with talking(script) as (server, client):
        for _ in range(2):
            assert (await client.get("/")).content == b"all of it"
        assert server.num_connections == 2


async def test_a_reset_is_no_end_of_an_answer_without_a_length():
    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(b"HTTP/1.1 200 OK\r\n\r\nhalf of it")
        await writer.drain()
        await half_read.wait()
        no_linger = struct.pack("ii", 1, 0)  # closing resets
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, no_linger)
        writer.transport.abort()

    half_read = asyncio.Event()
    async with talking(script) as (_, client), client.stream("GET", "/") as response:
        pieces = response.aiter_raw()
        assert await anext(pieces) == b"half of it"
        half_read.set()
        with pytest.raises(httpx.ReadError):
            await anext(pieces, b"the end")


async def test_what_comes_before_an_answer_is_passed_over():
    hint = b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n"
    async with talking(answering(hint + OK)) as (_, client):
        answer = await client.get("/")
    assert (answer.status_code, answer.content, "link" in answer.headers) == (200, b"ok", False)


async def test_who_reads_slowly_lets_the_sender_wait():
    num_sent = 0

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal num_sent
        await read_request(reader)
        writer.write(CHUNKED)
        for _ in range(400):
            writer.write(b"10000\r\n" + bytes(2**16) + b"\r\n")
            await writer.drain()
            num_sent += 2**16
        writer.write(b"0\r\n\r\n")
        await writer.drain()

    async with talking(script) as (_, client), client.stream("GET", "/") as response:
        await asyncio.sleep(0.3)
        assert num_sent < MAX_BUFFERED_BYTES + 16 * 2**20, "the kernel's buffers and ours"
        size = 0
        async for chunk in response.aiter_raw():
            size += len(chunk)
    assert size == num_sent == 400 * 2**16


# --- connections ----------------------------------------------------------------------------------------------------


async def test_a_connection_is_used_again_once_its_answer_was_read():
    async with talking(answering(OK)) as (server, client):
        for _ in range(5):
            assert (await client.get("/")).content == b"ok"
        assert server.num_connections == 1
        answers = await asyncio.gather(*(client.get("/") for _ in range(7)))
        assert [answer.content for answer in answers] == [b"ok"] * 7
        await eventually(lambda: server.num_connections - server.num_closed == 2)  # max_idle


@pytest.mark.parametrize(
    "answer", [b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 2\r\n\r\nok", OK + b"HTTP/1.1 500 Smuggled"]
)
async def test_a_connection_that_is_over_or_says_too_much_is_not_used_again(answer: bytes):
    async with talking(answering(answer)) as (server, client):
        for number in range(3):
            with_luck = await asyncio.gather(client.get("/"), return_exceptions=True)
            assert all(isinstance(each, httpx.RemoteProtocolError) or each.content == b"ok" for each in with_luck)
            assert server.num_connections == number + 1


async def test_an_answer_that_is_left_early_closes_its_connection():
    async def endless(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(CHUNKED + b"2\r\nhi\r\n")
        await writer.drain()
        assert await reader.read() == b""

    async with talking(endless) as (server, client):
        async with client.stream("GET", "/") as response:
            assert await anext(response.aiter_raw()) == b"hi"
        await eventually(lambda: server.num_closed == 1)


async def test_nobody_gets_what_another_has_left_unread():
    async with talking(answering(OK)) as (server, client):
        async with client.stream("GET", "/") as response:
            await asyncio.sleep(0.05)  # all of the answer is here, and none of it is read
            assert response.status_code == 200
        assert (await client.get("/")).content == b"ok"
        assert server.num_connections == 2


async def test_a_request_that_is_cancelled_closes_its_connection():
    async def silent(reader: asyncio.StreamReader, _: asyncio.StreamWriter) -> None:
        await read_request(reader)
        assert await reader.read() == b""

    async with talking(silent) as (server, client):
        asking = asyncio.create_task(client.get("/"))
        await eventually(lambda: server.num_connections == 1)
        asking.cancel()
        await eventually(lambda: server.num_closed == 1)
        assert asking.cancelled()


async def test_a_connection_that_is_in_use_when_the_transport_closes_is_closed_after_its_answer():
    async with talking(answering(OK)) as (server, client):
        async with client.stream("GET", "/") as response:
            await client._transport.aclose()
            assert await response.aread() == b"ok"
        await eventually(lambda: server.num_closed == 1)


async def test_a_connection_that_was_closed_while_idle_is_replaced():
    async with talking(answering(OK, then_closes=True)) as (server, client):
        assert (await client.get("/")).content == b"ok"
        await eventually(lambda: server.num_closed == 1)
        await asyncio.sleep(0.05)
        assert (await client.get("/")).content == b"ok"


async def test_a_connection_that_was_idle_for_too_long_is_replaced(monkeypatch: pytest.MonkeyPatch):
    now = [0.0]
    monkeypatch.setattr(http_transport.time, "monotonic", lambda: now[0])
    async with talking(answering(OK)) as (server, client):
        for now[0] in (0.0, 3.9, 7.8, 12.0):
            assert (await client.get("/")).content == b"ok"
        assert server.num_connections == 2


# --- TLS ------------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def talking_tls(
    script: Script, authority: Authority, name: str
) -> AsyncIterator[tuple[Server, httpx.AsyncClient]]:
    """The server's certificate is of `name`; the client believes its authority."""
    server = Server(script)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    files = authority.issue(name)
    context.load_cert_chain(files.cert, files.key)
    listening = await asyncio.start_server(server.serve, "127.0.0.1", 0, ssl=context)
    port = listening.sockets[0].getsockname()[1]
    transport = HttpTransport(max_idle=2, tls=authority.client_context())
    base_url = f"https://127.0.0.1:{port}"
    client = httpx.AsyncClient(transport=transport, base_url=base_url, timeout=5, trust_env=False)
    async with listening, client:
        yield server, client


async def test_tls_is_spoken_and_a_connection_used_again(tmp_path: Path):
    async with talking_tls(answering(OK), Authority(tmp_path), "127.0.0.1") as (server, client):
        for _ in range(3):
            assert (await client.get("/")).content == b"ok"
        assert server.num_connections == 1


async def test_a_certificate_must_be_of_the_name_that_the_request_says(tmp_path: Path):
    async with talking_tls(answering(OK), Authority(tmp_path), "engine.internal") as (server, client):
        with pytest.raises(httpx.ConnectError, match=r"CERTIFICATE_VERIFY_FAILED.*IP address mismatch"):
            await client.get("/")
        named = await client.get("/", extensions={"sni_hostname": "engine.internal"})
        assert named.content == b"ok"
        with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
            await client.get("/")  # the connection to one name is not used for another
        assert server.num_connections == 1


async def test_a_handshake_that_is_cancelled_leaves_no_socket_open():
    left = asyncio.Event()

    async def mute(reader: asyncio.StreamReader, _: asyncio.StreamWriter) -> None:
        while await reader.read(1000):
            pass
        left.set()

    async with talking(mute) as (server, client):
        url = f"https://127.0.0.1:{client.base_url.port}/"
        asking = asyncio.create_task(client.get(url))
        await eventually(lambda: server.num_connections == 1)
        asking.cancel()
        async with asyncio.timeout(5):
            await left.wait()


# --- failures -------------------------------------------------------------------------------------------------------


async def test_nobody_there_is_a_connect_error():
    async with httpx.AsyncClient(transport=HttpTransport(keepalive_s=4, max_idle=2)) as client:
        with refusing_port() as port, pytest.raises(httpx.ConnectError):
            await client.get(f"http://127.0.0.1:{port}/")


@pytest.mark.parametrize("host", ["text..engine:1", "x" * 64 + ":1", "127.0.0.1:70000"])
async def test_a_host_or_port_that_nobody_can_have_is_a_connect_error(host: str):
    async with HttpTransport() as transport:
        with pytest.raises(httpx.ConnectError, match=f"no connection to {host}: "):
            await transport.handle_async_request(httpx.Request("GET", f"http://{host}/"))


@pytest.mark.parametrize(
    ("said", "error"),
    [
        (b"", httpx.RemoteProtocolError),
        (b"garbage\r\n\r\n", httpx.RemoteProtocolError),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhal", httpx.RemoteProtocolError),
        (CHUNKED + b"5\r\nhal", httpx.RemoteProtocolError),
        (CHUNKED + b"xyz\r\n", httpx.RemoteProtocolError),
        (b"HTTP/1.1 200 OK\r\nX: " + bytes(MAX_HEAD_BYTES), httpx.RemoteProtocolError),
        (b"HTTP/1.1 200 OK\r\nX: " + b"a" * (2 * MAX_HEAD_BYTES), httpx.RemoteProtocolError),
    ],
)
async def test_an_answer_that_breaks_is_a_failure_of_the_other_side(said: bytes, error: type[httpx.TransportError]):
    async with talking(answering(said, then_closes=True)) as (_, client):
        with pytest.raises(error):
            await client.get("/")


async def test_who_says_nothing_is_waited_for_no_longer_than_was_allowed():
    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(CHUNKED + b"2\r\nhi\r\n")
        await reader.read()

    async with talking(silent) as (_, client):
        with pytest.raises(httpx.ReadTimeout, match=r"no more of the answer came within 0\.1 s"):
            await client.get("/", timeout=0.1)


async def test_every_piece_of_an_answer_has_the_time_for_reading_to_itself():
    async def slow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(CHUNKED)
        for _ in range(4):
            await asyncio.sleep(0.2)
            writer.write(b"2\r\nhi\r\n")
        await reader.read()

    async with talking(slow) as (_, client), client.stream("GET", "/", timeout=0.6) as response:
        chunks, received = response.aiter_raw(), b""
        while received != b"hi" * 4:
            received += await anext(chunks)
        async with asyncio.timeout(2):
            with pytest.raises(httpx.ReadTimeout):
                await anext(chunks)


async def test_a_shorter_time_is_kept_on_a_connection_that_has_waited_with_a_longer_one():
    num_asked = 0

    async def hesitant(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal num_asked
        while True:
            await read_request(reader)
            num_asked += 1
            if num_asked == 1:
                writer.write(OK)

    async with talking(hesitant) as (server, client):
        await client.get("/", timeout=60)
        async with asyncio.timeout(5):
            with pytest.raises(httpx.ReadTimeout, match=r"no answer came within 0\.1 s"):
                await client.get("/", timeout=0.1)
    assert (num_asked, server.num_connections) == (2, 1)


async def test_no_timer_is_left_of_an_answer_that_was_read_or_given_up(monkeypatch: pytest.MonkeyPatch):
    """It would keep the connection, and all that it holds, until the time for reading is over."""
    connections: list[weakref.ref[Connection]] = []

    class Watched(Connection):
        def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
            super().__init__(loop)
            connections.append(weakref.ref(self))

    async def endless(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(CHUNKED + b"2\r\nhi\r\n")
        await reader.read()

    monkeypatch.setattr(http_transport, "Connection", Watched)
    async with talking(answering(OK)) as (_, client):
        await client.get("/", timeout=60)
    async with talking(endless) as (_, client), client.stream("GET", "/", timeout=60) as response:
        await anext(response.aiter_raw())
    assert len(connections) == 2
    del response
    await eventually(lambda: gc.collect() >= 0 and not any(each() for each in connections))


async def test_a_request_must_be_taken_as_a_whole_within_the_time_for_writing():
    async def sip(reader: asyncio.StreamReader, _: asyncio.StreamWriter) -> None:
        async with asyncio.timeout(2):
            while await reader.read(2**16):  # noqa: ASYNC110 - slow on purpose, and waits for nothing
                await asyncio.sleep(0.02)

    async with talking(sip) as (_, client):
        with pytest.raises(httpx.WriteTimeout, match=r"the request was not taken within 0\.2 s"):
            await client.post("/", content=bytes(50 * 2**20), timeout=httpx.Timeout(5, write=0.2))


async def test_a_refusal_is_heard_before_all_of_a_large_body_is_sent():
    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 413 Too Large\r\nContent-Length: 0\r\n\r\n")
        await writer.drain()
        await asyncio.sleep(0.5)

    async with talking(refuse) as (_, client):
        assert (await client.post("/", content=bytes(50 * 2**20))).status_code == 413
        assert (await client.post("/", content=b"")).status_code == 413, "on a connection of its own"


async def test_a_header_with_a_line_end_is_not_sent():
    async with talking(answering(OK)) as (_, client):
        with pytest.raises(httpx.LocalProtocolError):
            await client.get("/", headers={"X": "a\r\nY: b"})


@pytest.mark.parametrize("header", ["Transfer-Encoding", "transfer-encoding"])
async def test_a_body_without_a_length_is_not_sent(header: str):
    async def pieces() -> AsyncIterator[bytes]:
        yield b"hello"

    async with talking(answering(OK)) as (server, client):
        with pytest.raises(httpx.LocalProtocolError, match="transfer-encoding"):
            await client.post("/", content=pieces())
        with pytest.raises(httpx.LocalProtocolError, match="transfer-encoding"):
            await client.post("/", content=b"hello", headers={header: "chunked"})
        assert server.num_connections == 0


async def test_an_answer_knows_its_request():
    async with talking(answering(b"HTTP/1.1 404 No\r\nContent-Length: 0\r\n\r\n")) as (_, client):
        request = client.build_request("GET", "/")
        answer = await client._transport.handle_async_request(request)
        with pytest.raises(httpx.HTTPStatusError, match="404"):
            answer.raise_for_status()
        await answer.aclose()


# --- on the gateway's own event loop --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "scenario",
    [
        test_chunks_are_handed_on_as_they_come,
        test_a_reset_is_no_end_of_an_answer_without_a_length,
        test_who_reads_slowly_lets_the_sender_wait,
        test_a_connection_is_used_again_once_its_answer_was_read,
        test_a_connection_that_was_closed_while_idle_is_replaced,
        test_an_answer_that_is_left_early_closes_its_connection,
        test_a_refusal_is_heard_before_all_of_a_large_body_is_sent,
        test_a_handshake_that_is_cancelled_leaves_no_socket_open,
    ],
)
def test_uvloop_does_the_same(scenario: Callable[[], Coroutine[None, None, None]]):
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(scenario())


@pytest.mark.parametrize(
    "scenario",
    [
        test_tls_is_spoken_and_a_connection_used_again,
        test_a_certificate_must_be_of_the_name_that_the_request_says,
    ],
)
def test_uvloop_speaks_tls_the_same(scenario: Callable[[Path], Coroutine[None, None, None]], tmp_path: Path):
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(scenario(tmp_path))
