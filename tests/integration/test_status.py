"""The control room's data: one look for all who watch, behind the API's keys, with nothing of what users sent."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from services.gateway.balancer import Pool
from services.gateway.status import MAX_STATE_BYTES, ControlRoom
from shared.errors import InvalidImage
from shared.state import BlockMap, EngineState
from shared.wire.encoder import EncoderInfo
from shared.wire.engine import ModelInfo
from tests.gateway_stack import Stack, assert_openai_error, data_url, eventually, running_stack
from tests.ports import refusing_port
from tests.scripted import EncoderScript, EngineScript, png

BLOCKS = BlockMap(
    num_blocks=3,
    block_size=16,
    num_free=1,
    num_cached=1,
    num_held=1,
    num_shared=0,
    num_evictions=0,
    waste=0.25,
    blocks_per_cell=1,
    cells=".cP",
)
STATE = EngineState(
    model="tiny",
    num_running=1,
    num_waiting=0,
    num_awaiting_image=0,
    max_num_seqs=4,
    max_num_batched_tokens=64,
    num_preemptions=0,
    num_prompt_tokens=5,
    num_generated_tokens=7,
    num_prefix_queries=5,
    num_prefix_hits=0,
    first_token=[0.1, 0.2, 0.3],
    between_tokens=None,
    embeddings={"redis": 1},
    blocks=BLOCKS,
    sequences=[],
    steps=[],
)


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    with running_stack(num_engines=2, num_encoders=1, status_interval_s=0.05) as running:
        yield running


class Watched:
    """A control room over panels whose answers to `/v1/state` are given here."""

    def __init__(self, answers: dict[str, Any], interval_s: float = 60.0) -> None:
        self.asked: list[str] = []
        self.now = 100.0
        self.engines: Pool[ModelInfo] = Pool(time.monotonic, random.Random(0))
        self.engines.update(answers)
        for replica in self.engines.replicas:
            replica.ready = True
        self.encoders: Pool[EncoderInfo] = Pool(time.monotonic, random.Random(0))
        http = httpx.AsyncClient(transport=httpx.MockTransport(lambda request: self._answer(request, answers)))
        self.room = ControlRoom(
            self.engines, self.encoders, http, gateway=dict, interval_s=interval_s, clock=lambda: self.now
        )

    def _answer(self, request: httpx.Request, answers: dict[str, Any]) -> httpx.Response:
        self.asked.append(str(request.url))
        content = answers[f"http://{request.url.host}"]
        if isinstance(content, Exception):
            raise content
        return httpx.Response(200, content=content)


def states(data: dict[str, Any]) -> list[Any]:
    return [replica["state"] for replica in data["replicas"]]


async def test_many_viewers_cost_one_look_and_a_later_one_another():
    watched = Watched({"http://a": STATE.model_dump_json(), "http://b": STATE.model_dump_json()})
    await asyncio.gather(*(watched.room.data() for _ in range(50)))
    assert (watched.room.num_snapshots, len(watched.asked)) == (1, 2)
    watched.now += 59
    await watched.room.data()
    assert watched.room.num_snapshots == 1
    watched.now += 2
    await watched.room.data()
    assert watched.room.num_snapshots == 2


async def test_only_the_chosen_engine_is_shown_block_by_block():
    watched = Watched({"http://a": STATE.model_dump_json(), "http://b": STATE.model_dump_json()})
    first = await watched.room.data()
    assert first["engine"] == 1
    assert states(first)[0]["blocks"]["cells"] == ".cP"
    assert "cells" not in states(first)[1]["blocks"]
    second = await watched.room.data(2)
    assert second["engine"] == 2
    assert "steps" not in states(second)[0]
    assert states(second)[1]["steps"] == []
    assert (await watched.room.data(99))["engine"] == 1
    assert watched.room.num_snapshots == 1


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"[]",
        b"not json",
        json.dumps({"kind": "text_engine"}).encode(),
        STATE.model_dump_json().replace(".cP", "<script>").encode(),
        STATE.model_dump_json().replace("tiny", "x" * MAX_STATE_BYTES).encode(),
        httpx.ReadTimeout("too late"),
        httpx.ConnectError("gone"),
    ],
)
async def test_a_replica_that_says_nothing_sensible_is_shown_without_its_state(answer: Any):
    watched = Watched({"http://a": answer, "http://b": STATE.model_dump_json()})
    data = await watched.room.data()
    assert [state is None for state in states(data)] == [True, False]
    assert data["engine"] == 2


async def test_a_look_that_failed_is_not_shown_to_those_who_come_later():
    watched = Watched({"http://a": STATE.model_dump_json()})
    replica = watched.engines.replicas[0]
    replica.url = "http://a:no-port"  # httpx refuses it with what is none of its HTTP errors
    for _ in range(2):
        with pytest.raises(httpx.InvalidURL):
            await watched.room.data()
    replica.url = "http://a"
    assert states(await watched.room.data())[0] is not None
    assert watched.room.num_snapshots == 3


async def test_a_replica_that_hangs_delays_the_picture_by_a_second_at_most(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("services.gateway.status.STATE_TIMEOUT_S", 0.05)
    engines: Pool[ModelInfo] = Pool(time.monotonic, random.Random(0))
    engines.update(["http://a"])
    engines.replicas[0].ready = True

    async def never(_request: httpx.Request) -> httpx.Response:
        await asyncio.Event().wait()
        raise AssertionError

    http = httpx.AsyncClient(transport=httpx.MockTransport(never))
    encoders: Pool[EncoderInfo] = Pool(time.monotonic, random.Random(0))
    room = ControlRoom(engines, encoders, http, gateway=dict, interval_s=1)
    async with asyncio.timeout(5):
        assert states(await room.data()) == [None]


def test_the_gateway_shows_its_replicas_and_a_lost_one_as_not_ready(stack: Stack):
    stack.chat()
    data = stack.http.get("/status/data").json()
    shown = [(replica["service"], replica["number"], replica["ready"]) for replica in data["replicas"]]
    assert shown == [("text_engine", 1, True), ("text_engine", 2, True), ("vision_encoder", 1, True)]
    assert data["gateway"]["outcomes"]["ok"] >= 1
    assert len(data["gateway"]["first_token"]) == 3
    stack.engines[1].is_ready = False
    try:
        eventually(lambda: not stack.http.get("/status/data").json()["replicas"][1]["ready"])
    finally:
        stack.reset()


def test_nothing_of_what_was_asked_is_shown(stack: Stack):
    secret = "the-word-that-nobody-may-see"
    stack.ask(data_url(png(seed=7)), text=secret, user=secret)
    shown = stack.http.get("/status/data").text
    for hidden in (secret, "http://", "127.0.0.1", "base64"):
        assert hidden not in shown


@pytest.mark.parametrize("engine", ["0", "-1", "x", "1e9", "99999999999999999999"])
def test_a_senseless_engine_is_refused(stack: Stack, engine: str):
    assert stack.http.get(f"/status/data?engine={engine}").status_code == 400


def test_the_page_is_served_under_a_strict_policy_and_brings_no_style_or_script_inside(stack: Stack):
    page = stack.http.get("/status")
    assert page.status_code == 200
    assert page.headers["content-security-policy"].startswith("default-src 'none'; script-src 'self'")
    for inside in ("style=", "<style", "onclick=", "javascript:", "//cdn", "https://"):
        assert inside not in page.text
    for name in ("main", "blocks", "charts", "history", "replicas", "sequences", "steps", "tiers", "tiles", "words"):
        script = stack.http.get(f"/web/status/{name}.js")
        assert script.headers["content-type"].startswith("text/javascript")


def test_with_api_keys_the_data_asks_for_one_and_can_be_turned_off():
    with running_stack(api_keys=("alice:sk-a",)) as stack:
        assert stack.http.get("/status").status_code == 200
        assert 'href="/status"' in stack.http.get("/").text
        assert_openai_error(stack.http.get("/status/data"), 401, "invalid_api_key")
        headers = {"Authorization": "Bearer sk-a"}
        assert stack.http.get("/status/data", headers=headers).status_code == 200
    with running_stack(status_page=False) as stack:
        assert stack.http.get("/status").status_code == 404
        assert stack.http.get("/status/data").status_code == 404
        page = stack.http.get("/")
        assert page.status_code == 200
        assert "/status" not in page.text, "nothing links to what is not there"


def test_an_engine_nobody_can_reach_is_shown_not_ready():
    with refusing_port() as port, running_stack(text_engines=(f"http://127.0.0.1:{port}",)) as stack:
        [engine, _] = stack.http.get("/status/data").json()["replicas"]
        assert (engine["ready"], engine["state"]) == (False, None)


def test_a_client_chooses_no_labels_of_any_metric():
    """However hostile: paths, ids, models, keys and agents of its own make no series."""

    def series(stack: Stack) -> set[str]:
        lines = stack.http.get("/metrics").text.splitlines()
        return {line.rsplit(" ", 1)[0] for line in lines if line and not line.startswith("#")}

    def attack(stack: Stack, rng: random.Random) -> None:
        word = "".join(rng.choice('abc"\\{}=,%é') for _ in range(12))
        safe = "".join(rng.choice("abcdef0123456789") for _ in range(12))
        stack.chat(model=word)
        stack.http.get(f"/v1/models/{safe}")
        stack.http.get(f"/v1/files/file-{safe}")
        stack.http.get(f"/{safe}/{safe}")
        stack.http.get(f"/v1/{safe}?{safe}={safe}")
        stack.http.request("BREW", "/v1/chat/completions")
        stack.http.get("/health", headers={"X-Request-Id": safe, "User-Agent": safe, "Authorization": f"Bearer {safe}"})
        stack.http.post("/v1/chat/completions", content=word.encode(), headers={"Content-Type": safe})
        stack.chat(user=word, metadata={safe: safe}, stop=[safe])

    with running_stack() as stack:
        rng = random.Random(5)
        attack(stack, rng)
        stack.http.get("/metrics")
        before = series(stack)
        for _ in range(30):
            attack(stack, rng)
        assert series(stack) - before == set()


def test_a_picture_that_is_refused_is_not_counted_as_encoded(stack: Stack):
    def num_encoded() -> int:
        return int(stack.http.get("/status/data").json()["gateway"]["images"].get("encoder", 0))

    before = num_encoded()
    assert_openai_error(stack.ask(data_url(b"no picture at all")), 400, "unsupported_image_format")
    stack.encoder.script = EncoderScript(fail=InvalidImage("the image is truncated"))  # after it was admitted
    stack.engine.script = EngineScript(first_token_delay_s=1.0)  # a real one waits for the picture
    assert_openai_error(stack.ask(data_url(png(61))), 400, "invalid_image")
    stack.reset()
    assert num_encoded() == before
    assert stack.ask(data_url(png(62))).status_code == 200
    eventually(lambda: num_encoded() == before + 1)
