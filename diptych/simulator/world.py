"""What all parts of a simulated cluster share: settings, the clock, the books, and pods behind a balancer."""

from __future__ import annotations

import heapq
import itertools
import math
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from services.gateway.balancer import Pool

Pod = TypeVar("Pod")


@dataclass(frozen=True, slots=True)
class Slo:
    """Seconds: to the first token, and between any two tokens."""

    first_token_s: float = math.inf
    gap_s: float = math.inf

    def is_met(self, first_token_s: float, longest_gap_s: float) -> bool:
        return first_token_s <= self.first_token_s and longest_gap_s <= self.gap_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What is compared. The engine's settings have its names; round_robin as in the gateway's `routing`.

    step_ratio      None, or: while sequences decode, prompts get what keeps the step within this many times what it
                    would take without them, by the cost model itself: the best a rule fed by measured times could do
    step_target_s   the same for a step of constant length
    num_known_images   pictures 0, 1, … are in the cache from the start
    gateway_sheds   the gateway believes what engines say of their queues; False: each refusal is asked for anew
    slo             what makes an answer good
    """

    engines: int = 1
    encoders: int = 1
    routing: str = "affinity"
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    max_prefill_tokens_while_decoding: int | None = 192
    step_ratio: float | None = None
    step_target_s: float | None = None
    max_waiting_requests: int = 1024
    max_queue_wait_s: float = math.inf
    gateway_sheds: bool = True
    slo: Slo = Slo()
    num_known_images: int = 0
    enable_prefix_caching: bool = True


@dataclass(slots=True)
class Result:
    """What happened. Times in seconds; `gaps` between neighbouring tokens of one answer.

    num_good   answers within the SLO
    num_shed   refusals of the gateway that no engine was asked for
    """

    num_requests: int = 0
    num_finished: int = 0
    num_good: int = 0
    num_refused: int = 0
    num_shed: int = 0
    num_output_tokens: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    num_steps: int = 0
    num_encodes: int = 0
    num_images: int = 0
    seconds: float = 0.0
    busy_s: float = 0.0
    encode_busy_s: float = 0.0
    kv_use_s: float = 0.0
    max_kv_use: float = 0.0
    ttft: array[float] = field(default_factory=lambda: array("d"))
    short_ttft: array[float] = field(default_factory=lambda: array("d"))
    gaps: array[float] = field(default_factory=lambda: array("d"))


class Clock:
    """Events in order of time; equal times in order of their making."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()

    def at(self, time: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (time, next(self._numbers), event))

    def after(self, seconds: float, event: Callable[[], None]) -> None:
        self.at(self.now + seconds, event)

    def run(self) -> None:
        while self._events:
            self.now, _, event = heapq.heappop(self._events)
            event()


def make_replicas(pool: Pool[str], name: str, pods: list[Pod]) -> dict[str, Pod]:
    """Put pods behind a balancer's pool, ready and warm."""
    by_url = {f"http://{name}-{i}": pod for i, pod in enumerate(pods)}
    pool.update(by_url)
    for replica in pool.replicas:
        pool.probed(replica, ready=True, info=name)
    return by_url
