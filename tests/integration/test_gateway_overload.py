"""The gateway in front of engines that have no room: what would be refused is not sent, and costs nothing."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from services.gateway.balancer import MAX_PENDING_ADMISSIONS
from services.gateway.queue_forecast import LONGEST_BELIEF_S
from shared.errors import Overloaded
from tests.gateway_stack import Stack, assert_openai_error, data_url, eventually, running_stack
from tests.picture_server import PictureServer, serving
from tests.scripted import EngineScript, png

FULL = EngineScript(refuse=Overloaded("the queue is full", retry_after_s=30), queue_opens_in_s=30.0)


@pytest.fixture(scope="module")
def shared_stack() -> Iterator[Stack]:
    with running_stack(num_engines=2, allowed_hosts=("localhost",)) as running:
        yield running


@pytest.fixture
def stack(shared_stack: Stack) -> Stack:
    time.sleep(LONGEST_BELIEF_S)  # what the engines said to the test before is forgotten
    shared_stack.reset()
    return shared_stack


def num_asked(stack: Stack) -> int:
    return sum(len(engine.requests) for engine in stack.engines)


def fill(stack: Stack) -> None:
    """Every engine is full, and the gateway has heard it."""
    for engine in stack.engines:
        engine.script = FULL
    assert_openai_error(stack.chat(), 503, "overloaded")
    assert num_asked(stack) == 2


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "stream": True}),
        ("/v1/completions", {"prompt": ["a", "b", "c"]}),
        ("/v1/responses", {"input": "hi", "store": False}),
    ],
)
def test_once_all_engines_are_full_nobody_asks_them(stack: Stack, path: str, body: dict[str, object]):
    fill(stack)
    for _ in range(10):
        answer = stack.http.post(path, json=body)
        assert_openai_error(answer, 503, "overloaded")
        assert 28 <= int(answer.headers["retry-after"]) <= 30
    assert num_asked(stack) == 2


def test_a_picture_of_a_request_that_is_refused_is_neither_fetched_nor_encoded(stack: Stack):
    fill(stack)
    pictures = PictureServer()
    with serving(pictures):
        assert_openai_error(stack.ask(f"{pictures.base}/good"), 503, "overloaded")
        assert_openai_error(stack.ask(data_url(png(71))), 503, "overloaded")
    assert pictures.requests == []
    assert stack.num_encodes() == 0


def test_an_engine_that_has_room_gets_what_the_full_one_would_refuse(stack: Stack):
    stack.engines[0].script = FULL
    for number in range(20):
        assert stack.chat([{"role": "user", "content": f"question {number}"}]).status_code == 200
    assert len(stack.engines[0].requests) <= 2, "it was asked again although it had said that it is full"


def test_a_full_engine_is_asked_again_within_a_second_or_so_and_believed_when_it_has_room(stack: Stack):
    fill(stack)
    for engine in stack.engines:
        engine.script = EngineScript(queue_opens_in_s=0.0)
    assert_openai_error(stack.chat(), 503, "overloaded")
    eventually(lambda: stack.chat().status_code == 200, within_s=2 * LONGEST_BELIEF_S)
    assert {stack.chat().status_code for _ in range(5)} == {200}


def test_a_queue_that_just_became_full_is_left_alone_though_it_took_the_request(stack: Stack):
    for engine in stack.engines:
        engine.script = EngineScript(queue_opens_in_s=30.0)
    assert [stack.chat().status_code for _ in range(4)] == [200, 200, 503, 503]
    assert num_asked(stack) == 2


def test_of_a_crowd_only_the_first_few_are_sent_to_an_engine_that_is_full(stack: Stack):
    for engine in stack.engines:
        engine.script = replace(FULL, start_delay_s=0.5)
    began = time.monotonic()
    with ThreadPoolExecutor(120) as pool:
        answers = list(pool.map(lambda _: stack.chat(), range(120)))
    assert {answer.status_code for answer in answers} == {503}
    num_beliefs = 1 + int((time.monotonic() - began) / LONGEST_BELIEF_S)  # after each, the engines are asked anew
    assert num_asked(stack) <= 2 * MAX_PENDING_ADMISSIONS * num_beliefs


def test_a_crowd_that_there_is_room_for_is_answered_whole(stack: Stack):
    for engine in stack.engines:
        engine.script = EngineScript(start_delay_s=0.05, queue_opens_in_s=0.0)
    with ThreadPoolExecutor(120) as pool:
        answers = list(pool.map(lambda _: stack.chat(), range(120)))
    assert {answer.status_code for answer in answers} == {200}


def test_urgent_requests_are_sent_to_engines_that_are_full_for_others(stack: Stack):
    fill(stack)
    for engine in stack.engines:
        engine.script = EngineScript(queue_opens_in_s=0.0)
    assert_openai_error(stack.chat(priority=5), 503, "overloaded")
    assert stack.chat(priority=-1).status_code == 200


def test_an_engine_that_says_nothing_of_its_queue_is_asked_every_time(stack: Stack):
    """An older one, or one whose header is no number."""
    for engine in stack.engines:
        engine.script = EngineScript(refuse=Overloaded("full", retry_after_s=4))
    for number in range(3):
        assert_openai_error(stack.chat(), 503, "overloaded")
        assert num_asked(stack) == 2 * (number + 1)


def test_a_refusal_after_the_acceptance_still_says_when_to_come_back(stack: Stack):
    for engine in stack.engines:
        engine.script = EngineScript(fail=Overloaded("the queue is full", retry_after_s=3.5))
    answer = stack.chat()
    assert_openai_error(answer, 503, "overloaded")
    assert answer.headers["retry-after"] == "4"


def test_what_was_shed_and_which_engine_is_full_can_be_seen(stack: Stack):
    def metric(name: str) -> list[float]:
        lines = stack.http.get("/metrics").text.splitlines()
        return [float(line.split()[-1]) for line in lines if line.startswith(f"diptych:gateway_{name}")]

    [before] = metric("requests_shed_total")
    fill(stack)
    for _ in range(3):
        stack.chat()
    assert metric("requests_shed_total") == [before + 3]
    assert all(28 <= seconds <= 30 for seconds in metric("replica_room_in_seconds"))
