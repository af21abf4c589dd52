"""Keeps a pool true: re-resolves names, probes every replica, reads what it publishes about itself."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from typing import Generic, TypeVar
from urllib.parse import urlsplit

import httpx
from pydantic import BaseModel, ValidationError

from services.gateway.balancer import Pool, Replica
from services.gateway.config import BY_NAME
from shared.errors import ClientCertificateRequired
from shared.log import get_logger
from shared.peer_names import PeerNames, explain_tls
from shared.wire.common import SCHEMA_VERSION, Spoken

log = get_logger(__name__)
PublishedInfo = TypeVar("PublishedInfo", bound=BaseModel)


class OtherVersion(Exception):
    """A replica is ready, but speaks another version of `shared.wire` than this gateway."""

    def __init__(self, spoken: int) -> None:
        newer = "gateway" if spoken > SCHEMA_VERSION else "replica"
        super().__init__(
            f"it speaks wire version {spoken} and this gateway version {SCHEMA_VERSION}: the {newer} must be upgraded"
        )


class Discovery(Generic[PublishedInfo]):
    """Watches the replicas of one service until closed.

    addresses   http(s)://host:port (one replica), or dns://host:port or dns+https://host:port (one replica for every
                address of the name)
    names       told what the certificates of replicas found by name must hold
    info_path   where a replica publishes its `info_type`
    """

    def __init__(
        self,
        *,
        service: str,
        addresses: tuple[str, ...],
        pool: Pool[PublishedInfo],
        info_path: str,
        info_type: type[PublishedInfo],
        http: httpx.AsyncClient,
        names: PeerNames,
        probe_interval_s: float,
        probe_timeout_s: float,
        resolve_interval_s: float,
    ) -> None:
        self._service = service
        self._addresses = addresses
        self._pool = pool
        self._info_path = info_path
        self._info_type = info_type
        self._http = http
        self._names = names
        self._probe_interval_s = probe_interval_s
        self._probe_timeout_s = probe_timeout_s
        self._resolve_interval_s = resolve_interval_s
        self._tasks: list[asyncio.Task[None]] = []
        self._probes: dict[str, asyncio.Task[None]] = {}
        self._resolved: dict[str, list[str]] = {}

    async def start(self) -> None:
        """Look once, so that a running service is known before the first request, then keep looking."""
        await self._resolve()
        await asyncio.gather(*self._start_probes())
        self._tasks = [asyncio.create_task(self._keep_probing())]
        if any(_is_name(address) for address in self._addresses):
            self._tasks.append(asyncio.create_task(self._keep_resolving()))

    async def close(self) -> None:
        tasks = [*self._tasks, *self._probes.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _keep_probing(self) -> None:
        while True:
            await asyncio.sleep(self._probe_interval_s)
            self._start_probes()

    async def _keep_resolving(self) -> None:
        while True:
            await asyncio.sleep(self._resolve_interval_s)
            await self._resolve()

    async def _resolve(self) -> None:
        for address in self._addresses:
            if not _is_name(address):
                self._resolved[address] = [address]
                continue
            try:
                self._resolved[address] = await resolve_replicas(address)
            except OSError as error:
                # The replicas of the last good answer stay: a name server's hiccup must not empty the pool.
                log.warning("name does not resolve", target=self._service, address=address, reason=str(error))
        for address, urls in self._resolved.items():
            if _is_name(address):
                self._names.expect(address, urls)
        self._pool.update(url for urls in self._resolved.values() for url in urls)
        self._forget_the_vanished()

    def _forget_the_vanished(self) -> None:
        urls = {replica.url for replica in self._pool.replicas}
        for url in self._probes.keys() - urls:
            # It would find a certificate for which no name is expected any more, and complain of it.
            self._probes.pop(url).cancel()

    def _start_probes(self) -> list[asyncio.Task[None]]:
        """Side by side, and none twice at a time: a replica that does not answer delays no other's probe."""
        self._probes = {url: probe for url, probe in self._probes.items() if not probe.done()}
        idle = [replica for replica in self._pool.replicas if replica.url not in self._probes]
        for replica in idle:
            self._probes[replica.url] = asyncio.create_task(self._probe(replica))
        return [self._probes[replica.url] for replica in idle]

    async def _probe(self, replica: Replica[PublishedInfo]) -> None:
        was_ready, was_problem = replica.ready, replica.problem
        reason = problem = ""
        try:
            async with asyncio.timeout(self._probe_timeout_s):
                info = await self._ask(replica.url)
            reason = "" if info is not None else "it says that it is not ready"
            self._pool.probed(replica, ready=info is not None, info=info)
        except (TimeoutError, httpx.TimeoutException):
            reason = "it does not answer"
            self._pool.missed_probe(replica)
        except (httpx.HTTPError, ValidationError) as error:
            reason = _reason(error)
            problem = explain_tls(error) or _refusal(error)
            self._pool.probed(replica, ready=False, info=None)
        except OtherVersion as error:
            problem = str(error)
            self._pool.probed(replica, ready=False, info=None)
        replica.problem, replica.reason = problem, reason
        if problem and problem != was_problem:
            log.error("replica cannot be used", target=self._service, replica=replica.url, reason=problem)
        if replica.ready != was_ready:
            state = "ready" if replica.ready else "not ready"
            tell = log.info if replica.ready else log.warning
            tell("replica changed", target=self._service, replica=replica.url, state=state, reason=reason)

    async def _ask(self, url: str) -> PublishedInfo | None:
        """What a ready replica publishes; None if it says that it is not ready. Raises OtherVersion."""
        if (await self._http.get(f"{url}/ready")).status_code != 200:
            return None
        # Read every time: a replica may have been restarted with another model between two probes.
        answer = await self._http.get(f"{url}{self._info_path}")
        answer.raise_for_status()
        spoken = Spoken.model_validate_json(answer.content).schema_version
        if spoken != SCHEMA_VERSION:
            raise OtherVersion(spoken)
        return self._info_type.model_validate_json(answer.content)


