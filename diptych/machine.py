"""What this machine offers: cores, memory, ports. Reads only what the operating system says; changes nothing."""

from __future__ import annotations

import contextlib
import os
import random
import socket
from pathlib import Path


def cpu_flags() -> frozenset[str]:
    """Instruction-set extensions as Linux names them; empty elsewhere."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(("flags", "Features")):
                return frozenset(line.partition(":")[2].split())
    return frozenset()


def port_is_free(host: str, port: int) -> bool:
    """Whether a server could listen there now. SO_REUSEADDR as servers set it: a closing connection is no owner."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
    except (OSError, UnicodeError):  # UnicodeError: a name that no host can have
        return False
    return True


# Below every range from which a system takes ports for outgoing connections (Linux 32768 and up, IANA 49152 and up).
_SERVER_PORTS = range(10_000, 30_000)


def free_ports(count: int) -> list[int]:
    """Distinct free ports on loopback, for servers that are about to start.

    A port that the system hands out (`bind` to 0) may be an outgoing connection's a moment later, before its server
    has it. These are drawn from where no outgoing connection gets one, and by chance, so that two programs that ask
    at the same time get different ones.
    """
    ports: list[int] = []
    for port in random.SystemRandom().sample(_SERVER_PORTS, len(_SERVER_PORTS)):
        if len(ports) == count:
            break
        if port_is_free("127.0.0.1", port):
            ports.append(port)
    return ports


def port_owner(port: int) -> str | None:
    """ "process 4711 (python -m http.server)" for the listener on `port`, where the system lets us see it."""
    inodes = _listening_inodes(port)
    if not inodes:
        return None
    wanted = {f"socket:[{inode}]" for inode in inodes}
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # processes of other users, or gone meanwhile
            if any(os.readlink(descriptor) in wanted for descriptor in (process / "fd").iterdir()):
                command = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
                return f"process {process.name} ({command if len(command) <= 80 else f'{command[:80]}…'})"
    return None


def _listening_inodes(port: int) -> set[str]:
    inodes = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with contextlib.suppress(OSError):
            for row in Path(table).read_text().splitlines()[1:]:
                columns = row.split()
                if columns[3] == "0A" and int(columns[1].rpartition(":")[2], 16) == port:  # 0A: LISTEN
                    inodes.add(columns[9])
    return inodes
