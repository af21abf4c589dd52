"""Which replica gets a request: least outstanding of two, pulled softly toward where its prefix or image is cached.

Pure bookkeeping over `Replica`s: no sockets, no clock of its own; `discovery` keeps the replicas up to date.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import math
import random
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from services.gateway.queue_forecast import QueueForecast
from shared.errors import (
    DiptychError,
    EncodeFailed,
    ModelNotFound,
    NotReady,
    Overloaded,
    RateLimited,
    UpstreamFailed,
    UpstreamTimeout,
    UpstreamTooLong,
)

Info = TypeVar("Info")

# A preferred replica may be this much busier than the best alternative before its warm cache is not worth the wait.
AFFINITY_SLACK = 2
AFFINITY_SLACK_SHARE = 0.25
# Bounded load: a replica takes at most this multiple of the average number of running encodes.
LOAD_FACTOR = 1.25
FAILURES_BEFORE_EJECTION = 3
FIRST_EJECTION_S = 1.0
LONGEST_EJECTION_S = 30.0
# A replica that has just become ready has cold caches and often cold kernels: its share grows from a tenth.
SLOW_START_S = 10.0
FIRST_SHARE = 0.1
# A busy machine answers late now and then; only a row of missed probes means that nobody is there.
MAX_MISSED_PROBES = 2
MAX_PENDING_ADMISSIONS = 32  # requests that a replica has neither taken nor refused yet
MAX_WAITING = 1024  # requests that wait for a first replica; more are told at once that there is none


@dataclass(slots=True, eq=False)
class Replica(Generic[Info]):
    """One running copy of a service, as far as this gateway knows it.

    ready              the last probe of /ready said 200
    info               what it published about itself; None until first ready
    outstanding        requests of this gateway that it works on
    num_missed_probes  in a row, that it let time out
    ready_since        when a probe found it ready after it had not been
    number             its name for people, 1, 2, …: addresses are nothing for clients to see
    queue              when it would queue another request
    admission_slots    where requests wait to be taken or refused, a few at a time
    problem            why it is not used although it runs, for people; "": nothing of the kind
    reason             what the last probe found that was not ready; "" if it was
    """

    url: str
    ready: bool = False
    info: Info | None = None
    outstanding: int = 0
    num_failures: int = 0
    failed_at: float = -math.inf
    ejected_until: float = 0.0
    num_missed_probes: int = 0
    ready_since: float = -math.inf
    number: int = 1
    problem: str = ""
    reason: str = ""
    queue: QueueForecast = field(default_factory=QueueForecast)
    admission_slots: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(MAX_PENDING_ADMISSIONS))

    @property
    def is_silent(self) -> bool:
        """It hangs, or nothing gets through to it: its connections stand and nothing will come over them."""
        return self.num_missed_probes > MAX_MISSED_PROBES

    @contextmanager
    def lease(self) -> Iterator[None]:
        """Counts as outstanding while entered."""
        self.outstanding += 1
        try:
            yield
        finally:
            self.outstanding -= 1

    def probed(self, ready: bool, info: Info | None) -> None:
        self.ready = ready
        if info is not None:
            self.info = info

    def succeeded(self) -> None:
        self.num_failures = 0

    def unreachable(self) -> None:
        """Nothing listens, or it says itself that it is not ready: out until a probe says otherwise."""
        self.ready = False

    def failed(self, now: float) -> None:
        """It broke or timed out on a request: after several in a row it is left alone for a while, longer each time."""
        self.num_failures += 1
        self.failed_at = now
        rounds = self.num_failures - FAILURES_BEFORE_EJECTION
        if rounds >= 0:
            self.ejected_until = now + min(FIRST_EJECTION_S * 2.0**rounds, LONGEST_EJECTION_S)


class Pool(Generic[Info]):
    """The replicas of one service.

    num_waiting   requests that wait for a first replica
    num_shed      refusals by replicas that were foreseen, and not asked for
    """

    def __init__(
        self, clock: Callable[[], float], rng: random.Random, *, by_turns: bool = False, wait_s: float = 0.0
    ) -> None:
        """
        by_turns   `least_loaded` goes round instead, looking at nothing
        wait_s     the longest that `until_available` waits
        """
        self._clock = clock
        self._rng = rng
        self._wait_s = wait_s
        self._turned_ready = asyncio.Event()
        self.num_waiting = 0
        self.num_shed = 0
        self._on_silence: list[Callable[[Replica[Info]], None]] = []
        self._turns = itertools.count() if by_turns else None
        self._replicas: dict[str, Replica[Info]] = {}

    @property
    def replicas(self) -> list[Replica[Info]]:
        return list(self._replicas.values())

    def update(self, urls: Iterable[str]) -> None:
        """Make `urls` the replicas: known ones keep their state, vanished ones get no new requests."""
        known, wanted = self._replicas, list(dict.fromkeys(urls))
        taken = {known[url].number for url in wanted if url in known}
        free = (number for number in itertools.count(1) if number not in taken)
        self._replicas = {url: known.get(url) or Replica(url, number=next(free)) for url in wanted}

    def available(
        self, excluded: Collection[Replica[Info]] = (), suits: Callable[[Info], bool] = lambda _: True
    ) -> list[Replica[Info]]:
        """Ready, publishing something that `suits`, and not ejected.

        If all of them are ejected they are taken nevertheless: any is better than none.
        """
        ready = [
            replica
            for replica in self._replicas.values()
            if replica.ready and replica not in excluded and replica.info is not None and suits(replica.info)
        ]
        now = self._clock()
        return [replica for replica in ready if replica.ejected_until <= now] or ready

    def probed(self, replica: Replica[Info], *, ready: bool, info: Info | None) -> None:
        """What a probe has found out."""
        replica.num_missed_probes = 0
        turned_ready = ready and not replica.ready
        if turned_ready:
            replica.ready_since = self._clock()
        replica.probed(ready, info)
        if turned_ready:
            self._turned_ready.set()

    def missed_probe(self, replica: Replica[Info]) -> None:
        """It let a probe time out."""
        replica.num_missed_probes += 1
        if replica.is_silent:
            replica.unreachable()
            for tell in self._on_silence:
                tell(replica)

    def on_silence(self, tell: Callable[[Replica[Info]], None]) -> None:
        """`tell` is called with a replica that has fallen silent, and again for as long as it stays so."""
        self._on_silence.append(tell)

    async def until_available(self) -> None:
        """Wait while no replica can take anything, but not for ever: a service that scaled to zero may be on its way.

        Returns in any case; whoever then finds no replica says so.
        """
        if self.available() or not self._wait_s or self.num_waiting >= MAX_WAITING:
            return
        self.num_waiting += 1
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(self._wait_s):
                    while not self.available():
                        self._turned_ready.clear()
                        await self._turned_ready.wait()
        finally:
            self.num_waiting -= 1

    def loads(self, candidates: list[Replica[Info]]) -> dict[Replica[Info], float]:
        """Outstanding requests, the next one included, over the share of work that a replica is ready for.

        The share grows from FIRST_SHARE of the warmest one's to all of it: replicas that start together share evenly.
        """
        now = self._clock()
        warmth = {r: min(1.0, max(FIRST_SHARE, (now - r.ready_since) / SLOW_START_S)) for r in candidates}
        warmest = max(warmth.values())
        return {replica: (replica.outstanding + 1) * warmest / warmth[replica] for replica in candidates}

    def note_queue(self, replica: Replica[Info], priority: int, opens_in_s: float) -> None:
        """`replica` would queue another request of this priority after so many seconds."""
        replica.queue.told(priority, opens_in_s, self._clock())

    def with_open_queue(self, candidates: list[Replica[Info]], priority: int) -> list[Replica[Info]]:
        return [replica for replica in candidates if not self.queue_opens_in_s([replica], priority)]

    def queue_opens_in_s(self, candidates: list[Replica[Info]], priority: int) -> float:
        """When the first of them would queue another request; 0: now, or nothing to the contrary is known."""
        now = self._clock()
        return min((replica.queue.opens_in_s(priority, now) for replica in candidates), default=0.0)

    def check_queues(self, candidates: list[Replica[Info]], priority: int) -> None:
        """Raises QueueKnownFull if all of them have said that they would refuse a request of this priority."""
        opens_in_s = self.queue_opens_in_s(candidates, priority)
        if opens_in_s:
            self.num_shed += 1
            raise QueueKnownFull(
                f"the queue of every text engine is as long as it may be; there is room in about {opens_in_s:.1f} s",
                retry_after_s=opens_in_s,
            )

    def note(self, replica: Replica[Info], error: BaseException | None) -> None:
        """How work at `replica` ended; a request refused for its own sake speaks for the replica, not against it."""
        if isinstance(error, QueueKnownFull):
            return
        if isinstance(error, NotReady):
            replica.unreachable()
        elif is_replica_fault(error):
            replica.failed(self._clock())
        elif error is None or isinstance(error, DiptychError):
            replica.succeeded()

    def least_loaded(self, candidates: list[Replica[Info]], affinity: bytes) -> Replica[Info] | None:
        """The emptier of two random replicas, or the one that `affinity` prefers if that is about as empty."""
        if not candidates:
            return None
        if self._turns is not None:
            return candidates[next(self._turns) % len(candidates)]
        pair = self._rng.sample(candidates, min(2, len(candidates)))
        preferred = max(candidates, key=lambda replica: rendezvous_score(affinity, replica.url))
        loads = self.loads([*pair, preferred])
        emptier = min(pair, key=lambda replica: loads[replica])
        slack = max(AFFINITY_SLACK, int(AFFINITY_SLACK_SHARE * emptier.outstanding))
        return preferred if loads[preferred] <= loads[emptier] + slack else emptier


def without_latest_failure(candidates: list[Replica[Info]]) -> list[Replica[Info]]:
    """Without the one that failed last, if one has failed at all and there is another."""
    latest = max(candidates, key=lambda replica: replica.failed_at, default=None)
    if latest is None or latest.failed_at == -math.inf or len(candidates) == 1:
        return candidates
    return [replica for replica in candidates if replica is not latest]


class QueueKnownFull(Overloaded):
    """A replica's last word, repeated for it: it was not asked, so nothing was learnt of it."""