def _reason(error: httpx.HTTPError | ValidationError) -> str:
    """For people; addresses stay in the log."""
    if isinstance(error, httpx.HTTPStatusError):
        return f"it answers with status {error.response.status_code}"
    if isinstance(error, httpx.ConnectError):
        return "nobody can be reached there"
    if isinstance(error, httpx.TransportError):
        return "the connection to it broke"
    return "what it says of itself is not understood"


def _refusal(error: httpx.HTTPError | ValidationError) -> str:
    """What the replica wants to see of this gateway; "" if it does not refuse it."""
    if not isinstance(error, httpx.HTTPStatusError) or error.response.status_code != httpx.codes.UNAUTHORIZED:
        return ""
    if ClientCertificateRequired.code in error.response.text:
        return "it wants a client certificate: DIPTYCH_TLS_CERT_FILE is not set here"
    return "it refuses this gateway: DIPTYCH_SERVICE_TOKEN differs"


def _is_name(address: str) -> bool:
    return urlsplit(address).scheme in BY_NAME


async def resolve_replicas(address: str) -> list[str]:
    """dns://name:port -> http://address:port for every address of the name, sorted. Raises OSError."""
    parts = urlsplit(address)
    scheme = BY_NAME[parts.scheme]
    try:
        found = await asyncio.get_running_loop().getaddrinfo(parts.hostname, parts.port, type=socket.SOCK_STREAM)
    except UnicodeError as error:
        raise OSError(f"{parts.hostname!r} is no host name: {error}") from error
    hosts = sorted({str(sockaddr[0]) for *_, sockaddr in found})
    return [f"{scheme}://{f'[{h}]' if _is_ipv6(h) else h}:{parts.port}" for h in hosts]


def _is_ipv6(host: str) -> bool:
    return ipaddress.ip_address(host).version == 6
