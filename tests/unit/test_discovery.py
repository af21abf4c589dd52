"""What the gateway keeps of replicas that it finds by name, and what it forgets once they are gone."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import httpx
import pytest

from services.gateway import discovery
from services.gateway.balancer import Pool
from services.gateway.discovery import Discovery
from shared.peer_names import PeerNames
from shared.wire.engine import ModelInfo

ADDRESS = "dns+https://engines:8002"
Answer = Callable[[httpx.Request], Awaitable[httpx.Response]]


class Panel:
    """Replicas behind one name: those at `urls` are there, and each answers what `answer` says."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, answer: Answer) -> None:
        self.urls: list[str] = []
        self.names = PeerNames()
        self.pool: Pool[ModelInfo] = Pool(time.monotonic, random.Random(7))
        self._answer = answer
        monkeypatch.setattr(discovery, "resolve_replicas", self._resolve)

    async def _resolve(self, address: str) -> list[str]:
        assert address == ADDRESS
        return self.urls

    @asynccontextmanager
    async def watched(self, *addresses: str) -> AsyncIterator[Discovery[ModelInfo]]:
        async with httpx.AsyncClient(transport=httpx.MockTransport(self._answer)) as http:
            watching = Discovery(
                service="text engine",
                addresses=addresses,
                pool=self.pool,
                info_path="/v1/model",
                info_type=ModelInfo,
                http=http,
                names=self.names,
                probe_interval_s=60,
                probe_timeout_s=60,
                resolve_interval_s=60,
            )
            try:
                yield watching
            finally:
                await watching.close()


async def test_of_replicas_that_are_gone_nothing_is_kept(monkeypatch: pytest.MonkeyPatch):
    async def refuse(request: httpx.Request) -> httpx.Response:
        return httpx.Response(200 if request.url.path == "/ready" else 401)

    panel = Panel(monkeypatch, refuse)
    async with panel.watched(ADDRESS) as watching:
        for number in range(5):
            panel.urls = [f"https://10.0.0.{number}:8002", "https://10.0.1.1:8002"]
            await watching._resolve()
            await asyncio.gather(*watching._start_probes())
            assert watching._probes.keys() == set(panel.urls)
            assert {replica.url for replica in panel.pool.replicas} == set(panel.urls)
            assert sum(map(len, panel.names._names.values())) == 2


async def test_the_probe_of_a_replica_that_is_gone_ends(monkeypatch: pytest.MonkeyPatch):
    async def hang(_: httpx.Request) -> httpx.Response:
        await asyncio.Event().wait()
        raise AssertionError

    panel = Panel(monkeypatch, hang)
    async with panel.watched(ADDRESS) as watching:
        panel.urls = ["https://10.0.0.1:8002", "https://10.0.0.2:8002"]
        await watching._resolve()
        gone, stays = watching._start_probes()
        await asyncio.sleep(0)
        panel.urls = panel.urls[1:]
        await watching._resolve()
        await asyncio.wait([gone], timeout=5)
        assert gone.cancelled()
        assert not stays.done()


async def test_replicas_stay_while_their_name_does_not_resolve(monkeypatch: pytest.MonkeyPatch):
    async def is_not_ready(_: httpx.Request) -> httpx.Response:
        return httpx.Response(503)

    panel = Panel(monkeypatch, is_not_ready)
    async with panel.watched(ADDRESS) as watching:
        panel.urls = ["https://10.0.0.1:8002"]
        await watching._resolve()

        async def fail(address: str) -> list[str]:
            raise OSError("no name server")

        monkeypatch.setattr(discovery, "resolve_replicas", fail)
        await watching._resolve()
        request = httpx.Request("GET", "https://10.0.0.1:8002/ready")
        await panel.names.name_request(request)
        assert request.extensions["sni_hostname"] == "engines"
        assert [replica.url for replica in panel.pool.replicas] == panel.urls
