"""Overload, simulated: goodput bends where requests are shed early, and collapses where nobody is refused."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from bench.simulated_overload import QUESTIONS, SimulatedPoint, find_capacity, sweep
from diptych.simulator.costs import PRESETS, CostModel
from diptych.simulator.world import Settings, Slo

CPU = PRESETS["cpu"]
SLO = Slo(first_token_s=3.0, gap_s=1.0)
SHEDDING = Settings(max_queue_wait_s=1.0, slo=SLO)


def played(
    settings: Settings,
    costs: CostModel = CPU,
    *,
    seconds: float = 15,
    factors: tuple[float, ...] = (1.0, 1.5, 4.0),
) -> list[SimulatedPoint]:
    return sweep(costs, settings, QUESTIONS, seconds=seconds, factors=factors)


def kept(points: list[SimulatedPoint]) -> float:
    """Goodput of the heaviest load, of the best."""
    return points[-1].good / max(point.good for point in points)


def test_at_four_times_capacity_goodput_is_nine_tenths_of_its_peak_or_more():
    points = played(SHEDDING, factors=(0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 4.0))
    assert kept(points) >= 0.9
    for point in points:
        assert point.refused == 0 or point.factor > 1, "refused although there was room"
        assert point.answered + point.refused == pytest.approx(point.offered)


def test_of_several_engines_too():
    points = played(replace(SHEDDING, engines=3), seconds=8)
    assert kept(points) >= 0.9


def test_where_nobody_is_refused_goodput_collapses():
    points = played(replace(SHEDDING, max_queue_wait_s=math.inf, max_waiting_requests=10**6))
    assert points[-1].refused == 0
    assert kept(points) < 0.5
    assert points[-1].first_token_p50_s > SLO.first_token_s


def test_engines_that_refuse_by_themselves_lose_time_to_it():
    alone = played(replace(SHEDDING, gateway_sheds=False))
    shed = played(SHEDDING)
    assert alone[-1].shed == 0
    assert shed[-1].good > 1.05 * alone[-1].good
    assert shed[-1].refused - shed[-1].shed < 0.1 * alone[-1].refused, "refusals that an engine was still asked for"


def test_answers_that_begin_wait_no_longer_than_the_bound_by_much():
    for bound_s in (0.5, 2.0):
        [point] = played(replace(SHEDDING, max_queue_wait_s=bound_s), seconds=30, factors=(4.0,))
        assert 0.5 * bound_s < point.first_token_p50_s < 1.5 * bound_s + 0.2


def test_a_moment_of_overload_is_no_reason_to_refuse():
    """A burst that meets an idle engine is taken whole, though its last ones wait longer than the bound."""
    [point] = played(SHEDDING, seconds=0.8, factors=(4.0,))
    assert point.refused == 0


def test_equal_arguments_give_equal_figures():
    assert played(SHEDDING, seconds=3) == played(SHEDDING, seconds=3)


def test_capacity_grows_with_engines():
    one, three = (find_capacity(CPU, replace(SHEDDING, engines=engines), QUESTIONS) for engines in (1, 3))
    assert three == pytest.approx(3 * one, rel=0.2)
