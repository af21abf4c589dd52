"""`prompt_logprobs` and `echo` as clients have them: a real gateway before a real engine, against transformers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from services.gateway.answer_schema import ChatCompletion, Completion
from services.text_engine.events import PROMPT_TOKENS_AT_ONCE
from shared import sampling
from tests.conftest import CheckpointFactory
from tests.gateway_stack import assert_openai_error
from tests.models.oracle import load_oracle, oracle_logits
from tests.real_stack import RealStack, real_stack

PROMPT = "The quick brown fox jumps over the lazy dog"
TOLERANCE = 2e-4


@pytest.fixture(scope="module")
def folder(checkpoint: CheckpointFactory) -> Path:
    return checkpoint("llama")


@pytest.fixture(scope="module")
def system(folder: Path) -> Iterator[RealStack]:
    with real_stack(folder) as system:
        yield system


def complete(system: RealStack, **fields: Any) -> dict[str, Any]:
    response = system.http.post("/v1/completions", json={"prompt": PROMPT, "temperature": 0, **fields})
    assert response.status_code == 200, response.text
    body: dict[str, Any] = response.json()
    Completion.model_validate(body)
    return body


def token_ids(system: RealStack, prompt: str = PROMPT) -> list[int]:
    ids: list[int] = system.http.post("/v1/tokenize", json={"prompt": prompt}).json()["tokens"]
    return ids


def logprobs_of_transformers(folder: Path, ids: list[int]) -> list[float]:
    rows = torch.log_softmax(oracle_logits(load_oracle(folder), torch.tensor(ids)), dim=-1)
    return [float(row[token_id]) for row, token_id in zip(rows, ids[1:], strict=False)]


def test_completions_tell_the_prompts_logprobs_in_vllms_shape(system: RealStack, folder: Path):
    ids = token_ids(system)
    [first, second] = complete(system, prompt_logprobs=2, max_tokens=2, n=2)["choices"]
    told = first["prompt_logprobs"]
    assert second["prompt_logprobs"] == told
    assert told[0] is None
    own = [entry[str(token_id)] for entry, token_id in zip(told[1:], ids[1:], strict=True)]
    assert [each["logprob"] for each in own] == pytest.approx(logprobs_of_transformers(folder, ids), abs=TOLERANCE)
    for entry, each in zip(told[1:], own, strict=True):
        ranks = sorted(other["rank"] for other in entry.values())
        assert ranks == [1, 2] if each["rank"] <= 2 else ranks == [1, 2, each["rank"]]
        by_rank = sorted(entry.values(), key=lambda other: other["rank"])
        assert by_rank == sorted(entry.values(), key=lambda other: -other["logprob"])


def test_chat_tells_them_beside_the_choices(system: RealStack):
    messages = [{"role": "user", "content": "hello there"}]
    response = system.http.post("/v1/chat/completions", json={"messages": messages, "prompt_logprobs": 0, "seed": 1})
    assert response.status_code == 200, response.text
    body = response.json()
    ChatCompletion.model_validate(body)
    assert len(body["prompt_logprobs"]) == body["usage"]["prompt_tokens"]
    assert all(len(entry) == 1 for entry in body["prompt_logprobs"][1:])
    plain = system.http.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 1}).json()
    assert "prompt_logprobs" not in plain


def test_echo_with_logprobs_scores_a_text_without_saying_anything(system: RealStack, folder: Path):
    """What evaluation harnesses send."""
    ids = token_ids(system)
    body = complete(system, echo=True, logprobs=1, max_tokens=0)
    [choice] = body["choices"]
    assert choice["text"] == PROMPT
    assert choice["finish_reason"] == "length"
    assert body["usage"]["completion_tokens"] == 0
    logprobs = choice["logprobs"]
    assert len(logprobs["tokens"]) == len(ids)
    assert logprobs["token_logprobs"][0] is None
    assert logprobs["top_logprobs"][0] is None
    assert logprobs["token_logprobs"][1:] == pytest.approx(logprobs_of_transformers(folder, ids), abs=TOLERANCE)
    for token, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
        if not token.startswith("<"):
            assert PROMPT[offset : offset + len(token)] == token


def test_a_text_that_fills_the_whole_context_is_scored_to_its_end(system: RealStack, folder: Path):
    limit = system.http.get("/v1/models").json()["data"][0]["max_model_len"]
    ids = [3 + (7 * position) % 250 for position in range(limit + 1)]
    fields = {"echo": True, "logprobs": 0, "max_tokens": 0}
    [choice] = complete(system, prompt=ids[:limit], **fields)["choices"]
    assert choice["logprobs"]["token_logprobs"][1:] == pytest.approx(
        logprobs_of_transformers(folder, ids[:limit]), abs=TOLERANCE
    )
    for prompt, more in ((ids, fields), (ids[:limit], {**fields, "max_tokens": 1})):
        response = system.http.post("/v1/completions", json={"prompt": prompt, **more})
        assert assert_openai_error(response, 400)["code"] == "context_length_exceeded"


def test_echo_with_logprobs_goes_on_into_the_answer(system: RealStack):
    [plain] = complete(system, logprobs=2, max_tokens=5)["choices"]
    [echoed] = complete(system, logprobs=2, max_tokens=5, echo=True)["choices"]
    num_prompt_tokens = len(token_ids(system))
    assert echoed["text"] == PROMPT + plain["text"]
    assert echoed["logprobs"]["tokens"][num_prompt_tokens:] == plain["logprobs"]["tokens"]
    assert echoed["logprobs"]["token_logprobs"][num_prompt_tokens:] == pytest.approx(
        plain["logprobs"]["token_logprobs"], abs=TOLERANCE
    )
    assert "prompt_logprobs" not in echoed


def test_echo_of_several_prompts_and_of_token_ids(system: RealStack):
    ids = token_ids(system, "Good morning")
    choices = complete(system, prompt=[ids, token_ids(system)], echo=True, max_tokens=1, n=2)["choices"]
    assert [choice["text"].startswith("Good morning") for choice in choices] == [True, True, False, False]
    assert all(choice["text"].startswith(PROMPT) for choice in choices[2:])


def test_a_long_prompt_is_told_whole_and_in_order(system: RealStack):
    """Longer than one event between the services holds."""
    prompt = " ".join(f"word{number}" for number in range(60))
    ids = token_ids(system, prompt)
    assert len(ids) > 2 * PROMPT_TOKENS_AT_ONCE
    [choice] = complete(system, prompt=ids, echo=True, logprobs=2, prompt_logprobs=1, max_tokens=2)["choices"]
    told = choice["prompt_logprobs"]
    assert told[0] is None
    assert [next(iter(entry)) for entry in told[1:]] == [str(token_id) for token_id in ids[1:]]
    own = [entry[str(token_id)]["logprob"] for entry, token_id in zip(told[1:], ids[1:], strict=True)]
    assert choice["logprobs"]["token_logprobs"][1 : len(ids)] == own
    assert len(choice["logprobs"]["tokens"]) == len(ids) + 2
    messages = [{"role": "user", "content": prompt}]
    response = system.http.post("/v1/chat/completions", json={"messages": messages, "prompt_logprobs": 0, "seed": 1})
    assert len(response.json()["prompt_logprobs"]) == response.json()["usage"]["prompt_tokens"]


def test_what_a_request_has_scored_is_bounded_over_all_its_prompts_and_choices(
    system: RealStack, monkeypatch: pytest.MonkeyPatch
):
    num_tokens = len(token_ids(system))
    monkeypatch.setattr(sampling, "MAX_PROMPT_LOGPROBS", 2 * 6 * num_tokens)
    fields = {"prompt_logprobs": 1, "max_tokens": 1}
    assert len(complete(system, prompt=[PROMPT] * 6, **fields)["choices"]) == 6
    assert len(complete(system, prompt=[PROMPT] * 3, n=2, **fields)["choices"]) == 6
    assert len(complete(system, prompt=[PROMPT] * 3, n=2, echo=True, logprobs=1, max_tokens=1)["choices"]) == 6
    for prompts, n in (([PROMPT] * 7, 1), ([PROMPT] * 4, 2)):
        response = system.http.post("/v1/completions", json={"prompt": prompts, "n": n, **fields})
        assert assert_openai_error(response, 400)["param"] == "prompt_logprobs"
    complete(system, prompt=[PROMPT] * 7, max_tokens=1)
    for prompts in ([PROMPT] * 7, [" ".join([PROMPT] * 7)]):
        scored = {"prompt": prompts, "echo": True, "logprobs": 1, "max_tokens": 0}
        response = system.http.post("/v1/completions", json=scored)
        assert assert_openai_error(response, 400)["param"] == "logprobs", "of that, not of what engines call it"


@pytest.mark.parametrize("max_tokens", [0, 3])
def test_a_stream_echoes_the_prompt_in_the_first_chunk_of_each_choice(system: RealStack, max_tokens: int):
    fields = {"echo": True, "max_tokens": max_tokens, "n": 2, "seed": 7}
    whole = complete(system, **fields)["choices"]
    body = {"prompt": PROMPT, "temperature": 0, "stream": True, **fields}
    texts, firsts = {0: "", 1: ""}, {}
    with system.http.stream("POST", "/v1/completions", json=body) as response:
        for line in response.iter_lines():
            if not line.startswith("data: {"):
                continue
            for choice in json.loads(line[6:])["choices"]:
                firsts.setdefault(choice["index"], choice["text"])
                texts[choice["index"]] += choice["text"]
    assert all(first.startswith(PROMPT) for first in firsts.values())
    assert [texts[0], texts[1]] == [choice["text"] for choice in whole]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt_logprobs": 1, "stream": True}, "stream"),
        ({"echo": True, "logprobs": 1, "stream": True}, "stream"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"max_tokens": 0}, "max_tokens"),
    ],
)
def test_what_cannot_be_told_is_refused_by_name(system: RealStack, fields: dict[str, Any], param: str):
    response = system.http.post("/v1/completions", json={"prompt": PROMPT, **fields})
    assert assert_openai_error(response, 400)["param"] == param
