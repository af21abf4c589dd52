"""What a client hears of limits: headers before it runs into one, a refusal that helps, and a log without keys."""

from __future__ import annotations

import re
from collections.abc import Iterator

import httpx
import pytest
from structlog.testing import capture_logs

from shared.errors import ContextTooLong
from tests.gateway_stack import HELLO, Stack, assert_openai_error, running_stack
from tests.scripted import EngineScript

LIMIT_HEADERS = ("x-ratelimit-limit-requests", "x-ratelimit-remaining-requests", "x-ratelimit-reset-requests")


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    with running_stack() as running:
        yield running


def ask(stack: Stack, key: str, **fields: object) -> httpx.Response:
    headers = {"Authorization": f"Bearer {key}"}
    return stack.http.post("/v1/chat/completions", json={"messages": HELLO, **fields}, headers=headers)


def test_a_key_with_a_limit_sees_what_is_left_of_it():
    with running_stack(api_keys=("alice:sk-alice-1234", "bob:sk-bob-5678"), max_requests_per_minute=2) as stack:
        with capture_logs() as logs:
            answers = [ask(stack, "sk-alice-1234", stream=stream) for stream in (False, True, False)]
        assert [answer.status_code for answer in answers] == [200, 200, 429]
        told = [[answer.headers[name] for name in LIMIT_HEADERS] for answer in answers]
        assert [(limit, left) for limit, left, _ in told] == [("2", "1"), ("2", "0"), ("2", "0")]
        resets = [reset for *_, reset in told]
        assert re.fullmatch(r"(29|30)s", resets[0])
        assert all(re.fullmatch(r"5\ds|1m0s", reset) for reset in resets[1:])
        assert 1 <= int(answers[-1].headers["retry-after"]) <= 30
        assert ask(stack, "sk-bob-5678").headers["x-ratelimit-remaining-requests"] == "1"
        refused = [line for line in logs if line.get("status") == 429]
        assert [(line["key"], line["outcome"]) for line in refused] == [("alice", "rate_limit_exceeded")]
        assert "sk-alice" not in str(logs)
        assert not any(name in ask(stack, "wrong").headers for name in LIMIT_HEADERS)


def test_without_a_limit_there_is_nothing_to_tell(stack: Stack):
    assert not any(name in stack.chat().headers for name in LIMIT_HEADERS)


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("GET", "/v1/chat/completions", "POST"),
        ("POST", "/v1/models", "GET"),
        ("PUT", "/v1/files/file-x", "DELETE, GET"),
        ("DELETE", "/v1/files", "GET, POST"),
        ("PATCH", "/v1/responses", "POST"),
    ],
)
def test_a_method_that_a_path_does_not_take_is_answered_with_those_it_does(
    stack: Stack, method: str, path: str, allowed: str
):
    answer = stack.http.request(method, path)
    error = assert_openai_error(answer, 405, "method_not_allowed")
    assert answer.headers["allow"] == allowed
    assert f"{method} {path}" in error["message"]
    assert error["message"].endswith(f"the path takes {allowed}")


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/v1/chat/completions", {"messages": HELLO, "max_tokens": 9}, "max_tokens"),
        ("/v1/chat/completions", {"messages": HELLO, "max_completion_tokens": 9}, "max_completion_tokens"),
        ("/v1/responses", {"input": "hi", "max_output_tokens": 9}, "max_output_tokens"),
        ("/v1/completions", {"prompt": "hi", "max_tokens": 9}, "max_tokens"),
    ],
)
def test_a_length_that_cannot_fit_is_refused_under_the_name_that_the_client_used(
    stack: Stack, path: str, fields: dict[str, object], param: str
):
    """Case B22. The engine, which counts, knows one name."""
    stack.engine.script = EngineScript(
        refuse=ContextTooLong("max_tokens is 9, there is room for 4; or leave max_tokens out", param="max_tokens")
    )
    error = assert_openai_error(stack.http.post(path, json=fields), 400, "context_length_exceeded")
    assert error["param"] == param
    assert error["message"] == f"{param} is 9, there is room for 4; or leave {param} out"


def test_only_a_length_that_was_asked_for_is_held_against_the_context(stack: Stack):
    stack.engine.script = EngineScript()
    stack.engine.requests.clear()
    for fields in ({}, {"max_tokens": 16}):
        assert stack.http.post("/v1/completions", json={"prompt": "hi", **fields}).status_code == 200
    assert [request.cuts_to_context for request in stack.engine.requests] == [True, False]
    assert [request.sampling["max_tokens"] for request in stack.engine.requests] == [16, 16]
