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
FIRST, SECOND = "https://10.0.0.1:8002", "https://10.0.0.2:8002"
Answer = Callable[[httpx.Request], Awaitable[httpx.Response]]


async def is_not_ready(_: httpx.Request) -> httpx.Response:
    return httpx.Response(503)


class Panel:
    """Replicas behind one name: those at `urls` are there, and each answers what `answer` says.

    reason     why the name does not resolve just now
    hanging    replicas whose probes have not ended
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *urls: str) -> None:
        self.urls = list(urls)
        self.answer: Answer = is_not_ready
        self.reason: str | None = None
        self.names = PeerNames()
        self.pool: Pool[ModelInfo] = Pool(time.monotonic, random.Random(7))
        self.hanging: set[str] = set()
        self.num_probes = self.num_resolved = 0
        monkeypatch.setattr(discovery, "resolve_replicas", self._resolve)

    async def _resolve(self, address: str) -> list[str]:
        assert address == ADDRESS
        self.num_resolved += 1
        if self.reason is not None:
            raise OSError(self.reason)
        return self.urls

    async def _probed(self, request: httpx.Request) -> httpx.Response:
        url = str(request.url.copy_with(path="")).rstrip("/")
        self.num_probes += 1
        self.hanging.add(url)
        try:
            return await self.answer(request)
        finally:
            self.hanging.discard(url)

    async def expected_name(self, url: str) -> str | None:
        """What the certificate at this address would have to hold."""
        request = httpx.Request("GET", f"{url}/ready")
        await self.names.name_request(request)
        return request.extensions.get("sni_hostname")

    @property
    def known(self) -> set[str]:
        return {replica.url for replica in self.pool.replicas}

    @asynccontextmanager
    async def watched(self) -> AsyncIterator[None]:
        async with httpx.AsyncClient(transport=httpx.MockTransport(self._probed)) as http:
            watching = Discovery(
                service="text engine",
                addresses=(ADDRESS,),
                pool=self.pool,
                info_path="/v1/model",
                info_type=ModelInfo,
                http=http,
                names=self.names,
                probe_interval_s=0.005,
                probe_timeout_s=60,
                resolve_interval_s=0.005,
            )
            try:
                await watching.start()
                yield
            finally:
                await watching.close()


async def eventually(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not condition():  # noqa: ASYNC110 - of what tasks of ours have done, which wake nobody
            await asyncio.sleep(0.002)


async def test_replicas_that_are_gone_are_forgotten(monkeypatch: pytest.MonkeyPatch):
    panel = Panel(monkeypatch, FIRST, SECOND)
    async with panel.watched():
        assert panel.known == {FIRST, SECOND}
        assert await panel.expected_name(FIRST) == "engines"
        panel.urls = [SECOND, "https://10.0.0.3:8002"]
        await eventually(lambda: panel.known == set(panel.urls))
        assert await panel.expected_name(FIRST) is None
        assert [await panel.expected_name(url) for url in panel.urls] == ["engines", "engines"]


async def test_the_probe_of_a_replica_that_is_gone_ends(monkeypatch: pytest.MonkeyPatch):
    async def hang(_: httpx.Request) -> httpx.Response:
        await asyncio.Event().wait()
        raise AssertionError

    panel = Panel(monkeypatch, FIRST, SECOND)
    async with panel.watched():
        panel.answer = hang
        await eventually(lambda: panel.hanging == {FIRST, SECOND})
        num_probes = panel.num_probes
        panel.urls = [SECOND]
        await eventually(lambda: panel.hanging == {SECOND})
        num_resolved = panel.num_resolved
        await eventually(lambda: panel.num_resolved > num_resolved + 3)
        assert panel.num_probes == num_probes, "a replica that does not answer is asked once at a time"
    assert panel.hanging == set()


async def test_replicas_stay_while_their_name_does_not_resolve(monkeypatch: pytest.MonkeyPatch):
    panel = Panel(monkeypatch, FIRST)
    async with panel.watched():
        panel.reason = "no name server"
        num_resolved = panel.num_resolved
        await eventually(lambda: panel.num_resolved > num_resolved + 1)
        assert await panel.expected_name(FIRST) == "engines"
        assert panel.known == {FIRST}
