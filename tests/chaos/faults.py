"""What is broken, for how long, and what may be lost over it.

Everywhere else a request must be answered, and rightly. A function here breaks, waits and heals; traffic goes on.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from shared.embedding_cache import EMBEDDING_PREFIX
from tests.chaos import scarcity
from tests.chaos.cluster import Cluster, restart
from tests.chaos.link import FAIR, Link, Weather
from tests.chaos.traffic import End, Traffic
from tests.e2e.system import Service

HOLD_S: Final = 4.0
NUM_TOGETHER: Final = 200


def no_settings(_folder: Path) -> dict[str, str]:
    return {}


@dataclass(frozen=True, slots=True)
class Fault:
    """act      breaks and heals, while traffic runs
    may_lose    the bad ends that are no fault of ours; `because` says why
    restarts    services that are new processes afterwards, so that what they hold cannot be compared
    settings    variables, made for a folder, that the cluster must have been started with
    why_not     why it cannot be tried on this machine; empty: it can
    """

    act: Callable[[Cluster, Traffic], None]
    may_lose: frozenset[End] = frozenset()
    because: str = ""
    restarts: tuple[str, ...] = ()
    settings: Callable[[Path], dict[str, str]] = no_settings
    why_not: Callable[[], str] = str


def kill_engine(cluster: Cluster, _traffic: Traffic) -> None:
    _kill_and_restart(cluster.system.engines[0])


def kill_encoder(cluster: Cluster, _traffic: Traffic) -> None:
    _kill_and_restart(cluster.system.encoders[0])


def kill_gateway(cluster: Cluster, _traffic: Traffic) -> None:
    _kill_and_restart(cluster.system.gateway)


def kill_redis(cluster: Cluster, _traffic: Traffic) -> None:
    cluster.system.cache.stop()
    time.sleep(HOLD_S)
    cluster.system.cache.start()


def _kill_and_restart(service: Service) -> None:
    service.kill()
    time.sleep(1.0)
    restart(service)
    service.wait_until_ready()


def stop_engine(cluster: Cluster, _traffic: Traffic) -> None:
    with cluster.system.engines[0].paused():
        time.sleep(HOLD_S)


def stop_encoder(cluster: Cluster, _traffic: Traffic) -> None:
    with cluster.system.encoders[0].paused():
        time.sleep(HOLD_S)


def stop_gateway(cluster: Cluster, _traffic: Traffic) -> None:
    with cluster.system.gateway.paused():
        time.sleep(HOLD_S)


def stop_redis(cluster: Cluster, _traffic: Traffic) -> None:
    with cluster.system.cache.paused():
        time.sleep(HOLD_S)


def terminate_engine(cluster: Cluster, _traffic: Traffic) -> None:
    """As an operator restarts it: what runs on it is finished."""
    engine = cluster.system.engines[0]
    engine.signal(signal.SIGTERM)
    engine.wait(40)
    engine.start()
    engine.wait_until_ready()


def weather(links: Callable[[Cluster], Sequence[Link]], bad: Weather) -> Callable[[Cluster, Traffic], None]:
    def act(cluster: Cluster, _traffic: Traffic) -> None:
        for link in links(cluster):
            link.weather = bad
        time.sleep(HOLD_S)
        for link in links(cluster):
            link.weather = FAIR

    return act


def pull_through_bad_link(cluster: Cluster, _traffic: Traffic) -> None:
    """Without Redis the engines pull embeddings from the encoders, here over a slow and lossy link."""
    cluster.system.cache.stop()
    weather(lambda c: c.encoder_links, Weather(delay_s=0.05, loss=0.2))(cluster, _traffic)
    cluster.system.cache.start()


def expire_embeddings(cluster: Cluster, _traffic: Traffic) -> None:
    """Every embedding vanishes, again and again, between its admission and its use."""
    end = time.monotonic() + HOLD_S
    with cluster.system.cache.client() as redis:
        while time.monotonic() < end:
            for key in redis.scan_iter(f"{EMBEDDING_PREFIX}*"):
                redis.delete(key)
            time.sleep(0.02)


def starve_redis(cluster: Cluster, _traffic: Traffic) -> None:
    """No room for anything: every write is refused."""
    with cluster.system.cache.client() as redis:
        before = redis.config_get("maxmemory*")
        redis.config_set("maxmemory-policy", "noeviction")
        redis.config_set("maxmemory", 1)
        time.sleep(HOLD_S)
        redis.config_set("maxmemory", before["maxmemory"])
        redis.config_set("maxmemory-policy", before["maxmemory-policy"])


def ask_together(cluster: Cluster, traffic: Traffic) -> None:
    traffic.outcomes += asyncio.run(traffic.ask_together(NUM_TOGETHER, "new picture"))


def scale_encoders_to_none(cluster: Cluster, _traffic: Traffic) -> None:
    """All encoders away and back: new pictures wait for one."""
    with ExitStack() as stack:
        for encoder in cluster.system.encoders:
            stack.callback(encoder.wait_until_ready)
            encoder.kill()
        time.sleep(HOLD_S)
        for encoder in cluster.system.encoders:
            encoder.start()


STREAMS_ON_IT: Final[frozenset[End]] = frozenset({"cut with an error"})
OF_THE_GATEWAY: Final[frozenset[End]] = frozenset({"unreachable", "cut without a word"})
BREAKS: Final = "streams that had begun on it"

FAULTS: Final[dict[str, Fault]] = {
    "engine killed": Fault(kill_engine, STREAMS_ON_IT, BREAKS, restarts=("engine-0",)),
    "encoder killed": Fault(kill_encoder, restarts=("encoder-0",)),
    "gateway killed": Fault(kill_gateway, OF_THE_GATEWAY, "there is one gateway", restarts=("gateway",)),
    "redis killed": Fault(kill_redis),
    "engine stopped": Fault(stop_engine),
    "encoder stopped": Fault(stop_encoder),
    "gateway stopped": Fault(stop_gateway),
    "redis stopped": Fault(stop_redis),
    "engine restarted": Fault(terminate_engine, restarts=("engine-0",)),
    "slow link to encoders": Fault(weather(lambda c: c.encoder_links, Weather(delay_s=0.1))),
    "lossy link to encoders": Fault(weather(lambda c: c.encoder_links, Weather(loss=0.3))),
    "half-open link to one encoder": Fault(weather(lambda c: c.encoder_links[:1], Weather(is_half_open=True))),
    "resets between gateway and encoders": Fault(
        weather(lambda c: c.encoder_links, Weather(reset=0.05)), frozenset({"refused", "failed"}), "both tries broken"
    ),
    "slow link to engines": Fault(weather(lambda c: c.engine_links, Weather(delay_s=0.05))),
    "lossy link to engines": Fault(weather(lambda c: c.engine_links, Weather(loss=0.1))),
    "half-open link to one engine": Fault(weather(lambda c: c.engine_links[:1], Weather(is_half_open=True))),
    "slow link to redis": Fault(weather(lambda c: [c.cache_link], Weather(delay_s=0.2))),
    "lossy link to redis": Fault(weather(lambda c: [c.cache_link], Weather(loss=0.3))),
    "half-open link to redis": Fault(weather(lambda c: [c.cache_link], Weather(is_half_open=True))),
    "embeddings pulled over a bad link": Fault(pull_through_bad_link),
    "embeddings expire at once": Fault(expire_embeddings),
    "redis without memory": Fault(starve_redis),
    "services' disk full": Fault(scarcity.fill_disk),
    "redis' disk full": Fault(scarcity.fill_disk_of_redis),
    "encoder without memory": Fault(
        scarcity.starve_encoder, frozenset({"failed"}), "pictures that it had taken on", restarts=("encoder-0",)
    ),
    "engine without memory": Fault(
        scarcity.starve_engine,
        STREAMS_ON_IT | {"failed"},
        "requests that it had begun",
        restarts=("engine-0",),
    ),
    "clocks jump": Fault(scarcity.jump, settings=scarcity.with_false_clock, why_not=scarcity.no_false_clock),
    "200 equal requests": Fault(ask_together),
    "encoders scaled to none and back": Fault(
        scale_encoders_to_none,
        frozenset({"failed"}),
        "a picture over which both were killed: nobody can tell it from one that kills",
        restarts=("encoder-0", "encoder-1"),
    ),
}
