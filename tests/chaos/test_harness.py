"""The harness itself: links do what their weather says, ends are told apart. The faults are run by hand, by `-m`."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator

import httpx
import pytest

from tests.chaos.__main__ import judge
from tests.chaos.cluster import Holdings
from tests.chaos.faults import FAULTS, Fault
from tests.chaos.link import FAIR, Link, Weather
from tests.chaos.traffic import End, Outcome, _read_stream
from tests.gateway_stack import running_stack
from tests.ports import free_port


@pytest.fixture
def link() -> Iterator[Link]:
    with running_stack() as stack:
        link = Link(free_port(), int(stack.url.rpartition(":")[2]))
        link.start()
        yield link
        link.close()


def get(link: Link, timeout_s: float = 10.0) -> int:
    with httpx.Client(trust_env=False, timeout=timeout_s) as http:
        return http.get(f"{link.url}/health").status_code


def test_a_link_in_fair_weather_passes_everything_on(link: Link):
    assert get(link) == 200


def test_a_slow_link_takes_its_delay_in_both_directions(link: Link):
    link.weather = Weather(delay_s=0.15)
    since = time.monotonic()
    assert get(link) == 200
    assert time.monotonic() - since >= 0.3


def test_a_half_open_link_says_nothing_until_it_is_mended(link: Link):
    link.weather = Weather(is_half_open=True)
    with pytest.raises(httpx.TimeoutException):
        get(link, timeout_s=0.3)
    link.weather = FAIR
    assert get(link) == 200


def test_a_link_that_resets_breaks_the_connection(link: Link):
    link.weather = Weather(reset=1.0)
    with pytest.raises(httpx.TransportError):
        get(link)


def test_a_stream_is_whole_only_with_its_done_and_an_error_event_is_seen():
    chunk = b'data: {"choices": [{"delta": {"content": "fox"}}]}\n\n'
    assert _read_stream(chunk + b"data: [DONE]\n\n") == ("fox", "", True)
    assert _read_stream(chunk) == ("fox", "", False)
    assert _read_stream(chunk + b'data: {"error": {"code": "upstream_failed"}}\n\n') == (
        "fox",
        "upstream_failed",
        False,
    )


def outcome(end: End, began: float = 0.0) -> Outcome:
    return Outcome("text", False, began, began + 1, end)


def held(num_open: float = 0, num_files: int = 30) -> dict[str, Holdings]:
    return {"engine-0": Holdings(num_files, 0, 9, 1 << 20, num_open)}


@pytest.mark.parametrize(
    ("outcomes", "after", "num_problems"),
    [
        ([outcome("right")], held(), 0),
        ([outcome("cut with an error")], held(), 0),
        ([outcome("cut without a word")], held(), 1),
        ([outcome("wrong")], held(), 1),
        ([outcome("cut with an error", began=20.0)], held(), 1),
        ([outcome("right")], held(num_open=3), 1),
        ([outcome("right")], held(num_files=90), 1),
    ],
)
def test_a_verdict_is_bad_over_what_is_lost_late_or_still_held(
    outcomes: list[Outcome], after: dict[str, Holdings], num_problems: int
):
    fault = Fault(lambda _cluster, _traffic: None, frozenset({"cut with an error"}))
    verdict = judge("a fault", fault, outcomes, healed=5.0, whole=6.0, before=held(), after=after)
    assert len(verdict.problems) == num_problems
    assert verdict.ends == Counter(o.name for o in outcomes)


def test_no_fault_may_lose_a_right_answer_or_be_silent_except_the_only_gateway():
    for name, fault in FAULTS.items():
        assert not fault.may_lose & {"wrong", "hung"}, name
        assert name == "gateway killed" or "cut without a word" not in fault.may_lose