def is_replica_fault(error: BaseException | None) -> bool:
    """Whether the replica failed, not the request: EncodeFailed is about one image, and any encoder would say it;
    UpstreamTooLong is about one answer."""
    of_request = (EncodeFailed, UpstreamTooLong)
    return isinstance(error, (UpstreamFailed, UpstreamTimeout)) and not isinstance(error, of_request)


def is_worth_another_replica(error: BaseException) -> bool:
    """ModelNotFound: it has unloaded an adapter since it was last asked what it has."""
    return is_replica_fault(error) or isinstance(error, (NotReady, Overloaded, RateLimited, ModelNotFound))


def by_rendezvous(candidates: list[Replica[Info]], key: bytes) -> Replica[Info] | None:
    """The replica where equal keys meet, or the next in that key's order whose load is within bounds.

    Removing a replica moves only its own keys; the bound keeps one popular key from drowning its replica.
    """
    if not candidates:
        return None
    bound = math.ceil(LOAD_FACTOR * (1 + sum(replica.outstanding for replica in candidates)) / len(candidates))
    ranked = sorted(candidates, key=lambda replica: rendezvous_score(key, replica.url), reverse=True)
    return next((replica for replica in ranked if replica.outstanding < bound), ranked[0])


def rendezvous_score(key: bytes, url: str) -> bytes:
    return hashlib.blake2b(url.encode(), key=key[:64], digest_size=8).digest()
