"""Two encoders, two engines, a gateway and Valkey, and what happens when one of them dies, hangs, forgets or lies.

The rule is the same everywhere: an answer is right or it is an error that says so in time; never wrong, never silence.
"""

from __future__ import annotations

import itertools
import os
import pickle
import signal
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import torch

from shared.embedding_cache import EMBEDDING_PREFIX
from shared.torch_io import blob_to_tensor, tensor_to_blob
from tests.conftest import CheckpointFactory
from tests.e2e.system import (
    IMAGE_ROWS,
    NUM_TOKENS,
    Oracle,
    Service,
    System,
    Turn,
    assistant,
    picture,
    running_system,
    user,
)
from tests.gateway_stack import assert_openai_error, eventually

ADMIT_TIMEOUT_S = 2
ENCODE_TIMEOUT_S = 7  # above the life of a dead encoder's lease, which is 5 s
START_TIMEOUT_S = 2
OUTSTANDING = "gateway_replica_outstanding"

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def model(checkpoint: CheckpointFactory) -> Path:
    return checkpoint("llava_clip_llama")


@pytest.fixture(scope="module")
def system(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    """Each test begins by arranging what it needs: a start costs seconds, so the next test takes what this one left."""
    folder = tmp_path_factory.mktemp("logs")
    settings = {
        "DIPTYCH_GATEWAY_ADMIT_TIMEOUT_S": f"{ADMIT_TIMEOUT_S}",
        "DIPTYCH_GATEWAY_ENCODE_TIMEOUT_S": f"{ENCODE_TIMEOUT_S}",
        "DIPTYCH_GATEWAY_START_TIMEOUT_S": f"{START_TIMEOUT_S}",
        "DIPTYCH_GATEWAY_PROBE_TIMEOUT_S": "0.5",
        "DIPTYCH_ENGINE_EMBEDDING_TIMEOUT_S": "15",
    }
    with running_system(model, folder, num_encoders=2, num_engines=2, **settings) as running:
        yield running


@pytest.fixture(scope="module")
def oracle(model: Path) -> Oracle:
    return Oracle(model)


def ask_about(image: bytes) -> Turn:
    return user("Look: ", image, "What is it?")


# --- Redis ------------------------------------------------------------------------------------------------------------


def test_without_redis_everything_is_answered_and_after_its_return_pictures_are_stored_again(
    system: System, oracle: Oracle
):
    """Case E1."""
    system.arrange()
    known, new = picture(), [picture() for _ in range(8)]
    expected = {image: oracle.answer(ask_about(image)) for image in (known, *new)}
    assert system.ask(ask_about(known)).tokens == expected[known]
    system.cache.stop()
    for image in (known, *new[:6]):
        assert system.ask(ask_about(image)).tokens == expected[image]
    assert system.ask(user("Just text.")).tokens == oracle.answer(user("Just text."))
    for service in system.services:
        assert service.log.count("out of order") <= 2, "one warning an interval, not one a request"

    system.cache.start()
    eventually(lambda: all(e.metric("embedding_cache_breaker_open") == 0 for e in system.encoders), within_s=6)
    assert system.ask(ask_about(new[6])).tokens == expected[new[6]]
    eventually(lambda: system.cache.holds(system.key(new[6])))
    passes = sum_over(system.encoders, "encoder_tower_passes_total")
    again = user("Another question: ", new[6])
    assert system.ask(again).tokens == oracle.answer(again)
    assert sum_over(system.encoders, "encoder_tower_passes_total") == passes


def sum_over(services: Sequence[Service], name: str, **labels: str) -> float:
    return sum(service.metric(name, **labels) for service in services if service.is_running)


def test_a_paused_redis_costs_little_at_first_and_then_nothing(system: System, oracle: Oracle):
    """Case E2: it accepts connections and never answers."""
    system.arrange()
    questions = [ask_about(picture()) for _ in range(20)]
    expected = [oracle.answer(question) for question in questions]
    seconds = []
    with system.cache.paused():
        for question, tokens in zip(questions, expected, strict=True):
            since = time.monotonic()
            assert system.ask(question).tokens == tokens
            seconds.append(time.monotonic() - since)
    # A request passes three services that each wait for it at most a few times, 0.3 s each.
    assert max(seconds) < 3
    assert np.median(seconds[10:]) < 0.3, seconds
    eventually(lambda: sum_over(system.encoders, "embedding_cache_breaker_open") == 0, within_s=6)
    after = picture()
    assert system.ask(ask_about(after)).tokens == oracle.answer(ask_about(after))
    eventually(lambda: system.cache.holds(system.key(after)))


def test_redis_emptied_or_restarted_between_turns_changes_no_answer(system: System, oracle: Oracle):
    """Case E1: in the middle of a conversation."""
    system.arrange()
    turns = [ask_about(picture())]
    for number, calamity in enumerate([system.cache.flush, restart(system), system.cache.flush]):
        assert system.ask(*turns).tokens == oracle.answer(*turns)
        calamity()
        turns += [assistant("Perhaps a fox."), user(f"Number {number}? ", *([picture()] if number == 1 else []))]
    assert system.ask(*turns).tokens == oracle.answer(*turns)


def restart(system: System) -> Any:
    def stop_and_start() -> None:
        system.cache.stop()
        system.cache.start()

    return stop_and_start


class Canary:
    """Unpickled, it leaves a file behind."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.file,)


def test_entries_that_lie_are_seen_through(system: System, oracle: Oracle, tmp_path: Path):
    """Case E9 and its kin: gateway, encoder and engine meet an entry under the real key of a picture none has seen."""
    system.arrange()
    canary = tmp_path / "canary"
    evil = pickle.dumps(Canary(canary))
    rows = torch.zeros(IMAGE_ROWS, 64)
    meta = b'{"num_tokens": 16, "width": 61, "height": 47}'
    lies = {
        "pickles": {"meta": evil, "blob": evil},
        "a pickle behind good metadata": {"meta": meta, "blob": evil},
        "half a blob": {"meta": meta, "blob": tensor_to_blob(rows)[:100]},
        "no blob": {"meta": meta},
        "too few rows": {"meta": meta, "blob": tensor_to_blob(rows[1:])},
        "no numbers": {"meta": meta, "blob": tensor_to_blob(rows / 0)},
        "metadata of another picture": {"meta": meta.replace(b"16", b"15"), "blob": tensor_to_blob(rows[1:, :32])},
    }
    for name, entry in lies.items():
        image = picture()
        with system.cache.client() as redis:
            redis.hset(EMBEDDING_PREFIX + system.key(image), mapping=entry)  # type: ignore[arg-type]
        assert system.ask(ask_about(image)).tokens == oracle.answer(ask_about(image)), name
    image = picture()
    with system.cache.client() as redis:
        redis.set(EMBEDDING_PREFIX + system.key(image), evil)
    assert system.ask(ask_about(image)).tokens == oracle.answer(ask_about(image))
    assert not canary.exists()
    with system.cache.client() as redis:
        stored = redis.hget(EMBEDDING_PREFIX + system.key(image), "blob")
    assert isinstance(stored, bytes)
    assert blob_to_tensor(stored).shape == (IMAGE_ROWS, 64)


# --- encoders ---------------------------------------------------------------------------------------------------------


@contextmanager
def stopped_decoding(*encoders: Service) -> Iterator[None]:
    """Their decode workers are paused: pictures are admitted, and not encoded until the way out."""
    workers = [pid for encoder in encoders if encoder.is_running for pid in encoder.workers()]
    for pid in workers:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in workers:
            try:
                os.kill(pid, signal.SIGCONT)
            except ProcessLookupError:
                continue  # its encoder was killed


def working_encoder(system: System) -> Service:
    """The one that has admitted the only picture there is."""
    found: list[Service] = []

    def look() -> bool:
        found[:] = [e for e in system.encoders if e.is_running and e.metric("encoder_queued_images") == 1]
        return bool(found)

    eventually(look)
    [encoder] = found
    return encoder


def others(services: list[Service], one: Service) -> list[Service]:
    return [service for service in services if service is not one]


@pytest.mark.parametrize("how", [signal.SIGSTOP, signal.SIGKILL], ids=["stopped", "killed"])
def test_an_encoder_lost_over_a_picture_is_replaced_by_the_other(system: System, oracle: Oracle, how: signal.Signals):
    """Case E11, with a replica; both engines and everybody's blocks are free afterwards."""
    system.arrange(num_encoders=2)
    question = ask_about(picture())
    with ThreadPoolExecutor(1) as pool, ExitStack() as stack:
        with stopped_decoding(*system.encoders):
            answer = pool.submit(system.ask, question)
            lost = working_encoder(system)
            if how is signal.SIGKILL:
                lost.kill()
            else:
                stack.enter_context(lost.paused())
        since = time.monotonic()
        assert answer.result().tokens == oracle.answer(question)
        assert time.monotonic() - since < ENCODE_TIMEOUT_S + 3
        [survivor] = others(system.encoders, lost)
        assert survivor.metric("encoder_queued_images") == 0
        eventually(lambda: system.num_ready("vision_encoders") == 1)
        assert len(system.ask(ask_about(picture())).tokens) == NUM_TOKENS
    system.assert_serves()


def test_an_encoder_lost_over_a_picture_without_another_is_an_error_in_time(system: System, oracle: Oracle):
    """Cases E11, C11: text and known pictures are answered, new ones refused with a time to come back."""
    system.arrange(num_encoders=1)
    [last] = [encoder for encoder in system.encoders if encoder.is_running]
    known = picture()
    system.ask(ask_about(known))
    with ThreadPoolExecutor(1) as pool:
        with stopped_decoding(last):
            answer = pool.submit(system.post, ask_about(picture()))
            assert working_encoder(system) is last
            last.kill()
        since = time.monotonic()
        response = answer.result()
        assert time.monotonic() - since < ENCODE_TIMEOUT_S
        assert response.status_code in (502, 503), response.text
        assert_openai_error(response, response.status_code)
    eventually(lambda: system.num_ready("vision_encoders") == 0)
    for question in (user("Just text."), ask_about(known), user("Another question: ", known)):
        assert system.ask(question).tokens == oracle.answer(question)
    refused = system.post(ask_about(picture()))
    assert_openai_error(refused, 503, "not_ready")
    assert int(refused.headers["retry-after"]) >= 1
    assert system.gateway.http.get("/ready").status_code == 200
    assert sum_over(system.engines, "num_requests_waiting") == 0


def test_stopped_encoders_are_a_timeout_and_their_late_answers_are_ignored(system: System, oracle: Oracle):
    """Cases E11, C11: both accept connections and never answer."""
    system.arrange()
    late = ask_about(picture())
    with ExitStack() as stack:
        for encoder in system.encoders:
            stack.enter_context(encoder.paused())
        since = time.monotonic()
        response = system.post(late)
        assert time.monotonic() - since < 2 * ADMIT_TIMEOUT_S + 2
        assert response.status_code in (502, 503, 504), response.text
        assert_openai_error(response, response.status_code)
        assert system.ask(user("Just text.")).tokens == oracle.answer(user("Just text."))
    eventually(lambda: system.num_ready("vision_encoders") == 2)
    assert system.ask(late).tokens == oracle.answer(late)
    system.assert_serves()


# --- engines ----------------------------------------------------------------------------------------------------------


def working_engine(system: System) -> Service:
    """The one that the gateway has given the only request there is."""
    found: list[Service] = []

    def look() -> bool:
        found[:] = [e for e in system.engines if system.gateway.metric(OUTSTANDING, replica=e.url) == 1]
        return len(found) == 1  # it may be given to the other between two looks

    eventually(look)
    [engine] = found
    return engine


def test_a_stopped_engine_is_left_out_and_comes_back(system: System, oracle: Oracle):
    """Case E13: it accepts connections and never answers; nobody waits longer than the start timeout."""
    system.arrange(num_engines=2)
    stopped, working = system.engines
    questions = [user(f"Question {number}?") for number in range(8)]
    expected = [oracle.answer(question) for question in questions]
    with stopped.paused(), ThreadPoolExecutor(8) as pool:
        since = time.monotonic()
        answers = [pool.submit(system.ask, question) for question in questions]
        assert [answer.result().tokens for answer in answers] == expected
        assert time.monotonic() - since < START_TIMEOUT_S + 3
        eventually(lambda: system.num_ready("text_engines") == 1)
        since = time.monotonic()
        assert [system.ask(question).tokens for question in questions] == expected
        assert time.monotonic() - since < START_TIMEOUT_S
        assert working.is_ready()
    eventually(lambda: system.num_ready("text_engines") == 2)


def test_an_engine_killed_before_its_first_token_is_replaced_by_the_other(system: System, oracle: Oracle):
    """Case E11, for engines."""
    system.arrange(num_engines=2)
    question = user("What is shown in the image, and what else can you see? ", picture(), "Tell me.")
    with ThreadPoolExecutor(1) as pool:
        with stopped_decoding(*system.encoders):
            answer = pool.submit(system.ask, question)
            lost = working_engine(system)
            lost.kill()
            eventually(lambda: working_engine(system) is not lost)
        assert answer.result().tokens == oracle.answer(question)
    eventually(lambda: system.num_ready("text_engines") == 1)
    for number in range(4):
        assert len(system.ask(user(f"Question {number}?")).tokens) == NUM_TOKENS


def test_an_engine_killed_in_the_middle_of_an_answer_ends_the_stream_with_an_error(system: System):
    """Case B25: an error event, no faked end, closed within a second."""
    system.arrange(num_engines=1)
    [engine] = [each for each in system.engines if each.is_running]
    stream = system.client.chat.completions.create(**system.fields([user("Tell me")], 440), stream=True)
    reasons = [chunk.choices[0].finish_reason for chunk in itertools.islice(stream, 5)]
    engine.kill()
    since = time.monotonic()
    with pytest.raises(openai.APIError):
        reasons += [chunk.choices[0].finish_reason for chunk in stream]
    assert time.monotonic() - since < 1
    assert set(reasons) == {None}


def test_without_any_engine_requests_are_refused_at_once_and_served_after_a_restart(system: System, oracle: Oracle):
    """Case E14: scaled to none and back; the gateway's own liveness does not depend on others."""
    system.arrange(num_engines=0)
    assert system.gateway.http.get("/ready").status_code == 503
    since = time.monotonic()
    for question in (user("Hm?"), ask_about(picture())):
        refused = system.post(question)
        assert_openai_error(refused, 503, "not_ready")
        assert int(refused.headers["retry-after"]) >= 1
    assert time.monotonic() - since < 1
    assert system.gateway.http.get("/health").status_code == 200
    system.engine.start()
    while (response := system.post(user("Hm?"))).status_code != 200:  # from the first moment on: 503, never else
        assert_openai_error(response, 503)
        assert time.monotonic() - since < 60
        time.sleep(0.1)
    question = ask_about(picture())
    assert system.ask(question).tokens == oracle.answer(question)


# --- everybody --------------------------------------------------------------------------------------------------------


def test_sigterm_to_every_service_loses_no_running_answer(system: System):
    """Case E15: twelve streams run while encoder, engine and gateway are told to leave; all end with exit code 0."""
    system.arrange(num_encoders=1, num_engines=1)
    leaving = [service for service in system.services if service.is_running]
    body = system.fields([user("Tell me")], 440) | {"ignore_eos": True, "stream": True}
    body.pop("extra_body")
    url = f"{system.gateway.url}/v1/chat/completions"
    with httpx.Client(trust_env=False, timeout=30) as http, ThreadPoolExecutor(12) as pool:
        streams = [pool.submit(http.post, url, json=body) for _ in range(12)]
        eventually(lambda: sum_over(system.engines, "num_requests_running") == 12)
        for service in leaving:
            service.signal(signal.SIGTERM)
        for stream in streams:
            assert stream.result().text.endswith("data: [DONE]\n\n")
            assert stream.result().text.count('"content"') > 100
    assert [service.wait(20) for service in leaving] == [0] * 3


def test_nothing_was_logged_as_unexpected(system: System):
    """The last look: whatever broke around them, no service met an error that it did not know."""
    for service in system.services:
        entries = [line for line in service.log.splitlines() if line.startswith("{")]
        assert entries
        assert [line for line in entries if "Traceback" in line or "unexpected" in line] == [], service.name
