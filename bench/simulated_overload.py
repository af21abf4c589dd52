"""Answers in time when more is asked than can be done: a sweep of offered load on one simulated clock."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from diptych.simulator.cluster import simulate
from diptych.simulator.costs import CostModel
from diptych.simulator.trace import Conversation, Lengths, Mix, make_trace, poisson
from diptych.simulator.world import Result, Settings

FACTORS: Final = (0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 4.0)
QUESTIONS: Final = Mix(question=Lengths(50, 0.6, 400), answer=Lengths(50, 0.6, 200))


@dataclass(frozen=True, slots=True)
class SimulatedPoint:
    """One offered load, `factor` times capacity. Rates per second of the time in which requests arrived.

    shed   of the refused: those that no engine was asked for
    """

    factor: float
    offered: float
    good: float
    answered: float
    refused: float
    shed: float
    first_token_p50_s: float


def sweep(
    costs: CostModel,
    settings: Settings,
    mix: Mix,
    *,
    seconds: float,
    factors: Sequence[float] = FACTORS,
    seed: int = 0,
) -> list[SimulatedPoint]:
    """Requests of `mix`, each a conversation of one turn, for so many seconds at each multiple of capacity."""
    capacity = find_capacity(costs, settings, mix, seed=seed)
    return [_offer(costs, settings, mix, factor, capacity, seconds, seed) for factor in factors]


def find_capacity(costs: CostModel, settings: Settings, mix: Mix, *, num_requests: int = 400, seed: int = 0) -> float:
    """Answers a second of a closed loop that fills every place of every engine and no more."""
    trace = make_trace(mix, itertools.repeat(0.0), num_requests=num_requests, seed=seed)
    num_places = settings.engines * settings.max_num_seqs
    result = _play(costs, settings, trace, seed, max_users=num_places)
    return result.num_finished / result.seconds


def _offer(
    costs: CostModel, settings: Settings, mix: Mix, factor: float, capacity: float, seconds: float, seed: int
) -> SimulatedPoint:
    arrivals = poisson(factor * capacity, seed)
    num_requests = max(
        1, sum(1 for _ in itertools.takewhile(lambda at: at < seconds, poisson(factor * capacity, seed)))
    )
    result = _play(costs, settings, make_trace(mix, arrivals, num_requests=num_requests, seed=seed), seed)
    times = sorted(result.ttft)
    return SimulatedPoint(
        factor=factor,
        offered=result.num_requests / seconds,
        good=result.num_good / seconds,
        answered=result.num_finished / seconds,
        refused=result.num_refused / seconds,
        shed=result.num_shed / seconds,
        first_token_p50_s=times[len(times) // 2] if times else 0.0,
    )


def _play(
    costs: CostModel, settings: Settings, trace: Iterator[Conversation], seed: int, max_users: int | None = None
) -> Result:
    gc.disable()  # nothing here is cyclic, and the collector would walk through every token list
    try:
        return simulate(costs, settings, trace, seed=seed, max_users=max_users)
    finally:
        gc.enable()
