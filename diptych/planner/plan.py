"""From traffic to replicas.

What one engine carries within the targets is found by simulating one; the traffic divided by it, with headroom, is a
first proposal, and so is what encoders and gateways take by their costs. The whole cluster is then simulated, by a part
of it if it is large, and gets more of whatever it lacks until it keeps the targets.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

from diptych.errors import CommandFailed
from diptych.planner.hardware import Hardware
from diptych.planner.part import Part
from diptych.planner.traffic import NUM_KNOWN_IMAGES, Target, Traffic
from diptych.simulator.cluster import simulate
from diptych.simulator.report import Figures, figures
from diptych.simulator.world import Settings

# A gateway is one process on one core. Measured with bench/gateway.py: what a request costs it, and each token after
# the first.
GATEWAY_REQUEST_S: Final = 0.0033
GATEWAY_TOKEN_S: Final = 0.00014
GATEWAY_LOAD: Final = 0.6
ENCODER_LOAD: Final = 0.7  # a picture that comes while the tower works waits for it, and the more the fuller it is
FULL_BATCH: Final = 64
PLENTY_OF_ENCODERS: Final = 8
PRECISION: Final = 1.05  # to which one engine's capacity is found
NUM_REQUESTS_ALONE: Final = 200
MIN_REQUESTS, MAX_REQUESTS = 600, 40_000
# Who offers 5 % more than can be done has a queue of this many target times at the end, too long to overlook.
MIN_TARGET_TIMES: Final = 20
MAX_ROUNDS: Final = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """engine_requests_per_s   what one engine carries within the targets, without headroom
    alone                   figures of requests that meet nobody
    figures                 of the proposed cluster under the traffic, simulated
    redis_bytes             for the pictures of `keep_pictures_s`; None: not known
    """

    gateways: int
    encoders: int
    engines: int
    engine_requests_per_s: float
    alone: Figures
    figures: Figures
    redis_bytes: int | None

    @property
    def replicas(self) -> tuple[int, int, int]:
        return self.gateways, self.encoders, self.engines


class Planner:
    """headroom   share of the engines that stays free for peaks, failures and roll-outs
    say        hears what is being simulated, which takes seconds each time
    """

    def __init__(
        self,
        hardware: Hardware,
        target: Target,
        *,
        headroom: float = 0.2,
        seed: int = 0,
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._hardware = hardware
        self._costs = hardware.costs
        self._target = target
        self._headroom = headroom
        self._seed = seed
        self._say = say

    def plan(self, traffic: Traffic, *, keep_pictures_s: float = 3600.0) -> Plan:
        """Raises CommandFailed if no number of replicas keeps the targets."""
        self._check_lengths(traffic)
        alone = self._alone(traffic)
        carried = self.capacity(traffic)
        engines = math.ceil(traffic.requests_per_s / ((1 - self._headroom) * carried))
        encoders = self._encoders(traffic)
        engines, encoders, seen = self._until_kept(traffic, engines, encoders)
        image_bytes = self._hardware.image_bytes
        return Plan(
            gateways=_gateways(traffic),
            encoders=encoders,
            engines=engines,
            engine_requests_per_s=carried,
            alone=alone,
            figures=seen,
            redis_bytes=None
            if image_bytes is None
            else round(traffic.new_pictures_per_s * keep_pictures_s * image_bytes),
        )

    def keeps(self, seen: Figures) -> bool:
        """Whether these figures are within the targets."""
        return not seen["num_refused"] and not self._is_late(seen) and not self._stutters(seen)

    def capacity(self, traffic: Traffic) -> float:
        """Requests a second of this kind that one engine carries within the targets, with encoders to spare."""
        best, worst = 0.0, math.inf
        rate = 1 / self._request_s(traffic)
        while worst > best * PRECISION:
            self._say(f"simulating one engine with {rate:.3g} requests/s")
            if self.keeps(self.simulate(replace(traffic, requests_per_s=rate), 1, PLENTY_OF_ENCODERS)):
                best = rate
            else:
                worst = rate
            # By steps until there is a bound on either side, then halfway between them.
            rate = math.sqrt(best * worst) if best and worst < math.inf else 1.5 * best or worst / 1.5
        return best

    def simulate(self, traffic: Traffic, engines: int, encoders: int, num_requests: int = 0) -> Figures:
        """Figures of so many replicas under this traffic."""
        wanted = max(200 * engines, MIN_TARGET_TIMES * self._target.ttft_s * traffic.requests_per_s)
        trace = traffic.trace(
            num_requests=num_requests or round(min(MAX_REQUESTS, max(MIN_REQUESTS, wanted))),
            image_tokens=self._costs.image_tokens,
            max_model_len=self._costs.max_model_len,
            seed=self._seed,
        )
        settings = Settings(engines=engines, encoders=encoders, num_known_images=NUM_KNOWN_IMAGES)
        gc.disable()  # nothing here is cyclic, and the collector would walk through every token list
        try:
            return figures(simulate(self._costs, settings, trace, seed=self._seed), engines, encoders)
        finally:
            gc.enable()

    def _check_lengths(self, traffic: Traffic) -> None:
        num_tokens, limit = traffic.context_tokens(self._costs.image_tokens), self._costs.max_model_len
        if num_tokens > limit:
            raise CommandFailed(
                f"a mean request has {num_tokens:.0f} tokens with its pictures and its answer; this model takes {limit}"
            )

    def _alone(self, traffic: Traffic) -> Figures:
        """What a request takes that meets nobody: no number of replicas makes it faster."""
        self._say("simulating a request that meets no other")
        rare = replace(traffic, requests_per_s=1e-4, arrivals="poisson")
        alone = self.simulate(rare, 1, PLENTY_OF_ENCODERS, num_requests=NUM_REQUESTS_ALONE)
        if self._is_late(alone):
            raise CommandFailed(
                f"no number of replicas gives a first token within {self._target.ttft_s:g} s: with nothing else to do "
                f"it takes {alone['ttft_p95_s']:.3g} s (95th percentile)"
            )
        if self._stutters(alone):
            raise CommandFailed(
                f"no number of replicas keeps gaps within {1000 * self._target.gap_s:g} ms: with nothing else to do "
                f"they are {alone['gap_p95_ms']:.3g} ms (95th percentile)"
            )
        return alone

    def _until_kept(self, traffic: Traffic, engines: int, encoders: int) -> tuple[int, int, Figures]:
        for _ in range(MAX_ROUNDS):
            self._say(f"simulating the cluster: engines {engines}, encoders {encoders}")
            part = Part.of(engines, encoders)
            share = replace(traffic, requests_per_s=part.requests_per_s(traffic.requests_per_s))
            seen = part.of_whole(self.simulate(share, part.engines, part.encoders))
            if self.keeps(seen):
                return engines, encoders, seen
            load = traffic.requests_per_s * self._request_s(traffic) / engines
            if self._is_late(seen) and seen["encoders_busy"] > load:
                encoders += math.ceil(encoders / 10)
            else:
                engines += math.ceil(engines / 10)
        raise CommandFailed(f"{engines} engines and {encoders} encoders still miss the targets in the simulation")

    def _encoders(self, traffic: Traffic) -> int:
        costs = self._costs
        batch = costs.max_encode_batch
        image_s = costs.encode_s / batch + costs.encode_image_s
        return max(1, math.ceil(traffic.new_pictures_per_s * image_s / ENCODER_LOAD)) if traffic.pictures else 0

    def _request_s(self, traffic: Traffic) -> float:
        num_images = traffic.pictures * self._costs.image_tokens
        num_new_tokens = traffic.prompt_tokens - traffic.shared_tokens + num_images
        context = traffic.prompt_tokens + num_images
        return self._costs.request_s(num_new_tokens, context / 2, traffic.output_tokens, FULL_BATCH)

    def _is_late(self, seen: Figures) -> bool:
        return seen["ttft_p95_s"] > self._target.ttft_s

    def _stutters(self, seen: Figures) -> bool:
        return seen["gap_p95_ms"] > 1000 * self._target.gap_s


def _gateways(traffic: Traffic) -> int:
    busy = traffic.requests_per_s * (GATEWAY_REQUEST_S + traffic.output_tokens * GATEWAY_TOKEN_S)
    return math.ceil(busy / GATEWAY_LOAD)
