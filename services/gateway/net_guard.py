"""Which image URLs may be fetched, and from which addresses: the guard against server-side request forgery.

Two checks, both for every hop: the URL as written (scheme, host, port), and every address that the host's name has at
the moment of connecting. The caller connects to the addresses returned here and to nothing else, so a name that
changes its answer between check and use gains nothing.
"""

from __future__ import annotations

import asyncio
import ipaddress
import re
import socket
from collections.abc import Awaitable, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from urllib.parse import urlsplit

from shared.errors import ForbiddenUrl, ImageFetchFailed, InvalidImageUrl

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Resolver = Callable[[str, int], Awaitable[list[str]]]

MAX_URL_CHARS = 8192
DEFAULT_PORTS = {"http": 80, "https": 443}

# Written out rather than left to `is_global`, whose answers change between Python versions.
_FORBIDDEN_V4 = tuple(
    ipaddress.IPv4Network(network)
    for network in (
        "0.0.0.0/8",  # this network
        "10.0.0.0/8",  # private
        "100.64.0.0/10",  # carrier-grade NAT; some clouds' metadata
        "127.0.0.0/8",  # loopback
        "169.254.0.0/16",  # link-local; most clouds' metadata
        "168.63.129.16/32",  # Azure's host agent, a public address that is not public
        "172.16.0.0/12",  # private
        "192.0.0.0/24",  # protocol assignments; Oracle's metadata
        "192.0.2.0/24",  # documentation
        "192.88.99.0/24",  # 6to4 relays
        "192.168.0.0/16",  # private
        "198.18.0.0/15",  # benchmarks
        "198.51.100.0/24",  # documentation
        "203.0.113.0/24",  # documentation
        "224.0.0.0/4",  # multicast
        "240.0.0.0/4",  # reserved, broadcast
    )
)
# Of IPv6 only global unicast is open at all; these lie within it or carry an IPv4 address that can be looked at.
_GLOBAL_UNICAST_V6 = ipaddress.IPv6Network("2000::/3")
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
_FORBIDDEN_V6 = tuple(
    ipaddress.IPv6Network(network)
    for network in (
        "2001::/23",  # protocol assignments, Teredo and ORCHID among them
        "2001:db8::/32",  # documentation
        "2002::/16",  # 6to4 wraps any IPv4 address
        "3fff::/20",  # documentation
    )
)
_DOTTED_QUAD = re.compile(r"(0|[1-9][0-9]{0,2})(\.(0|[1-9][0-9]{0,2})){3}")
_NUMERIC_LABEL = re.compile(r"[0-9]+|0x[0-9a-f]*", re.IGNORECASE)
_HOST_NAME = re.compile(r"[a-z0-9_]([a-z0-9_-]*[a-z0-9_])?(\.[a-z0-9_]([a-z0-9_-]*[a-z0-9_])?)*\.?", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class FetchTarget:
    """A URL taken apart once, so that the guard and the HTTP client cannot read it differently."""

    scheme: str
    host: str
    port: int
    path_and_query: str

    @property
    def host_header(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == DEFAULT_PORTS[self.scheme] else f"{host}:{self.port}"

    @property
    def url(self) -> str:
        """One spelling for all that mean the same request."""
        return f"{self.scheme}://{self.host_header}{self.path_and_query}"


class NetGuard:
    """Decides about URLs and addresses.

    allow_private_addresses   lifts the address check altogether
    allowed_hosts             "host" or "host:port" entries whose addresses are not checked
    denied_hosts, only_hosts  "host", or ".domain" for all below it: never asked; if given, the only ones asked
    """

    def __init__(
        self,
        resolve: Resolver,
        *,
        allow_private_addresses: bool = False,
        allowed_hosts: Iterable[str] = (),
        denied_hosts: Iterable[str] = (),
        only_hosts: Iterable[str] = (),
    ) -> None:
        self._allow_private_addresses = allow_private_addresses
        self._allowed_hosts = frozenset(host.lower() for host in allowed_hosts)
        self._denied_hosts = frozenset(host.lower() for host in denied_hosts)
        self._only_hosts = frozenset(host.lower() for host in only_hosts)
        self._resolve = resolve

    def check_host(self, host: str) -> None:
        """Raises ForbiddenUrl if this server's operator does not want pictures from there."""
        if _is_listed(host, self._denied_hosts) or (self._only_hosts and not _is_listed(host, self._only_hosts)):
            raise ForbiddenUrl(f"pictures from the host {host!r} are not fetched by this server")

    async def addresses(self, host: str, port: int) -> list[str]:
        """Every address of `host`, all of them allowed.

        Raises ForbiddenUrl if any one is not (a mixed answer is an attack or a mistake), ImageFetchFailed if the name
        has none.
        """
        try:
            found = await self._resolve(host, port)
        except OSError as error:
            raise ImageFetchFailed(f"the host {host!r} could not be found") from error
        if not found:
            raise ImageFetchFailed(f"the host {host!r} has no address")
        if not self._is_trusted(host, port):
            for text in found:
                if not is_public(ipaddress.ip_address(text.partition("%")[0])):
                    raise ForbiddenUrl(
                        f"the host {host!r} has an address that is not on the public internet; those are refused"
                    )
        return found

    def _is_trusted(self, host: str, port: int) -> bool:
        host = host.lower()
        bracketed = f"[{host}]" if ":" in host else host
        return self._allow_private_addresses or not self._allowed_hosts.isdisjoint({host, f"{bracketed}:{port}"})


def parse_url(url: str) -> FetchTarget:
    """Take a http(s) URL apart strictly; anything that two parsers might read differently is refused.

    Raises InvalidImageUrl for what is no such URL, ForbiddenUrl for another scheme or a disguised address.
    """
    if len(url) > MAX_URL_CHARS:
        raise InvalidImageUrl(f"the URL has {len(url)} characters; at most {MAX_URL_CHARS}")
    if not url.isascii() or any(char <= " " or char in '\\<>"^`{|}\x7f' for char in url):
        raise InvalidImageUrl(
            "the URL holds characters that must be percent-encoded (or a host name not in its ASCII form)"
        )
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise InvalidImageUrl("the URL's host or port is malformed") from error
    scheme = parts.scheme.lower()
    if scheme not in DEFAULT_PORTS:
        raise ForbiddenUrl("only data:, http: and https: image URLs are accepted")
    if parts.username is not None or parts.password is not None:
        raise ForbiddenUrl("image URLs with a user name or password are refused")
    if "[" in parts.netloc and ":" not in (parts.hostname or ""):
        raise InvalidImageUrl("the URL's IPv6 address is malformed")
    if port == 0:
        raise InvalidImageUrl("port 0 cannot be connected to")
    path_and_query = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    return FetchTarget(scheme, _checked_host(parts.hostname or ""), port or DEFAULT_PORTS[scheme], path_and_query)


def _checked_host(host: str) -> str:
    if ":" in host:
        try:
            if "%" in host:
                raise ValueError("zone identifiers name an interface of this machine")
            return str(ipaddress.IPv6Address(host))
        except ValueError as error:
            raise InvalidImageUrl("the URL's IPv6 address is malformed") from error
    if not _HOST_NAME.fullmatch(host) or len(host) > 253:
        raise InvalidImageUrl("the URL has no valid host name")
    # 127.1, 2130706433, 0x7f000001 and 0177.0.0.1 are addresses to some parsers and names to others.
    last_label = host.rstrip(".").rpartition(".")[2]
    if _NUMERIC_LABEL.fullmatch(last_label) and not _DOTTED_QUAD.fullmatch(host):
        raise ForbiddenUrl("IPv4 addresses must be written as four decimal numbers")
    return host.lower()


def is_public(address: Address) -> bool:
    """Whether an address is an ordinary one on the public internet."""
    if isinstance(address, ipaddress.IPv4Address):
        return not any(address in network for network in _FORBIDDEN_V4)
    if address.ipv4_mapped is not None:
        return is_public(address.ipv4_mapped)
    if address in _NAT64:
        return is_public(ipaddress.IPv4Address(int(address) & 0xFFFFFFFF))
    return address in _GLOBAL_UNICAST_V6 and not any(address in network for network in _FORBIDDEN_V6)


class HostResolver:
    """Names to addresses, in threads of its own.

    A look-up cannot be cancelled, and a client that sends URLs can make it slow: only other images may wait for it.
    """

    def __init__(self, max_lookups: int = 16) -> None:
        self._threads = ThreadPoolExecutor(max_lookups, thread_name_prefix="resolve")

    async def __call__(self, host: str, port: int) -> list[str]:
        """All addresses of a name, in the order the system prefers. Raises OSError."""
        look_up = partial(socket.getaddrinfo, host, port, type=socket.SOCK_STREAM)
        try:
            found = await asyncio.get_running_loop().run_in_executor(self._threads, look_up)
        except UnicodeError as error:  # a label that is too long or empty
            raise OSError("not a host name") from error
        return list(dict.fromkeys(str(sockaddr[0]) for *_, sockaddr in found))

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)


def _is_listed(host: str, hosts: frozenset[str]) -> bool:
    """Itself, or one of the domains above it written with a leading dot."""
    name = host.lower().rstrip(".")
    labels = name.split(".")
    return name in hosts or any("." + ".".join(labels[i:]) in hosts for i in range(1, len(labels)))
