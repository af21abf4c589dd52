"""Fetches one image over http(s): guarded connections, redirects by hand, one deadline, a size cap, a few retries.

No connection is kept: each serves one request and is closed with it. Pictures are, where their servers allow it.
"""

from __future__ import annotations

import asyncio
import random
import ssl
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from urllib.parse import urljoin

import httpcore

from services.gateway.net_guard import FetchTarget, NetGuard, parse_url
from services.gateway.picture_cache import PictureCache, parse_seconds
from shared.errors import ForbiddenUrl, ImageFetchFailed, ImageTooLarge

REDIRECTS = frozenset({301, 302, 303, 307, 308})
USER_AGENT = b"diptych-gateway"
# The server could not answer just now; RFC 9110 lets a client ask again.
TRANSIENT_STATUSES = frozenset({429, 502, 503, 504})
MAX_ATTEMPTS = 3
LISTS = frozenset({b"cache-control", b"vary"})
MAX_DIGITS = 18
FIRST_BACKOFF_S = 0.1


class TransientFailure(ImageFetchFailed):
    """The same request may succeed a moment later; not before `retry_after_s`, if the server named a time."""


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
        max_cached_bytes: int,
        ssl_context: ssl.SSLContext,
    ) -> None:
        self._guard = guard
        self._cache = PictureCache(max_cached_bytes)
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
            self._guard.check_host(target.host)
            answer = await self._get_patiently(target, max_bytes)
            if isinstance(answer, bytes):
                return answer
            try:
                url = urljoin(url, answer)
            except ValueError as error:  # brackets that hold no address
                raise ImageFetchFailed(f"{target.host!r} redirects to a malformed URL") from error
        raise ImageFetchFailed(f"more than {self._max_redirects} redirects")

    async def _get_patiently(self, target: FetchTarget, max_bytes: int) -> bytes | str:
        """As `_get`, asked again after a pause where that may help; the deadline of the whole fetch goes on, and others
        may ask the host meanwhile."""
        for attempt in range(MAX_ATTEMPTS - 1):
            try:
                async with self._limits.slot(target.host):
                    return await self._get(target, max_bytes)
            except TransientFailure as failure:
                wait_s = failure.retry_after_s or 0.0
                if wait_s > self._timeout_s:
                    raise
                backoff_s = FIRST_BACKOFF_S * 2**attempt * random.uniform(0.5, 1.5)  # noqa: S311 - no secret
                await asyncio.sleep(max(backoff_s, wait_s))
        async with self._limits.slot(target.host):
            return await self._get(target, max_bytes)

    async def _get(self, target: FetchTarget, max_bytes: int) -> bytes | str:
        """The body, or where a redirect points."""
        stored = self._cache.get(target.url)
        if stored is not None and len(stored.data) > max_bytes:
            stored = None
        if stored is not None and self._cache.is_fresh(stored):
            return stored.data
        url = httpcore.URL(scheme=target.scheme, host=target.host, port=target.port, target=target.path_and_query)
        headers = [
            (b"Host", target.host_header.encode()),
            (b"User-Agent", USER_AGENT),
            (b"Accept", b"image/*,*/*;q=0.1"),
            (b"Accept-Encoding", b"identity"),
            (b"Connection", b"close"),
            *(stored.conditions if stored is not None else ()),
        ]
        try:
            async with self._http.stream("GET", url, headers=headers) as response:
                fields = _fields(response.headers)
                if response.status in REDIRECTS and b"location" in fields:
                    return fields[b"location"].decode("latin-1")
                if response.status == 304 and stored is not None:
                    self._cache.renew(target.url, fields)
                    return stored.data
                _check_answer(target, response.status, fields, max_bytes)
                data = await _read(response, max_bytes)
                self._cache.put(target.url, data, fields)
                return data
        except (httpcore.ProtocolError, ssl.SSLError) as error:
            raise ImageFetchFailed(f"the connection to {target.host!r} failed: {_reason(error)}") from error
        except (httpcore.NetworkError, httpcore.TimeoutException) as error:
            failure = ImageFetchFailed if isinstance(error.__cause__, ssl.SSLError) else TransientFailure
            raise failure(f"the connection to {target.host!r} failed: {_reason(error)}") from error


def _fields(headers: Iterable[tuple[bytes, bytes]]) -> dict[bytes, bytes]:
    """By lower-case name; what is said several times counts as one list, as RFC 9110 has it."""
    fields: dict[bytes, bytes] = {}
    for name, value in headers:
        key = name.lower()
        fields[key] = fields[key] + b", " + value if key in LISTS and key in fields else value
    return fields


def _check_answer(target: FetchTarget, status: int, fields: dict[bytes, bytes], max_bytes: int) -> None:
    if status in TRANSIENT_STATUSES:
        raise TransientFailure(
            f"{target.host!r} answered the request for the image with status {status}",
            retry_after_s=parse_seconds(fields.get(b"retry-after", b"")),
        )
    if status != 200:
        raise ImageFetchFailed(f"{target.host!r} answered the request for the image with status {status}")
    if fields.get(b"content-encoding", b"identity").lower() not in (b"identity", b""):
        raise ImageFetchFailed(f"{target.host!r} sent the image compressed although that was declined")
    announced = fields.get(b"content-length", b"")[:MAX_DIGITS]
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
