"""Addresses of our own services, checked when a setting is read: what no client could ask is refused at the start.

Looks up no name and opens no connection.
"""

from __future__ import annotations

import re
from ipaddress import IPv6Address
from typing import Final
from urllib.parse import urlsplit

_HOST: Final = re.compile(r"[a-z0-9_-]+(\.[a-z0-9_-]+)*\.?", re.IGNORECASE)
_NO_IPV6: Final = "names a host in brackets that is no address of IPv6"


def check_service_url(value: str) -> str:
    """`value` as it was given. Raises ValueError saying what is wrong with it, to be read after the value: its scheme,
    its host or its port. Whether a path may follow is for the setting to say."""
    if not value.isprintable() or " " in value:
        raise ValueError("holds a space or a control character")
    try:
        parts = urlsplit(value)
    except ValueError:
        raise ValueError(_NO_IPV6) from None
    if parts.scheme not in ("http", "https"):
        raise ValueError("must start with http:// or https://")
    _check_host(parts.hostname or "")
    try:
        is_port = parts.port != 0
    except ValueError:  # no number, or too large a one
        is_port = False
    if not is_port:
        raise ValueError("has a port that is none; give one from 1 to 65535, or leave it out")
    return value


def _check_host(host: str) -> None:
    if not host:
        raise ValueError("names no host")
    if ":" in host:
        try:
            IPv6Address(host)
        except ValueError:
            raise ValueError(_NO_IPV6) from None
        return
    try:
        is_name = _HOST.fullmatch(host.encode("idna").decode("ascii")) is not None
    except UnicodeError:  # an empty label, or one of more than 63 characters
        is_name = False
    if not is_name:
        raise ValueError(f"names the host {host!r}, and no host can have that name")
