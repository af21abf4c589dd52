"""What the soak judges: pauses do not count, growth does."""

from __future__ import annotations

import pytest

from tests.chaos.cluster import Holdings
from tests.chaos.pauses import RECOVERY_S, Pauses
from tests.chaos.soak import Sample, _print_ends, _print_slopes
from tests.chaos.traffic import End, Outcome


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def pauses(clock: Clock) -> Pauses:
    """Ran from 100 to 110, stood still until 200, and runs since."""
    pauses = Pauses(clock)
    for clock.now in (102.0, 104.0, 106.0, 108.0, 110.0, 200.0, 202.0, 204.0):
        pauses.tick()
    return pauses


def test_a_long_time_without_a_tick_is_a_pause(pauses: Pauses):
    assert pauses.spans == [(110.0, 200.0)]


def test_a_pause_that_no_tick_has_told_of_yet_is_seen_by_who_asks(pauses: Pauses, clock: Clock):
    clock.now = 300.0
    assert pauses.touch(205.0, 300.0)


def test_a_pause_that_no_tick_has_told_of_yet_is_no_time_either(pauses: Pauses, clock: Clock):
    clock.now = 300.0
    assert pauses.awake_s(200.0, 300.0) == 4.0


def test_what_a_pause_took_is_not_time(pauses: Pauses):
    assert pauses.awake_s(100.0, 204.0) == 14.0
    assert pauses.awake_s(100.0, 108.0) == 8.0
    assert pauses.awake_s(150.0, 204.0) == 4.0


@pytest.mark.parametrize(
    ("began", "ended", "touched"),
    [
        (100.0, 109.0, False),
        (100.0, 111.0, True),
        (109.0, 230.0, True),
        (200.0 + RECOVERY_S - 1, 230.0, True),
        (200.0 + RECOVERY_S + 1, 230.0, False),
    ],
)
def test_a_request_runs_into_a_pause_or_into_the_recovery_from_it(
    pauses: Pauses, began: float, ended: float, touched: bool
):
    assert pauses.touch(began, ended) == touched


@pytest.mark.parametrize(
    ("end", "began", "num_problems"), [("hung", 109.0, 0), ("hung", 240.0, 1), ("wrong", 100.0, 1), ("right", 109.0, 0)]
)
def test_only_a_request_that_a_pause_cannot_explain_must_be_right(
    pauses: Pauses, clock: Clock, end: End, began: float, num_problems: int
):
    for clock.now in (208.0, 212.0, 216.0, 220.0, 224.0, 228.0, 232.0, 236.0, 240.0, 244.0):
        pauses.tick()
    ended = 205.0 if began == 109.0 else began + 2
    assert len(_print_ends(1.0, [Outcome("text", False, began, ended, end)], pauses)) == num_problems


def samples(mib: list[float]) -> list[Sample]:
    return [
        Sample(5.0 * number, {"engine-0": Holdings(30, 0, 9, int(size * 2**20), 0)}) for number, size in enumerate(mib)
    ]


def test_memory_that_grows_through_the_second_half_is_a_problem_and_the_first_half_is_not_asked(
    capsys: pytest.CaptureFixture[str],
):
    assert _print_slopes(samples([100.0, 200.0, 300.0, 400.0] + [400.0] * 4)) == []
    assert "| engine-0 | 400 | 400 |" in capsys.readouterr().out
    assert _print_slopes(samples([400.0] * 4 + [400.0, 420.0, 440.0, 460.0])) == [
        "engine-0 grew by 60 MiB in the second half"
    ]
