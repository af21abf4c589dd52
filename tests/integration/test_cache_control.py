"""The KV cache from outside: numbers, reset, sleep and wake, at an engine itself and through a gateway's admin keys."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from services.gateway.backends import EngineClient
from shared.errors import DiptychError, NotReady, error_from_body
from tests.conftest import CheckpointFactory
from tests.engines import EngineDriver
from tests.gateway_stack import assert_openai_error, eventually
from tests.real_stack import RealStack, real_stack

ADMIN = {"Authorization": "Bearer operator"}
USER = {"Authorization": "Bearer secret-of-ann"}
OTHER_USER = {"Authorization": "Bearer secret-of-bob"}
LONG = "The quick brown fox jumps over the lazy dog and then it does so again"


@pytest.fixture(scope="module")
def folder(checkpoint: CheckpointFactory) -> Path:
    return checkpoint("llama")


@pytest.fixture(scope="module")
def system(folder: Path) -> Iterator[RealStack]:
    keys = {"api_keys": ("ann:secret-of-ann", "bob:secret-of-bob"), "admin_keys": ("operator",)}
    with real_stack(folder, num_engines=2, routing="round_robin", salt_cache_by_key=True, **keys) as system:
        yield system


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[RealStack]:
    """One engine that is spoken to directly."""
    with real_stack(folder) as system:
        yield system


def at_engine(engine: RealStack, method: str, path: str, **options: Any) -> dict[str, Any]:
    response = httpx.request(method, engine.engine_urls[0] + path, timeout=30, trust_env=False, **options)
    assert response.status_code == 200, response.text
    body: dict[str, Any] = response.json()
    assert body["num_free"] + body["num_cached"] + body["num_referenced"] == body["num_blocks"]
    return body


def generate(engine: RealStack, request_id: str, **fields: Any) -> list[dict[str, Any]]:
    body = {"request_id": request_id, "prompt": LONG, "sampling": {"temperature": 0.0, "max_tokens": 4}, **fields}
    url = f"{engine.engine_urls[0]}/v1/generate"
    response = httpx.post(url, json=body, timeout=30, trust_env=False)
    if response.status_code != 200:
        raise error_from_body(response.status_code, response.json())
    return [json.loads(line) for line in response.content.splitlines()]


def num_cached(events: list[dict[str, Any]]) -> int:
    cached: int = events[-1]["num_cached_tokens"]
    return cached


def answer(system: RealStack, headers: dict[str, str], **fields: Any) -> dict[str, Any]:
    body = {"prompt": LONG, "temperature": 0, "max_tokens": 4, **fields}
    response = system.http.post("/v1/completions", json=body, headers=headers)
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


def test_the_numbers_tell_hits_and_what_a_reset_takes_away(engine: RealStack):
    at_engine(engine, "POST", "/v1/cache/reset")
    before = at_engine(engine, "GET", "/v1/cache")
    assert before["num_cached"] == before["num_referenced"] == 0
    cold, warm = generate(engine, "cold"), generate(engine, "warm")
    num_hit = num_cached(warm)
    assert (num_cached(cold), num_hit > 0) == (0, True)
    after = at_engine(engine, "GET", "/v1/cache")
    assert after["num_cached"] >= num_hit // after["block_size"]
    assert after["num_hit_tokens"] - before["num_hit_tokens"] == num_hit
    num_queried = after["num_queried_tokens"] - before["num_queried_tokens"]
    assert num_queried == 2 * warm[0]["num_prompt_tokens"]
    assert after["hit_ratio"] == pytest.approx(after["num_hit_tokens"] / after["num_queried_tokens"])
    reset = at_engine(engine, "POST", "/v1/cache/reset")
    assert reset["num_free"] == reset["num_blocks"]
    assert num_cached(generate(engine, "after")) == 0
    assert [event.get("text") for event in cold[1:-1]] == [event.get("text") for event in warm[1:-1]]


def test_what_runs_during_a_reset_leaves_nothing_behind_for_later_requests(folder: Path):
    """Case D9: its blocks may hold what old weights computed."""
    driver, prompt = EngineDriver(folder, max_num_batched_tokens=32, max_num_seqs=4), list(range(5, 105))
    expected = EngineDriver(folder).generate(prompt, max_tokens=40).token_ids
    driver.add("running", prompt, max_tokens=40)
    for _ in range(2):
        driver.step()
    driver.engine.reset_cache()
    driver.step()
    driver.add("beside it", prompt, max_tokens=40)
    answers = driver.run()
    assert answers["running"].token_ids == answers["beside it"].token_ids == expected
    assert answers["beside it"].finished is not None
    assert answers["beside it"].finished.num_cached_tokens == 0
    later = driver.generate(prompt, max_tokens=4)
    assert later.finished is not None
    assert later.finished.num_cached_tokens == 96, "only what was computed after the reset"


def test_requests_with_different_salts_share_nothing(engine: RealStack):
    at_engine(engine, "POST", "/v1/cache/reset")
    generate(engine, "a1", cache_salt="a")
    assert num_cached(generate(engine, "b1", cache_salt="b")) == 0
    assert num_cached(generate(engine, "none")) == 0
    assert num_cached(generate(engine, "a2", cache_salt="a")) > 0


def test_asleep_an_engine_holds_no_cache_and_takes_no_request_and_awake_it_answers_as_before(engine: RealStack):
    before = generate(engine, "before")
    asleep = at_engine(engine, "POST", "/v1/sleep")
    assert (asleep["state"], asleep["size_bytes"]) == ("asleep", 0)
    assert at_engine(engine, "POST", "/v1/sleep") == asleep, "asleep is asleep"
    with pytest.raises(NotReady, match="asleep"):
        generate(engine, "refused")
    assert httpx.get(f"{engine.engine_urls[0]}/ready", trust_env=False).status_code == 503
    assert httpx.get(f"{engine.engine_urls[0]}/health", trust_env=False).status_code == 200
    awake = at_engine(engine, "POST", "/v1/wake")
    assert awake["state"] == "awake"
    assert awake["size_bytes"] > 0
    after = generate(engine, "after-sleep")
    assert num_cached(after) == 0
    assert [event.get("token_ids") for event in after] == [event.get("token_ids") for event in before]


@pytest.mark.parametrize("mode", ["wait", "abort"])
def test_a_running_answer_is_finished_or_ended_before_the_engine_sleeps(engine: RealStack, mode: str):
    lines: list[dict[str, Any]] = []
    started = threading.Event()

    def long_answer() -> None:
        sampling = {"temperature": 0.0, "ignore_eos": True, "max_tokens": 200}
        body = {"request_id": f"running-{mode}", "prompt": LONG, "sampling": sampling}
        url = f"{engine.engine_urls[0]}/v1/generate"
        with httpx.stream("POST", url, json=body, timeout=30, trust_env=False) as response:
            for line in response.iter_lines():
                lines.append(json.loads(line))
                started.set()

    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(long_answer)
        assert started.wait(30)
        assert at_engine(engine, "POST", "/v1/sleep", json={"mode": mode})["state"] == "asleep"
        running.result()
    at_engine(engine, "POST", "/v1/wake")
    if mode == "wait":
        assert lines[-1]["num_generated_tokens"] == 200
    else:
        assert lines[-1]["event"] in ("error", "finished")
        assert lines[-1]["event"] == "finished" or lines[-1]["error"]["code"] == "not_ready"


def test_an_engine_that_does_not_get_to_sleep_in_time_stays_awake(engine: RealStack):
    started, may_go_on = threading.Event(), threading.Event()
    step = engine.engine().step

    def gated() -> Any:
        started.set()
        assert may_go_on.wait(30)
        return step()

    engine.engine().step = gated  # type: ignore[method-assign]
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(generate, engine, "slow")
        assert started.wait(30)
        url = f"{engine.engine_urls[0]}/v1/sleep"
        response = httpx.post(url, json={"timeout_s": 0.05}, timeout=30, trust_env=False)
        assert_openai_error(response, 503, "overloaded")
        may_go_on.set()
        assert running.result()[-1]["event"] == "finished"
    del engine.engine().step
    assert generate(engine, "still-there")[-1]["event"] == "finished"


@pytest.mark.parametrize("headers", [{}, USER])
@pytest.mark.parametrize(("method", "path"), [("GET", "/v1/cache"), ("POST", "/v1/sleep"), ("POST", "/v1/wake")])
def test_only_an_admin_key_opens_it(system: RealStack, method: str, path: str, headers: dict[str, str]):
    assert_openai_error(system.http.request(method, path, headers=headers), 401)


def test_an_admin_key_opens_nothing_else_and_without_one_set_there_is_nothing_to_open(
    system: RealStack, engine: RealStack
):
    assert_openai_error(system.http.get("/v1/models", headers=ADMIN), 401)
    assert_openai_error(engine.http.get("/v1/cache", headers=ADMIN), 404)
    assert_openai_error(engine.http.post("/v1/sleep", headers=ADMIN), 404)


def test_the_gateway_shows_every_engine_and_resets_one(system: RealStack):
    for _ in range(2):
        answer(system, USER)
    data = system.http.get("/v1/cache", headers=ADMIN).json()["data"]
    assert [each["engine"] for each in data] == [1, 2]
    assert all(each["num_cached"] > 0 for each in data)
    [reset] = system.http.post("/v1/cache/reset?engine=2", headers=ADMIN).json()["data"]
    assert (reset["engine"], reset["num_cached"]) == (2, 0)
    assert system.http.get("/v1/cache?engine=1", headers=ADMIN).json()["data"][0]["num_cached"] > 0
    assert_openai_error(system.http.post("/v1/cache/reset?engine=9", headers=ADMIN), 404)


def test_while_one_engine_sleeps_the_other_answers(system: RealStack):
    assert system.http.post("/v1/sleep?engine=1", json={"mode": "wait"}, headers=ADMIN).status_code == 200
    assert system.num_ready_engines() == 1
    before = system.http.get("/v1/cache?engine=2", headers=ADMIN).json()["data"][0]["num_queried_tokens"]
    for _ in range(4):
        answer(system, USER)
    after = system.http.get("/v1/cache?engine=2", headers=ADMIN).json()["data"][0]["num_queried_tokens"]
    assert after > before
    assert system.http.post("/v1/wake", headers=ADMIN).status_code == 200
    eventually(lambda: system.num_ready_engines() == 2)


def test_keys_of_different_names_share_no_prefix_where_that_is_set(system: RealStack):
    system.http.post("/v1/cache/reset", headers=ADMIN)
    for _ in range(2):  # one for each engine
        answer(system, USER)
    assert cached_tokens(answer(system, USER)) > 0
    assert cached_tokens(answer(system, OTHER_USER)) == 0
    assert cached_tokens(answer(system, USER, cache_salt="mine")) == 0


def cached_tokens(body: dict[str, Any]) -> int:
    cached: int = body["usage"]["prompt_tokens_details"]["cached_tokens"]
    return cached


@pytest.mark.parametrize("pieces", [[], [b""], [b'{"mode": ', b'"wait"}']])
def test_a_wish_may_come_in_pieces_without_a_length(system: RealStack, pieces: list[bytes]):
    assert system.http.post("/v1/sleep?engine=1", content=iter(pieces), headers=ADMIN).status_code == 200
    assert system.http.post("/v1/wake", headers=ADMIN).status_code == 200
    eventually(lambda: system.num_ready_engines() == 2)


def test_a_wish_in_pieces_is_read(system: RealStack):
    pieces = iter([b'{"mode": ', b'"deep"}'])
    assert_openai_error(system.http.post("/v1/sleep", content=pieces, headers=ADMIN), 400)


async def test_an_engine_may_take_its_time_to_answer_but_not_to_be_reached():
    limits: list[Any] = []

    def note(request: httpx.Request) -> httpx.Response:
        limits.append(request.extensions["timeout"])
        return httpx.Response(503)

    async with httpx.AsyncClient(transport=httpx.MockTransport(note), timeout=httpx.Timeout(7, connect=3)) as http:
        with pytest.raises(DiptychError):
            await EngineClient(http, start_timeout_s=5).control_cache("POST", "http://engine", "/v1/sleep")
    assert limits == [{"connect": 3, "read": None, "write": None, "pool": None}]


def test_a_bad_wish_is_refused(system: RealStack):
    for body in ({"mode": "deep"}, {"timeout_s": 0}, {"timeout_s": 1e9}):
        assert_openai_error(system.http.post("/v1/sleep", json=body, headers=ADMIN), 400)
