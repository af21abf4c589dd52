"""Fetches one image over http(s): guarded connections, redirects by hand, one deadline, a size cap.

Nothing is kept: a connection serves one fetch and is closed with it.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from urllib.parse import urljoin

import httpcore

from services.gateway.net_guard import FetchTarget, NetGuard, parse_url
from shared.errors import ForbiddenUrl, ImageFetchFailed, ImageTooLarge

REDIRECTS = frozenset({301, 302, 303, 307, 308})
USER_AGENT = b"diptych-gateway"


class GuardedBackend(httpcore.AsyncNetworkBackend):
    """Opens sockets only to addresses that the guard has just checked; name and TLS server name stay the host's."""

    def __init__(self, guard: NetGuard) -> None:
        self._guard = guard
        self._sockets = httpcore.AnyIOBackend()

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,  # noqa: ASYNC109 - the signature is httpcore's
        local_address: str | None = None,
        socket_options: Iterable[httpcore.SOCKET_OPTION] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        refused: httpcore.ConnectError | httpcore.ConnectTimeout | None = None
        for address in await self._guard.addresses(host, port):
            try:
                return await self._sockets.connect_tcp(address, port, timeout, local_address, socket_options)
            except (httpcore.ConnectError, httpcore.ConnectTimeout) as error:
                refused = error
        raise refused or httpcore.ConnectError("no address")

    async def connect_unix_socket(
        self,
        path: str,
        timeout: float | None = None,  # noqa: ASYNC109 - the signature is httpcore's
        socket_options: Iterable[httpcore.SOCKET_OPTION] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        raise ForbiddenUrl("local sockets are never opened")

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


class HostLimits:
    """At most `limit` fetches at a time from one host; hosts without a fetch take no memory."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._hosts: dict[str, tuple[asyncio.Semaphore, int]] = {}

    @asynccontextmanager
    async def slot(self, host: str) -> AsyncIterator[None]:
        semaphore, users = self._hosts.get(host) or (asyncio.Semaphore(self._limit), 0)
        self._hosts[host] = (semaphore, users + 1)
        try:
            async with semaphore:
                yield
        finally:
            semaphore, users = self._hosts.pop(host)
            if users > 1:
                self._hosts[host] = (semaphore, users - 1)


class ImageFetcher:
    def __init__(
        self,
        guard: NetGuard,
        *,
        timeout_s: float,
        max_redirects: int,
        max_fetches_per_host: int,
        ssl_context: ssl.SSLContext,
    ) -> None:
        self._timeout_s = timeout_s
        self._max_redirects = max_redirects
        self._limits = HostLimits(max_fetches_per_host)
        self._http = httpcore.AsyncConnectionPool(
            ssl_context=ssl_context,
            network_backend=GuardedBackend(guard),
            # A kept connection would skip the guard; fetches from one host are too rare to miss it.
            max_keepalive_connections=0,
            max_connections=None,
        )

    async def close(self) -> None:
        await self._http.aclose()

    async def fetch(self, url: str, max_bytes: int) -> bytes:
        """The image's bytes. Raises InvalidImageUrl and its kinds, ImageTooLarge."""
        host = parse_url(url).host
        try:
            async with asyncio.timeout(self._timeout_s):
                return await self._follow(url, max_bytes)
        except TimeoutError as error:
            raise ImageFetchFailed(f"the image was not delivered by {host!r} within {self._timeout_s:g} s") from error

    async def _follow(self, url: str, max_bytes: int) -> bytes:
        for _ in range(self._max_redirects + 1):
            target = parse_url(url)
            async with self._limits.slot(target.host):
                answer = await self._get(target, max_bytes)
            if isinstance(answer, bytes):
                return answer
            try:
                url = urljoin(url, answer)
            except ValueError as error:  # brackets that hold no address
                raise ImageFetchFailed(f"{target.host!r} redirects to a malformed URL") from error
        raise ImageFetchFailed(f"more than {self._max_redirects} redirects")

    async def _get(self, target: FetchTarget, max_bytes: int) -> bytes | str:
        """The body, or where a redirect points."""
        url = httpcore.URL(scheme=target.scheme, host=target.host, port=target.port, target=target.path_and_query)
        headers = [
            (b"Host", target.host_header.encode()),
            (b"User-Agent", USER_AGENT),
            (b"Accept", b"image/*,*/*;q=0.1"),
            (b"Accept-Encoding", b"identity"),
            (b"Connection", b"close"),
        ]
        try:
            async with self._http.stream("GET", url, headers=headers) as response:
                fields = {name.lower(): value for name, value in response.headers}
                if response.status in REDIRECTS and b"location" in fields:
                    return fields[b"location"].decode("latin-1")
                _check_answer(target, response.status, fields, max_bytes)
                return await _read(response, max_bytes)
        except (httpcore.NetworkError, httpcore.ProtocolError, httpcore.TimeoutException, ssl.SSLError) as error:
            raise ImageFetchFailed(f"the connection to {target.host!r} failed: {_reason(error)}") from error


def _check_answer(target: FetchTarget, status: int, fields: dict[bytes, bytes], max_bytes: int) -> None:
    if status != 200:
        raise ImageFetchFailed(f"{target.host!r} answered the request for the image with status {status}")
    if fields.get(b"content-encoding", b"identity").lower() not in (b"identity", b""):
        raise ImageFetchFailed(f"{target.host!r} sent the image compressed although that was declined")
    announced = fields.get(b"content-length", b"")
    if announced.isdigit() and int(announced) > max_bytes:
        raise ImageTooLarge(f"the image has {int(announced)} bytes; at most {max_bytes}")


async def _read(response: httpcore.Response, max_bytes: int) -> bytes:
    body = bytearray()
    async for chunk in response.aiter_stream():
        body += chunk
        if len(body) > max_bytes:
            raise ImageTooLarge(f"the image has more than {max_bytes} bytes")
    if not body:
        raise ImageFetchFailed("the image has 0 bytes")
    return bytes(body)


def _reason(error: Exception) -> str:
    """Our own words: a library's text may name addresses or paths of this machine."""
    match error:
        case httpcore.ConnectError():
            return "it could not be opened"
        case ssl.SSLError():
            return "its certificate or TLS set-up was not accepted"
        case httpcore.TimeoutException():
            return "it timed out"
        case httpcore.ProtocolError():
            return "it does not speak HTTP properly"
        case _:
            return "it was closed before the image was complete"
