"""The harness itself: links do what their weather says, ends are told apart. The faults are run by hand, by `-m`."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.chaos.__main__ import Verdict, judge, rounds
from tests.chaos.cluster import Holdings
from tests.chaos.faults import FAULTS, Fault
from tests.chaos.link import FAIR, Link, Weather
from tests.chaos.scarcity import CLOCK_FILE, limited, no_false_clock, with_false_clock
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


def test_a_fault_that_wants_settings_of_its_own_gets_a_cluster_of_its_own():
    names = list(FAULTS)
    groups = rounds(names)
    assert ["clocks jump"] in groups
    assert sorted(name for group in groups for name in group) == sorted(names)
    assert all(len({FAULTS[name].settings for name in group}) == 1 for group in groups)


def test_a_fault_that_cannot_be_tried_here_is_said_and_not_held_against_anybody():
    verdict = Verdict("clocks jump", Counter(), why_not="libfaketime is not installed")
    assert verdict.is_good
    assert verdict.row() == "| clocks jump | | | | | not tried: libfaketime is not installed |"


WRITE = """
import pathlib, sys
for line in sys.stdin:
    try:
        pathlib.Path(line.strip()).write_text("x")
        print("written", flush=True)
    except OSError:
        print("OSError", flush=True)
"""


def test_a_process_without_disk_can_write_nothing_until_it_has_it_back(tmp_path: Path):
    with subprocess.Popen([sys.executable, "-c", WRITE], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:

        def write() -> bytes:
            assert child.stdin is not None
            assert child.stdout is not None
            child.stdin.write(f"{tmp_path / 'file'}\n".encode())
            child.stdin.flush()
            return child.stdout.readline().strip()

        assert write() == b"written"
        with limited([child.pid], resource.RLIMIT_FSIZE, 0):
            assert write().startswith(b"OSError")
        assert write() == b"written"
        child.stdin.close()


@pytest.mark.skipif(bool(no_false_clock()), reason=no_false_clock())
def test_the_false_clock_moves_the_time_of_day_and_no_timer(tmp_path: Path):
    env = os.environ | with_false_clock(tmp_path)
    (tmp_path / CLOCK_FILE).write_text("+93600\n")
    asked = "import time; print(time.time(), time.monotonic())"
    done = subprocess.run([sys.executable, "-c", asked], env=env, capture_output=True, text=True, check=True)
    wall, monotonic = map(float, done.stdout.split())
    assert abs(wall - time.time() - 93_600) < 30
    assert abs(monotonic - time.monotonic()) < 30
