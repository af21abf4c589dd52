"""What this machine offers: cores, memory, ports. Reads only what the operating system says; changes nothing."""

from __future__ import annotations

import contextlib
import os
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
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


def free_ports(count: int) -> list[int]:
    """Distinct free ports on loopback. They are held all at once, so that the system hands out different ones."""
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(socket.socket(socket.AF_INET, socket.SOCK_STREAM)) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


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
