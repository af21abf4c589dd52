"""Encoder pods, the embeddings that they have made, and what an engine keeps of them."""

from __future__ import annotations

import random
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from functools import partial

from diptych.simulator.costs import CostModel
from diptych.simulator.world import Clock, Result, make_replicas
from services.gateway.balancer import Pool, Replica, by_rendezvous
from services.text_engine.core.sequence import ImageSpan, Sequence

MAX_IDLE_IMAGES = 64


class EncoderPod:
    """Batches as the real one: it never waits while idle, and takes a full batch under load."""

    def __init__(self, clock: Clock, costs: CostModel, on_encoded: Callable[[str], None], result: Result) -> None:
        self._clock = clock
        self._costs = costs
        self._on_encoded = on_encoded
        self._result = result
        self._queue: deque[tuple[str, Replica[str]]] = deque()
        self._is_busy = False

    def encode(self, key: str, replica: Replica[str]) -> None:
        replica.outstanding += 1
        self._queue.append((key, replica))
        self._work()

    def _work(self) -> None:
        if self._is_busy or not self._queue:
            return
        self._is_busy = True
        size = min(len(self._queue), self._costs.max_encode_batch)
        images = [self._queue.popleft() for _ in range(size)]
        seconds = self._costs.encode_s + size * self._costs.encode_image_s
        self._result.num_encodes += size
        self._result.encode_busy_s += seconds
        self._clock.after(seconds, partial(self._done, images))

    def _done(self, images: list[tuple[str, Replica[str]]]) -> None:
        self._is_busy = False
        for key, replica in images:
            replica.outstanding -= 1
            self._on_encoded(key)
        self._work()


class Embeddings:
    """Every encoder's work, and who waits for it. An image that was encoded once stays."""

    def __init__(self, clock: Clock, costs: CostModel, num_encoders: int, rng: random.Random, result: Result) -> None:
        self._clock = clock
        self._fetch_s = costs.fetch_s
        self._pool: Pool[str] = Pool(lambda: clock.now, rng)
        self._pods = make_replicas(
            self._pool, "encoder", [EncoderPod(clock, costs, self._encoded, result) for _ in range(num_encoders)]
        )
        self._known: set[str] = set()
        self._waiting: dict[str, list[Callable[[], None]]] = {}

    def remember(self, keys: Iterable[str]) -> None:
        """They were encoded before the clock began."""
        self._known.update(keys)

    def want(self, key: str) -> None:
        """Have it encoded, unless it is or will be."""
        if key in self._known or key in self._waiting:
            return
        self._waiting[key] = []
        replica = by_rendezvous(self._pool.available(), bytes.fromhex(key))
        assert replica is not None
        self._pods[replica.url].encode(key, replica)

    def fetch(self, key: str, on_here: Callable[[], None]) -> None:
        if key in self._known:
            self._clock.after(self._fetch_s, on_here)
        else:
            self._waiting[key].append(on_here)

    def _encoded(self, key: str) -> None:
        self._known.add(key)
        for on_here in self._waiting.pop(key):
            self._clock.after(self._fetch_s, on_here)


class EngineImages:
    """The engine's embedding store: what running requests need, and the latest of what they needed."""

    def __init__(self, on_wanted: Callable[[str], None]) -> None:
        self._on_wanted = on_wanted
        self._num_users: dict[str, int] = {}
        self._wanted: set[str] = set()
        self._here: set[str] = set()
        self._idle: OrderedDict[str, None] = OrderedDict()

    def register(self, sequence: Sequence) -> None:
        for span in sequence.images:
            self._num_users[span.image_key] = self._num_users.get(span.image_key, 0) + 1
            self._idle.pop(span.image_key, None)

    def release(self, sequence: Sequence) -> None:
        for span in sequence.images:
            self._num_users[span.image_key] -= 1
            if self._num_users[span.image_key] == 0:
                del self._num_users[span.image_key]
                if span.image_key in self._here:
                    self._idle[span.image_key] = None
        while len(self._idle) > MAX_IDLE_IMAGES:
            self._here.discard(self._idle.popitem(last=False)[0])

    def is_ready(self, _sequence: Sequence, span: ImageSpan) -> bool:
        key = span.image_key
        if key in self._here:
            return True
        if key not in self._wanted:
            self._wanted.add(key)
            self._on_wanted(key)
        return False

    def put(self, key: str) -> None:
        self._wanted.discard(key)
        if key in self._num_users:
            self._here.add(key)
