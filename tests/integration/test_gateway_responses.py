"""The Responses API at the gateway, over real sockets and through the official client, with a scripted engine."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from shared.errors import ContextTooLong, UpstreamFailed
from tests.gateway_stack import Stack, assert_openai_error, data_url, eventually, running_stack
from tests.scripted import IMAGE_TOKENS, WORDS, EngineScript, png

ANSWER = " ".join(WORDS)
PICTURE = {"type": "input_image", "image_url": data_url(png(1))}


@pytest.fixture(scope="module")
def shared_stack() -> Iterator[Stack]:
    with running_stack() as running:
        yield running


@pytest.fixture
def stack(shared_stack: Stack) -> Stack:
    shared_stack.reset()
    return shared_stack


@pytest.fixture
def client(stack: Stack) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{stack.url}/v1", api_key="any", max_retries=0) as made:
        yield made


def respond(stack: Stack, given: Any = "hi there", **fields: Any) -> httpx.Response:
    return stack.http.post("/v1/responses", json={"input": given, **fields})


def events(response: httpx.Response) -> list[dict[str, Any]]:
    """The data of a finished stream; every event is named by its own type and numbered."""
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    found = []
    for frame in response.text.removesuffix("\n\n").split("\n\n"):
        name, data = frame.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    return found


# --- answers ----------------------------------------------------------------------------------------------------------


def test_the_official_client_gets_a_response(client: openai.OpenAI):
    response = client.responses.create(model="scripted", input="hi there", instructions="Be terse.")
    assert response.output_text == ANSWER
    assert (response.status, response.model, response.instructions) == ("completed", "scripted", "Be terse.")
    assert response.id.startswith("resp_")
    assert response.usage is not None
    assert response.usage.output_tokens == len(WORDS)
    assert response.usage.total_tokens == response.usage.input_tokens + response.usage.output_tokens


def test_the_official_client_streams_the_same_response_in_the_order_of_the_api(client: openai.OpenAI):
    with client.responses.stream(model="scripted", input="hi there") as stream:
        kinds = [event.type for event in stream if event.type != "response.output_text.delta"]
        final = stream.get_final_response()
    assert kinds == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert final.output_text == ANSWER


async def test_the_official_async_client_streams_the_same_text(stack: Stack):
    async with openai.AsyncOpenAI(base_url=f"{stack.url}/v1", api_key="any", max_retries=0) as client:
        stream = await client.responses.create(model="scripted", input="hi there", stream=True)
        pieces = [event.delta async for event in stream if event.type == "response.output_text.delta"]
    assert "".join(pieces) == ANSWER


def test_every_event_of_a_stream_tells_the_same_story(stack: Stack):
    told = events(respond(stack, stream=True, instructions="Be terse."))
    whole = respond(stack, instructions="Be terse.").json()
    last = told[-1]["response"]
    assert [part["text"] for part in last["output"][0]["content"]] == [ANSWER]
    assert "".join(event["delta"] for event in told if event["type"] == "response.output_text.delta") == ANSWER
    assert {event["response"]["id"] for event in told if "response" in event} == {last["id"]}
    assert {event["item_id"] for event in told if "item_id" in event} == {last["output"][0]["id"]}
    assert told[0]["response"]["status"] == "in_progress"
    changing = ("id", "created_at", "output", "usage")
    assert {k: v for k, v in last.items() if k not in changing} == {k: v for k, v in whole.items() if k not in changing}


def test_pictures_are_input_by_url_and_by_file(stack: Stack, client: openai.OpenAI):
    file_id = client.files.create(file=png(2), purpose="vision").id
    content = [{"type": "input_text", "text": "what is it"}, PICTURE, {"type": "input_image", "file_id": file_id}]
    response = client.responses.create(model="scripted", input=[{"role": "user", "content": content}])  # type: ignore[arg-type]
    [request] = stack.engine.requests
    assert request.messages is not None
    assert [part.type for part in request.messages[0].content] == ["text", "image", "image"]
    assert response.usage is not None
    assert response.usage.input_tokens > 2 * IMAGE_TOKENS
    details = response.usage.input_tokens_details.to_dict()
    assert details["image_tokens"] == 2 * IMAGE_TOKENS
    assert details["cached_tokens"] == (response.usage.input_tokens - 1) // 16 * 16


def test_a_conversation_is_input_as_its_items(stack: Stack, client: openai.OpenAI):
    first = client.responses.create(model="scripted", input="hi there")
    turns: list[Any] = [
        {"role": "developer", "content": "Be terse."},
        {"role": "user", "content": "hi there"},
        *first.output,
        {"type": "function_call", "call_id": "c1", "name": "look", "arguments": "{}"},
        {"type": "function_call", "call_id": "c2", "name": "look", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "a cat"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "a dog"}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "and now"}]},
    ]
    client.responses.create(model="scripted", input=turns, instructions="Use bullets.")
    messages = stack.engine.requests[-1].messages
    assert messages is not None
    assert [message.role for message in messages] == [
        "system",
        "system",
        "user",
        "assistant",
        "tool",
        "tool",
        "user",
    ]
    texts = ["".join(part.text for part in message.content if part.type == "text") for message in messages]
    assert texts == ["Use bullets.", "Be terse.", "hi there", ANSWER, "a cat", "a dog", "and now"]
    assert [call["id"] for call in messages[3].tool_calls or []] == ["c1", "c2"]
    assert [message.tool_call_id for message in messages[4:6]] == ["c1", "c2"]


def test_an_item_whose_type_is_null_is_a_message(stack: Stack):
    assert respond(stack, [{"type": None, "role": "user", "content": "hi there"}]).status_code == 200


def test_sampling_fields_reach_the_engine(stack: Stack):
    fields = {"max_output_tokens": 5, "temperature": 0.5, "top_p": 0.9, "top_k": 3, "seed": 1, "priority": -1}
    assert respond(stack, **fields).status_code == 200
    [request] = stack.engine.requests
    assert request.sampling == {"max_tokens": 5, "temperature": 0.5, "top_p": 0.9, "top_k": 3, "seed": 1}
    assert request.priority == -1


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_was_cut_is_incomplete(stack: Stack, stream: bool):
    answer = respond(stack, max_output_tokens=4, stream=stream)
    if stream:
        last = events(answer)[-1]
        assert last["type"] == "response.incomplete"
    body = last["response"] if stream else answer.json()
    assert (body["status"], body["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert body["output"][0]["status"] == "incomplete"
    assert body["usage"]["output_tokens"] == 4


def test_log_probabilities_come_where_they_are_included(stack: Stack):
    include = ["message.output_text.logprobs"]
    [item] = respond(stack, include=include, top_logprobs=2).json()["output"]
    logprobs = item["content"][0]["logprobs"]
    assert len(logprobs) == len(WORDS)
    assert all(len(entry["top_logprobs"]) == 2 for entry in logprobs)
    told = events(respond(stack, include=include, stream=True))
    assert all(event["logprobs"] for event in told if event["type"] == "response.output_text.delta")
    [plain] = respond(stack, top_logprobs=2).json()["output"]
    assert plain["content"][0]["logprobs"] == []


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fields",
    [
        {"previous_response_id": "resp_1"},
        {"conversation": "conv_1"},
        {"store": True},
        {"background": True},
        {"prompt": {"id": "pmpt_1"}},
        {"truncation": "auto"},
        {"max_tokens": 5},
        {"n": 2},
        {"prompt_logprobs": 0},
        {"response_format": {"type": "json_object"}},
    ],
)
def test_what_is_not_here_is_refused_by_name(stack: Stack, fields: dict[str, Any]):
    error = assert_openai_error(respond(stack, **fields), 400, "unsupported_feature")
    assert [error["param"]] == list(fields)


def test_asking_for_what_happens_anyway_is_fine(stack: Stack):
    harmless = {
        "store": False,
        "background": False,
        "previous_response_id": None,
        "truncation": "disabled",
        "tools": [],
        "text": {"format": {"type": "text"}},
        "metadata": {"a": "b"},
        "reasoning": {"effort": "low"},
        "user": "u",
    }
    answer = respond(stack, **harmless)
    assert answer.status_code == 200, answer.text
    assert answer.json()["metadata"] == {"a": "b"}
    assert answer.json()["store"] is False


def test_nothing_is_stored(stack: Stack):
    made = respond(stack).json()["id"]
    assert_openai_error(stack.http.get(f"/v1/responses/{made}"), 404)


def message(*content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(content)}]


@pytest.mark.parametrize(
    ("given", "param"),
    [
        (None, "input"),
        ([], "input"),
        ([5], "input[0]"),
        ([{"role": "banana", "content": "x"}], "input[0].role"),
        ([{"type": "item_reference", "id": "x"}], "input[0].type"),
        (message({"type": "input_audio"}), "input[0].content[0].type"),
        (message({"type": "input_image"}), "input[0].content[0]"),
        (message({"type": "input_image", "image_url": "no url"}), "input[0].content[0].image_url"),
        (message({"type": "input_image", "file_id": "file-unknown"}), "input[0].content[0].image_url"),
        (message({"type": "input_text"}), "input[0].content[0].text"),
        (message(), "input[0].content"),
    ],
)
def test_input_that_is_wrong_is_named_as_the_client_wrote_it(stack: Stack, given: Any, param: str):
    answer = respond(stack, given, instructions="a message that the client did not number")
    error = assert_openai_error(answer, 404 if "file-unknown" in answer.text else 400)
    assert error["param"] == param
    assert "messages" not in error["message"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"temperature": 5}, "temperature"),
        ({"min_tokens": 9, "max_output_tokens": 2}, "min_tokens"),
        ({"include": ["message.output_text.logprobs"], "top_logprobs": 1000}, "top_logprobs"),
    ],
)
def test_values_out_of_range_name_their_field(stack: Stack, fields: dict[str, Any], param: str):
    error = assert_openai_error(respond(stack, **fields), 400)
    assert error["param"] == param
    assert "max_tokens" not in error["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_errors_known_beforehand_are_plain_and_typed(stack: Stack, client: openai.OpenAI, stream: bool):
    stack.engine.script = EngineScript(refuse=ContextTooLong("the prompt is too long", param="messages"))
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.create(model="scripted", input="hi there", stream=stream)
    assert (refused.value.code, refused.value.param) == ("context_length_exceeded", "input")
    with pytest.raises(openai.NotFoundError):
        client.responses.create(model="no-such-model", input="hi there", stream=stream)


# --- what ends a response early ---------------------------------------------------------------------------------------


def test_an_engine_that_breaks_midway_ends_the_stream_with_the_error_and_a_failed_response(stack: Stack):
    stack.engine.script = EngineScript(fail=UpstreamFailed("the engine broke"), fail_after=3)
    *_, error, failed = events(respond(stack, stream=True))
    assert (error["type"], error["code"], error["message"]) == ("error", "upstream_failed", "the engine broke")
    assert failed["type"] == "response.failed"
    assert failed["response"]["status"] == "failed"
    assert failed["response"]["error"] == {"code": "upstream_failed", "message": "the engine broke"}
    assert failed["response"]["output"][0]["content"][0]["text"] == " ".join(WORDS[:3])
    assert_openai_error(respond(stack), 502, "upstream_failed")


def test_a_client_that_stops_waiting_ends_its_generation(stack: Stack):
    stack.engine.script = EngineScript(token_delay_s=0.05)
    with pytest.raises(httpx.ReadTimeout):
        stack.http.post("/v1/responses", json={"input": "hi there", "ignore_eos": True}, timeout=0.3)
    eventually(lambda: stack.engine.num_running == 0)
    assert stack.engine.num_aborted == 1


def test_a_lost_embedding_is_encoded_again(stack: Stack):
    stack.engine.script = EngineScript(lose_images=1)
    assert respond(stack, message(PICTURE)).status_code == 200


# --- tools and formats ------------------------------------------------------------------------------------------------

LOOK = {"type": "function", "name": "look", "description": "looks", "parameters": {"type": "object"}, "strict": False}
CALL = ['<tool_call>{"name": "look", "arguments": {"at":', "1}}</tool_call>"]


def test_a_tool_is_called_through_the_official_client(stack: Stack, client: openai.OpenAI):
    stack.engine.script = EngineScript(tokens=["I", "look.", *CALL, *CALL])
    asked: Any = {"model": "scripted", "input": "hi there", "tools": [LOOK]}
    text, first, second = client.responses.create(**asked).output
    assert text.type == "message"
    for call in (first, second):
        assert call.type == "function_call"
        assert (call.name, json.loads(call.arguments)) == ("look", {"at": 1})
    [request] = stack.engine.requests
    assert request.tools == [{"type": "function", "function": {k: v for k, v in LOOK.items() if k != "type"}}]
    with client.responses.stream(**asked) as stream:
        kinds = [event.type for event in stream]
        streamed = stream.get_final_response().output
    assert [item.type for item in streamed] == ["message", "function_call", "function_call"]
    assert kinds.count("response.output_item.added") == kinds.count("response.output_item.done") == 3
    assert kinds.index("response.output_text.done") < kinds.index("response.function_call_arguments.delta")


def test_items_of_a_stream_begin_and_end_in_turn(stack: Stack):
    stack.engine.script = EngineScript(tokens=[*CALL, "done", *CALL])
    told = events(respond(stack, tools=[LOOK], stream=True))
    turns = [(event["type"], event["output_index"]) for event in told if "output_item" in event["type"]]
    assert turns == [
        (f"response.output_item.{turn}", index) for index in range(len(turns) // 2) for turn in ("added", "done")
    ]
    ended = [event["item"] for event in told if event["type"] == "response.output_item.done"]
    assert ended == told[-1]["response"]["output"]


def test_an_answer_without_a_word_is_an_empty_message(stack: Stack):
    stack.engine.script = EngineScript(tokens=[""])
    assert respond(stack).json()["output"][0]["content"][0]["text"] == ""
    told = events(respond(stack, stream=True))
    assert [event["type"] for event in told].count("response.output_item.done") == 1


@pytest.mark.parametrize("choice", ["none", "required", {"type": "function", "name": "look"}])
def test_the_choice_of_a_tool_is_passed_on_and_repeated(stack: Stack, choice: Any):
    stack.engine.script = EngineScript(tokens=CALL)
    answer = respond(stack, tools=[LOOK], tool_choice=choice, parallel_tool_calls=False)
    assert answer.status_code == 200, answer.text
    assert (answer.json()["tool_choice"], answer.json()["parallel_tool_calls"]) == (choice, False)
    assert answer.json()["tools"] == [LOOK]


def test_a_format_constrains_the_answer(stack: Stack):
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": False}
    wanted = {"type": "json_schema", "name": "thing", "schema": schema, "strict": True}
    answer = respond(stack, text={"format": wanted})
    assert answer.status_code == 200, answer.text
    assert answer.json()["text"]["format"] == wanted
    constraint = stack.engine.requests[0].sampling["constraint"]
    assert (constraint["kind"], json.loads(constraint["value"])) == ("json_schema", schema)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [LOOK, {"type": "function"}]}, "tools[1].name"),
        ({"tools": [{"type": "function", "name": "not a name"}]}, "tools[0].name"),
        ({"tools": [LOOK], "tool_choice": {"type": "function", "name": "unknown"}}, "tool_choice"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
    ],
)
def test_tools_and_formats_that_are_wrong_name_their_field(stack: Stack, fields: dict[str, Any], param: str):
    error = assert_openai_error(respond(stack, **fields), 400)
    assert str(error["param"]).startswith(param)
    assert "function.name" not in error["message"]
