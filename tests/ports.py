"""Ports for the tests: one that is about to be used, and one where nobody will ever answer."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager

from diptych.machine import free_ports


def free_port() -> int:
    [port] = free_ports(1)
    return port


@contextmanager
def refusing_port() -> Iterator[int]:
    """A loopback port that refuses every connection. It is held meanwhile, so that no other test's server gets it."""
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))  # bound and not listening
        yield holder.getsockname()[1]
