"""The system that is broken on purpose: real processes, with a `Link` in front of every one that others call.

gateway ── link ── engine-0, engine-1          (and engine ── the same link ── encoder, to pull embeddings)
   └────── link ── encoder-0, encoder-1
all ────── link ── Valkey
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from diptych.machine import free_ports
from tests.chaos.link import Link
from tests.e2e.system import ROOT, Cache, Service, System

MODEL_FOLDER: Final = ROOT / "models" / "demo" / "checkpoint"
MODEL: Final = "demo"
SETTINGS: Final = {
    "OMP_NUM_THREADS": "1",
    "PYTHONUNBUFFERED": "1",
    "DIPTYCH_ENGINE_DTYPE": "float32",
    "DIPTYCH_ENGINE_KV_CACHE_MEMORY": str(32 << 20),
    "DIPTYCH_ENGINE_EMBEDDING_TIMEOUT_S": "15",
    "DIPTYCH_ENCODER_DTYPE": "float32",
    "DIPTYCH_ENCODER_NUM_DECODE_WORKERS": "1",
    "DIPTYCH_GATEWAY_PROBE_INTERVAL_S": "0.3",
    "DIPTYCH_GATEWAY_PROBE_TIMEOUT_S": "1",
    "DIPTYCH_GATEWAY_ADMIT_TIMEOUT_S": "4",
    "DIPTYCH_GATEWAY_ENCODE_TIMEOUT_S": "12",
    "DIPTYCH_GATEWAY_START_TIMEOUT_S": "6",
    "DIPTYCH_GATEWAY_IDLE_TIMEOUT_S": "20",
    "DIPTYCH_GATEWAY_REPLICA_WAIT_S": "40",
}


@dataclass(frozen=True, slots=True)
class Holdings:
    """What one service holds when nothing is asked of it: the difference of two of these is a leak."""

    num_files: int
    num_children: int
    num_threads: int
    rss_bytes: int
    num_open: float  # requests, encodes, referenced blocks: whatever must be 0 in a quiet service


@dataclass
class Cluster:
    system: System
    links: dict[str, Link]
    folder: Path

    @property
    def engine_links(self) -> list[Link]:
        return [self.links[engine.name] for engine in self.system.engines]

    @property
    def encoder_links(self) -> list[Link]:
        return [self.links[encoder.name] for encoder in self.system.encoders]

    @property
    def cache_link(self) -> Link:
        return self.links["cache"]

    def is_whole(self) -> bool:
        """The gateway says that every replica is ready."""
        system = self.system
        return system.num_ready("text_engines") == len(system.engines) and system.num_ready("vision_encoders") == len(
            system.encoders
        )

    def holdings(self) -> dict[str, Holdings]:
        return {service.name: _holdings(service) for service in self.system.services}

    def wait_until_quiet(self, within_s: float = 30.0) -> dict[str, Holdings]:
        """What is held when nothing is open any more, or at the latest after `within_s`."""
        end = time.monotonic() + within_s
        while True:
            held = self.holdings()
            if all(each.num_open == 0 for each in held.values()) or time.monotonic() > end:
                return held
            time.sleep(0.2)


def _holdings(service: Service) -> Holdings:
    folder = Path(f"/proc/{service.pid}")
    return Holdings(
        num_files=len(os.listdir(folder / "fd")),
        num_children=len(service.workers()),
        num_threads=len(os.listdir(folder / "task")),
        rss_bytes=service.rss_bytes(),
        num_open=_num_open(service),
    )


def _num_open(service: Service) -> float:
    if service.name.startswith("engine"):
        state = service.http.get("/v1/cache").json()
        return float(state["num_referenced"]) + service.metric("num_requests_waiting")
    if service.name.startswith("encoder"):
        return service.metric("encoder_queued_images")
    waiting = service.metric("gateway_requests_waiting_for_replica")
    return service.metric("gateway_replica_outstanding") + service.metric("gateway_encodes_in_flight") + waiting


@contextmanager
def running_cluster(
    folder: Path, num_encoders: int = 2, num_engines: int = 2, *, linked: bool = True, **settings: str
) -> Iterator[Cluster]:
    """linked   False: the gateway calls engines and encoders directly, for links take time of whoever measures"""
    cache_port, gateway_port, *ports = free_ports(2 + num_encoders + num_engines)
    link_ports = free_ports(1 + num_encoders + num_engines)
    cache = Cache(cache_port)
    cache_link = Link(link_ports[0], cache_port)
    env = {name: value for name, value in os.environ.items() if not name.startswith("DIPTYCH_")}
    env |= SETTINGS | {"REDIS_URL": f"redis://127.0.0.1:{cache_link.port}/0"} | settings
    served = f"--served-model-name={MODEL}"
    names = [f"encoder-{i}" for i in range(num_encoders)] + [f"engine-{i}" for i in range(num_engines)]
    services = [
        Service(name, [_command(name), str(MODEL_FOLDER), served], port, env, folder)
        for name, port in zip(names, ports, strict=True)
    ]
    links = {"cache": cache_link} | {
        service.name: Link(port, int(urlsplit(service.url).port or 0))
        for service, port in zip(services, link_ports[1:], strict=True)
    }
    encoders, engines = services[:num_encoders], services[num_encoders:]
    urls = {service.name: links[service.name].url if linked else service.url for service in services}
    addresses = [
        f"--vision-encoders={','.join(urls[encoder.name] for encoder in encoders)}",
        f"--text-engines={','.join(urls[engine.name] for engine in engines)}",
    ]
    gateway = Service("gateway", ["gateway", *addresses], gateway_port, env, folder)
    system = System(gateway, encoders, engines, cache)
    with ExitStack() as stack:
        for link in links.values():
            link.start()
            stack.callback(link.close)
        stack.callback(system.close)
        system.arrange()
        yield Cluster(system, links, folder)


def _command(name: str) -> str:
    return "vision-encoder" if name.startswith("encoder") else "text-engine"


def restart(service: Service) -> None:
    with contextlib.suppress(OSError):
        service.kill()
    service.start()
