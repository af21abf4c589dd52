"""The address that a service listens on, checked when a setting is read. Looks up no name and opens no port."""

from __future__ import annotations

from ipaddress import IPv6Address
from typing import Annotated, Final

from pydantic import AfterValidator

DEFAULT_HOST: Final = "127.0.0.1"


def check_host(value: str) -> str:
    """`value`, an IPv6 address without its brackets; DEFAULT_HOST for a blank one, which counts as unset.

    Raises ValueError saying what is wrong, to be read after the value.
    """
    host = value.strip()
    if not host:
        return DEFAULT_HOST
    if "/" in host:
        raise ValueError("is a URL; give the address alone, e.g. 127.0.0.1, and the port as port")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host and not _is_ipv6(host):
        address, _, port = host.rpartition(":")
        raise ValueError(f"is an address with a port; give them apart, host {address} and port {port}")
    return host


def _is_ipv6(host: str) -> bool:
    try:
        IPv6Address(host)
    except ValueError:
        return False
    return True


Host = Annotated[str, AfterValidator(check_host)]
