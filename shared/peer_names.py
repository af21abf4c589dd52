"""Which name the certificate of a service must hold that is reached by an address and not by its name.

An address says nothing about who is behind it: replicas found by DNS are checked against the name that was looked up.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable

import httpx

Peer = tuple[str, int | None]  # host, port


class PeerNames:
    """default   for addresses of which no name is known; None: the address itself must be in the certificate"""

    def __init__(self, default: str | None = None) -> None:
        self._default = default
        self._names: dict[str, dict[Peer, str]] = {}  # by the address that led to these peers

    def expect(self, address: str, urls: Iterable[str]) -> None:
        """From now on, the host of `address` at the https:// addresses `urls`, to which alone it leads."""
        name = httpx.URL(address).host
        self._names[address] = {_peer(httpx.URL(url)): name for url in urls}

    async def name_request(self, request: httpx.Request) -> None:
        """A hook for an httpx client's requests: says what the connection has to be checked against."""
        if request.url.scheme != "https":
            return
        name = self._name_of(_peer(request.url))
        if name is None and _is_address(request.url.host):
            name = self._default
        if name is not None:
            request.extensions["sni_hostname"] = name

    def _name_of(self, peer: Peer) -> str | None:
        return next((names[peer] for names in self._names.values() if peer in names), None)


def _peer(url: httpx.URL) -> Peer:
    return url.host, url.port


def explain_tls(error: BaseException) -> str | None:
    """What was wrong between two services whose connection failed; None if it was not TLS."""
    cause: BaseException | None = error
    while cause is not None:
        text = str(cause)
        if "CERTIFICATE_VERIFY_FAILED" in text:
            # Up to the comma: what follows repeats the address, which is nothing for the control room to show.
            why = text.partition("certificate verify failed: ")[2].partition(" (_ssl")[0].partition(",")[0]
            setting = "DIPTYCH_TLS_SERVER_NAME" if "mismatch" in why else "DIPTYCH_TLS_CA_FILE"
            return f"its certificate is not trusted: {why}; see {setting}"
        if "[SSL" in text:
            return f"no TLS connection: {text}"
        cause = cause.__cause__ or cause.__context__
    return None


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
