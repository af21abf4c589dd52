"""How answers leave a server: over real sockets, without TLS (tests/integration/test_tls.py has it)."""

from __future__ import annotations

import asyncio
import socket
import time

from starlette.types import Receive, Scope, Send

from shared.http_protocol import JOINED_BYTES
from tests.scripted import serve

LARGE = JOINED_BYTES + 1


async def app(scope: Scope, receive: Receive, send: Send) -> None:
    """The path says what to wait between head and body."""
    if scope["type"] == "lifespan":
        while (await receive())["type"] != "lifespan.shutdown":
            await send({"type": "lifespan.startup.complete"})
        await send({"type": "lifespan.shutdown.complete"})
        return
    await send({"type": "http.response.start", "status": 200, "headers": [(b"x-one", b"1")]})
    if scope["path"] == "/later":
        await asyncio.sleep(0.3)
    if scope["path"] == "/large":
        await send({"type": "http.response.body", "body": memoryview(bytes(LARGE)), "more_body": True})
    await send({"type": "http.response.body", "body": b"HTTP/1.1 is what", "more_body": True})
    await send({"type": "http.response.body", "body": b" this is about", "more_body": False})


def pieces(url: str, path: bytes) -> list[bytes]:
    """What arrives, apart where it arrives at different times."""
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=5) as client:
        client.sendall(b"GET %s HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n" % path)
        arrived = []
        while piece := client.recv(65536):
            arrived.append(piece)
            time.sleep(0.01)
    return arrived


def test_the_head_of_an_answer_comes_with_what_is_there_of_its_body():
    with serve(app) as url:
        first = pieces(url, b"/now")[0]
    assert first.startswith(b"HTTP/1.1 200 OK\r\n")
    assert b"HTTP/1.1 is what" in first


def test_a_head_does_not_wait_for_a_body_that_is_not_there_yet():
    with serve(app) as url:
        first, *rest = pieces(url, b"/later")
    assert first.endswith(b"\r\n\r\n")
    assert b"x-one: 1\r\n" in first
    assert b"".join(rest).startswith(b"10\r\nHTTP/1.1 is what\r\n")


def test_a_large_body_follows_its_head_whole():
    with serve(app) as url:
        answer = b"".join(pieces(url, b"/large"))
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 OK\r\n")
    assert body.startswith(b"%x\r\n\0" % LARGE)
    assert body.count(b"\0") == LARGE


def test_what_the_server_refuses_by_itself_arrives_before_the_connection_ends():
    with serve(app) as url:
        assert pieces(url, b"/\x00")[0].startswith(b"HTTP/1.1 400 Bad Request\r\n")
