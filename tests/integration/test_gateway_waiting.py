"""Questions that come while a panel has no ready replica: held for one, within bounds, instead of a 503."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.gateway_stack import Stack, assert_openai_error, data_url, eventually, hung_up, question, running_stack
from tests.ports import free_port, refusing_port
from tests.scripted import ScriptedEncoder, ScriptedEngine, png, serve


@pytest.fixture
def encoder_port() -> int:
    return free_port()


@pytest.fixture
def asleep(encoder_port: int) -> Iterator[Stack]:
    """An engine and no encoder, as after scaling to zero."""
    with running_stack(vision_encoders=(f"http://127.0.0.1:{encoder_port}",), replica_wait_s=20) as stack:
        yield stack


def num_waiting(stack: Stack, service: str) -> float:
    metrics = stack.http.get("/metrics").text
    name = f'diptych:gateway_requests_waiting_for_replica{{service="{service}"}}'
    return next(float(line.split()[-1]) for line in metrics.splitlines() if line.startswith(name))


def test_pictures_are_held_until_an_encoder_comes_and_text_goes_on(asleep: Stack, encoder_port: int) -> None:
    urls = [data_url(png(seed)) for seed in range(3)]
    with ThreadPoolExecutor(3) as pool:
        answers = [pool.submit(asleep.ask, url) for url in urls]
        eventually(lambda: num_waiting(asleep, "vision_encoder") == 3)
        assert asleep.chat().status_code == 200
        encoder = ScriptedEncoder()
        with serve(encoder.app, encoder_port):
            assert [answer.result().status_code for answer in answers] == [200, 200, 200]
    assert len(encoder.keys) == 3
    assert num_waiting(asleep, "vision_encoder") == 0


def test_a_picture_that_is_known_waits_for_nobody(asleep: Stack, encoder_port: int) -> None:
    url = data_url(png(7))
    with serve(ScriptedEncoder().app, encoder_port):
        eventually(lambda: asleep.ready()["vision_encoders"]["ready"] == 1)
        assert asleep.ask(url).status_code == 200
    eventually(lambda: asleep.ready()["vision_encoders"]["ready"] == 0)
    assert asleep.ask(url).status_code == 200


def test_whoever_stops_waiting_leaves_the_queue(asleep: Stack) -> None:
    with hung_up(asleep, {"messages": question(data_url(png(8)))}) as hang_up:
        eventually(lambda: num_waiting(asleep, "vision_encoder") == 1)
        hang_up()
        eventually(lambda: num_waiting(asleep, "vision_encoder") == 0)


def test_an_engine_that_comes_in_time_answers() -> None:
    port = free_port()
    with running_stack(text_engines=(f"http://127.0.0.1:{port}",), replica_wait_s=20) as stack:
        with serve(ScriptedEngine().app, port):
            eventually(lambda: stack.ready()["text_engines"]["ready"] == 1)
        eventually(lambda: stack.ready()["text_engines"]["ready"] == 0)
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(stack.chat)
            eventually(lambda: num_waiting(stack, "text_engine") == 1)
            with serve(ScriptedEngine().app, port):
                assert answer.result().status_code == 200


def test_the_wait_is_bounded_and_ends_with_what_is_missing() -> None:
    with refusing_port() as port:
        dead = (f"http://127.0.0.1:{port}",)
        with running_stack(vision_encoders=dead, replica_wait_s=0.3) as stack:
            begun = time.monotonic()
            assert_openai_error(stack.ask(data_url(png(9))), 503, "not_ready")
            assert time.monotonic() - begun >= 0.3
            assert stack.chat().status_code == 200
