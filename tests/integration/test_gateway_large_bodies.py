"""A large body holds up nobody else: its pictures are decoded, and its values read, beside the event loop."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Callable, Coroutine
from typing import Any

import httpx
import orjson
import pytest
from starlette.requests import Request

from services.gateway import body as bodies
from services.gateway.body import MAX_BRACKETS, MAX_COMMAS, read_json
from services.gateway.data_urls import decode_data_url, decoded
from services.gateway.schema import MAX_MESSAGES, ChatRequest, CompletionRequest
from shared.errors import InvalidRequest, PayloadTooLarge
from tests.gateway_stack import Stack, assert_openai_error, data_url, question, running_stack
from tests.scripted import png

MIB = 2**20


@pytest.fixture(scope="module")
def stack() -> Any:
    with running_stack() as running:
        yield running


async def turns_of_the_loop_while(work: Coroutine[Any, Any, Any]) -> tuple[Any, int]:
    """What the work gives, and how often another task had its turn meanwhile."""
    working = asyncio.ensure_future(work)
    num_turns = 0
    while not working.done():
        await asyncio.sleep(0)
        num_turns += 1
    return await working, num_turns


def request_with(body: bytes) -> Request:
    """As a server hands it over, in pieces of 64 KiB."""
    pieces = [body[start : start + 2**16] for start in range(0, len(body), 2**16)]

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": pieces.pop(0), "more_body": len(pieces) > 0}

    return Request({"type": "http", "method": "POST", "headers": []}, receive)


def read(body: dict[str, Any], model: Callable[..., Any] = ChatRequest) -> Coroutine[Any, Any, Any]:
    return read_json(request_with(orjson.dumps(body)), model, 64 * MIB)  # type: ignore[arg-type]


async def test_the_loop_goes_round_while_forty_megabytes_of_a_picture_are_decoded():
    data = bytes(range(256)) * (30 * MIB // 256)
    url = "data:image/png;base64," + base64.b64encode(data).decode()
    got, num_turns = await turns_of_the_loop_while(decoded(decode_data_url, url))
    assert got == data
    assert num_turns > 10, "one turn would mean that nobody else was served meanwhile"


async def test_the_loop_goes_round_while_a_body_of_many_messages_is_checked():
    messages = [{"role": "user", "content": "x" * 50}] * MAX_MESSAGES
    num_pieces = len(orjson.dumps({"messages": messages})) // 2**16
    body, num_turns = await turns_of_the_loop_while(read({"messages": messages}))
    assert len(body.messages) == MAX_MESSAGES
    assert num_turns > num_pieces + 10


async def test_a_small_body_is_read_where_it_is(monkeypatch: pytest.MonkeyPatch):
    async def never(*_: object) -> None:
        raise AssertionError("a thread costs more than this takes")

    monkeypatch.setattr(bodies.asyncio, "to_thread", never)
    assert (await read({"messages": question(data_url(png(1)))})).messages


def test_requests_that_come_after_a_large_one_are_answered_before_it(stack: Stack):

    async def ask() -> list[str]:
        order: list[str] = []
        pictures = [data_url(png(seed) + bytes(6 * MIB)) for seed in range(5)]  # forty megabytes of text

        async def post(http: httpx.AsyncClient, name: str, messages: list[dict[str, Any]]) -> None:
            answer = await http.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 1})
            assert answer.status_code == 200, answer.text
            order.append(name)

        async with httpx.AsyncClient(base_url=stack.url, timeout=60, trust_env=False) as http:
            large = asyncio.create_task(post(http, "large", question(*pictures)))
            await asyncio.sleep(0)
            while not large.done():
                await post(http, "small", [{"role": "user", "content": "hi"}])
            await large
        return order

    order = asyncio.run(ask())
    assert order.index("large") >= 3


@pytest.mark.parametrize(
    ("dense", "said"),
    [
        ({"messages": [{"role": "user", "content": "hi"}], "x": [[]] * MAX_BRACKETS}, "opening brackets"),
        ({"messages": [{"role": "user", "content": "hi"}], "x": [1] * (MAX_COMMAS + 2)}, "commas"),
        ({"messages": [{"role": "user", "content": "{ " * (MAX_BRACKETS + 1)}]}, "opening brackets"),
    ],
)
async def test_a_body_of_more_values_than_can_mean_anything_is_refused_unread(dense: dict[str, Any], said: str):
    with pytest.raises(PayloadTooLarge, match=said):
        await read(dense)


async def test_a_prompt_of_as_many_token_ids_as_are_allowed_is_read():
    body = await read({"prompt": [7] * MAX_COMMAS}, CompletionRequest)
    assert len(body.prompt[0]) == MAX_COMMAS


async def test_a_conversation_of_too_many_messages_is_refused_by_their_number():
    with pytest.raises(InvalidRequest, match=str(MAX_MESSAGES)) as refused:
        await read({"messages": [{"role": "user", "content": "hi"}] * (MAX_MESSAGES + 1)})
    assert refused.value.param == "messages"


def test_too_dense_a_body_is_answered_in_the_usual_shape(stack: Stack):
    body = b'{"messages":[' + b"[]," * (MAX_BRACKETS + 1) + b"[]]}"
    answer = stack.http.post("/v1/chat/completions", content=body, headers={"Content-Type": "application/json"})
    error = assert_openai_error(answer, 413, "payload_too_large")
    assert str(MAX_BRACKETS) in error["message"]
