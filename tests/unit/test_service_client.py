"""The short way to ask another service: which of the client's settings it heeds, and which not."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import pytest
from pydantic import SecretStr

from shared.peer_names import PeerNames
from shared.service_client import ServiceClient
from shared.tls import Tls
from tests.ports import refusing_port

URL = "http://engine:8002/v1/generate"
TOKEN = "t" * 32


class Recorder(httpx.AsyncBaseTransport):
    """Answers every request with a redirect, and keeps what came."""

    def __init__(self) -> None:
        self.requests: list[httpx.Request] = []

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(request)
        return httpx.Response(307, headers={"Location": "http://elsewhere/"}, request=request)


@asynccontextmanager
async def recorded() -> AsyncIterator[tuple[ServiceClient, Recorder]]:
    names, tokens = PeerNames(), [SecretStr(TOKEN), SecretStr("old" * 10)]
    async with ServiceClient(
        tls=Tls("services"), names=names, tokens=tokens, timeout=httpx.Timeout(7, connect=2)
    ) as it:
        recorder = Recorder()
        it._http_transport = recorder  # type: ignore[assignment]
        yield it, recorder


async def test_the_token_timeouts_and_hooks_of_the_client_hold_for_the_short_way():
    async with recorded() as (client, recorder):

        async def hook(request: httpx.Request) -> None:
            request.headers["traceparent"] = "00-1"

        client.event_hooks["request"].append(hook)
        await client.open("POST", URL, content="body", headers={"Content-Type": "text/plain"})
    [sent] = recorder.requests
    assert dict(sent.headers) == {
        "host": "engine:8002",
        "content-length": "4",
        "content-type": "text/plain",
        "authorization": f"Bearer {TOKEN}",
        "traceparent": "00-1",
    }
    assert sent.extensions["timeout"] == {"connect": 2, "read": 7, "write": 7, "pool": 7}


async def test_a_header_is_sent_once_however_its_name_is_written():
    async with recorded() as (client, recorder):
        await client.open("POST", URL, content="", headers={"AUTHORIZATION": "Bearer mine"})
        await client.open("POST", URL, content="", headers={})
    assert [request.headers.get_list("authorization") for request in recorder.requests] == [
        ["Bearer mine"],
        [f"Bearer {TOKEN}"],
    ]


async def test_the_short_way_follows_no_redirects_and_knows_no_cookies():
    async with recorded() as (client, recorder):
        client.follow_redirects = True
        client.cookies.set("a", "b")
        answer = await client.open("POST", URL, content="", headers={})
    assert answer.status_code == 307
    assert [str(request.url) for request in recorder.requests] == [URL]
    assert "cookie" not in recorder.requests[0].headers


async def test_who_does_not_answer_is_a_failure_of_httpx_usual_kinds():
    async with ServiceClient(tls=Tls("services"), names=PeerNames(), tokens=[]) as client:
        with refusing_port() as port, pytest.raises(httpx.ConnectError):
            await client.open("POST", f"http://127.0.0.1:{port}/", content="", headers={})
        with pytest.raises(httpx.ConnectError):
            await client.open("POST", "http://text..engine:8000/", content="", headers={})
