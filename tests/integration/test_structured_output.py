"""Structured answers and tools, as a user of the official client has them: its parse helpers, its streams, its errors.

A real gateway before a real engine with the demo model, which was taught neither JSON nor tools.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import openai
import pytest
from openai import OpenAI
from pydantic import BaseModel, Field

from services.gateway.app import create_app as create_gateway
from services.gateway.config import GatewaySettings
from services.text_engine.app import create_app as create_engine
from services.text_engine.config import TextEngineSettings
from tests.gateway_stack import eventually
from tests.scripted import serve

DEMO = Path(__file__).resolve().parents[2] / "models" / "demo" / "checkpoint"
QUESTION: list[Any] = [{"role": "user", "content": "Where is the red circle?"}]
BAD_PATTERN = {"name": "x", "schema": {"type": "string", "pattern": "("}}
BAD_TYPE = {"name": "x", "schema": {"type": "not-a-type"}}


class Shape(BaseModel):
    colour: Literal["red", "green", "blue"]
    label: Annotated[str, Field(max_length=12)]
    corners: Annotated[int, Field(ge=0, le=8)]
    inside: list[Literal["circle", "square"]] = Field(max_length=2)


class Look(BaseModel):
    """Look at a place of the picture."""

    where: Literal["left", "right"]
    how_long_s: Annotated[int, Field(ge=1, le=60)]


TOOLS: list[Any] = [
    openai.pydantic_function_tool(Look, name="look"),
    {"type": "function", "function": {"name": "now"}},
]


@pytest.fixture(scope="module")
def client() -> Iterator[OpenAI]:
    settings = TextEngineSettings(
        model=DEMO, device="cpu", dtype="float32", kv_cache_memory="64MiB", num_threads=1, log_level="warning"
    )
    with ExitStack() as stack:
        engine_url = stack.enter_context(serve(create_engine(settings)))
        gateway = create_gateway(GatewaySettings(text_engines=(engine_url,), probe_interval_s=0.1))
        url = stack.enter_context(serve(gateway))
        client = stack.enter_context(OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60))
        eventually(lambda: _is_ready(client), within_s=60)
        yield client


def _is_ready(client: OpenAI) -> bool:
    try:
        return bool(client.models.list().data)
    except openai.APIError:
        return False


SCHEMA_PARAM: Final = "response_format.json_schema.schema"
SHAPE: Final = {"type": "json_schema", "json_schema": {"name": "shape", "schema": Shape.model_json_schema()}}


def ask(client: OpenAI, **fields: Any) -> Any:
    return client.chat.completions.create(**{"model": "checkpoint", "messages": QUESTION, "max_tokens": 300, **fields})


# --- formats ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 1.0, 2.0])
def test_the_clients_parse_helper_gets_its_model_back(client: OpenAI, temperature: float):
    for seed in range(3):
        answer = client.chat.completions.parse(
            model="checkpoint",
            messages=QUESTION,
            response_format=Shape,
            temperature=temperature,
            seed=seed,
            max_tokens=300,
        )
        assert answer.choices[0].finish_reason == "stop"
        assert isinstance(answer.choices[0].message.parsed, Shape)


def test_the_clients_streaming_parse_helper_too(client: OpenAI):
    with client.chat.completions.stream(
        model="checkpoint", messages=QUESTION, response_format=Shape, temperature=1.0, seed=3, max_tokens=300
    ) as stream:
        contents = [event.delta for event in stream if event.type == "content.delta"]
        answer = stream.get_final_completion()
    assert isinstance(answer.choices[0].message.parsed, Shape)
    assert Shape.model_validate_json("".join(contents)) == answer.choices[0].message.parsed


def test_a_schema_that_does_not_close_its_objects_does_not_make_the_model_go_on_for_ever(client: OpenAI):
    for seed in range(4):
        answer = ask(client, temperature=1.5, seed=seed, extra_body={"guided_json": Shape.model_json_schema()})
        assert answer.choices[0].finish_reason == "stop"
        Shape.model_validate_json(answer.choices[0].message.content)


def test_every_choice_is_valid_and_log_probabilities_are_the_models_own(client: OpenAI):
    answer = ask(client, response_format=SHAPE, n=3, temperature=1.5, seed=1, logprobs=True, top_logprobs=2)
    assert len({choice.message.content for choice in answer.choices}) > 1
    for choice in answer.choices:
        Shape.model_validate_json(choice.message.content)
        spelled = b"".join(bytes(entry.bytes) for entry in choice.logprobs.content)
        assert spelled.decode() == choice.message.content
        assert all(entry.logprob <= 0 for entry in choice.logprobs.content)


def test_vllms_extras_hold_in_chats_and_completions(client: OpenAI):
    answer = ask(client, temperature=1.0, extra_body={"guided_choice": ["yes", "no"]})
    assert answer.choices[0].message.content in ("yes", "no")
    answer = ask(client, temperature=1.0, extra_body={"structured_outputs": {"regex": r"\d{2}:\d{2}"}})
    assert re.fullmatch(r"\d{2}:\d{2}", answer.choices[0].message.content)
    grammar = 'root ::= "<" [a-c]{3} ">"'
    completion = client.completions.create(
        model="checkpoint", prompt=["a", "b"], temperature=1.0, max_tokens=50, extra_body={"guided_grammar": grammar}
    )
    assert all(re.fullmatch("<[abc]{3}>", choice.text) for choice in completion.choices)


def test_constrained_and_free_requests_run_side_by_side_without_touching_each_other(client: OpenAI):
    free: dict[str, Any] = {"temperature": 0.0, "max_tokens": 40}
    alone = ask(client, **free).choices[0].message.content
    jobs: list[dict[str, Any]] = [free, {"response_format": SHAPE, "temperature": 1.0}] * 6
    with ThreadPoolExecutor(len(jobs)) as pool:
        answers = list(pool.map(lambda fields: ask(client, **fields).choices[0].message.content, jobs))
    assert set(answers[::2]) == {alone}
    for text in answers[1::2]:
        Shape.model_validate_json(text)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "json_schema", "json_schema": BAD_PATTERN}}, SCHEMA_PARAM),
        ({"response_format": {"type": "json_schema", "json_schema": BAD_TYPE}}, SCHEMA_PARAM),
        ({"extra_body": {"guided_regex": "[a-"}}, "guided_regex"),
        ({"extra_body": {"guided_json": "{"}}, "guided_json"),
        ({"extra_body": {"structured_outputs": {"grammar": "start: x"}}}, "structured_outputs.grammar"),
        ({"extra_body": {"guided_regex": "a", "guided_choice": ["a"]}}, "guided_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice"),
        ({"extra_body": {"stop_token_ids": [999_999]}}, "stop_token_ids"),
    ],
)  # fmt: skip
def test_what_cannot_be_followed_is_refused_before_a_token_is_spent(
    client: OpenAI, stream: bool, fields: dict[str, Any], param: str
):
    """Case B32."""
    with pytest.raises(openai.BadRequestError) as refused:
        ask(client, stream=stream, **fields)
    assert refused.value.param == param
    assert refused.value.type == "invalid_request_error"
    assert len(refused.value.message) > 40
    assert ask(client, max_tokens=2).choices[0].finish_reason in ("stop", "length")


# --- tools ------------------------------------------------------------------------------------------------------------


def assert_valid_call(call: Any) -> None:
    assert call.type == "function"
    if call.function.name == "look":
        Look.model_validate_json(call.function.arguments)
    else:
        assert (call.function.name, json.loads(call.function.arguments)) == ("now", {})


@pytest.mark.parametrize("seed", range(4))
def test_a_required_call_comes_and_its_arguments_parse(client: OpenAI, seed: int):
    answer = ask(client, tools=TOOLS, tool_choice="required", temperature=1.0, seed=seed, parallel_tool_calls=False)
    [choice] = answer.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    [call] = choice.message.tool_calls
    assert_valid_call(call)


def test_several_calls_have_ids_of_their_own(client: OpenAI):
    long = {"max_tokens": 400, "extra_body": {"min_tokens": 120}}  # no end while another call may follow
    answer = ask(client, tools=TOOLS, tool_choice="required", temperature=1.0, seed=1, **long)
    calls = answer.choices[0].message.tool_calls
    assert len(calls) > 1
    assert len({call.id for call in calls}) == len(calls)
    for call in calls:
        assert_valid_call(call)


def test_a_named_call_streams_and_equals_the_whole_one(client: OpenAI):
    fields: dict[str, Any] = {
        "tools": TOOLS,
        "tool_choice": {"type": "function", "function": {"name": "look"}},
        "temperature": 1.0,
        "seed": 5,
        "parallel_tool_calls": False,
    }
    whole = ask(client, **fields).choices[0].message.tool_calls[0].function
    deltas = [chunk.choices[0] for chunk in ask(client, stream=True, **fields)]
    first, *later = [call for choice in deltas for call in choice.delta.tool_calls or []]
    assert (first.index, first.function.name, first.function.arguments) == (0, "look", "")
    assert len(later) > 3, "arguments come as they are written"
    assert {(call.index, call.id, call.function.name) for call in later} == {(0, None, None)}
    assert "".join(call.function.arguments for call in later) == whole.arguments
    assert [choice.finish_reason for choice in deltas if choice.finish_reason] == ["tool_calls"]
    assert not any(choice.delta.content for choice in deltas)
    Look.model_validate_json(whole.arguments)


def test_the_clients_streaming_helper_parses_arguments(client: OpenAI):
    with client.chat.completions.stream(
        model="checkpoint",
        messages=QUESTION,
        tools=TOOLS[:1],
        tool_choice="required",
        parallel_tool_calls=False,
        temperature=1.0,
        seed=2,
        max_tokens=300,
    ) as stream:
        kinds = {event.type for event in stream}
        [call] = stream.get_final_completion().choices[0].message.tool_calls or []
    assert "tool_calls.function.arguments.done" in kinds
    assert isinstance(call.function.parsed_arguments, Look)


def test_calls_and_results_go_back_into_the_conversation(client: OpenAI):
    first = ask(client, tools=TOOLS, tool_choice="required", seed=1, parallel_tool_calls=False).choices[0].message
    result = {"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": "a red circle"}
    history = [*QUESTION, first.model_dump(exclude_none=True), result]
    with_result = ask(client, messages=history, tools=TOOLS, max_tokens=5)
    without = ask(client, tools=TOOLS, max_tokens=5)
    bare = ask(client, max_tokens=5)
    assert with_result.usage.prompt_tokens > without.usage.prompt_tokens > bare.usage.prompt_tokens
    assert ask(client, tools=TOOLS, tool_choice="none", max_tokens=5).usage.prompt_tokens == bare.usage.prompt_tokens


def test_a_model_that_does_not_call_answers_in_text(client: OpenAI):
    choice = ask(client, tools=TOOLS, temperature=0.0, max_tokens=20).choices[0]
    assert choice.message.tool_calls is None
    assert choice.message.content
    assert choice.finish_reason in ("stop", "length")


def test_with_tools_and_a_format_the_answer_is_a_call_or_json(client: OpenAI):
    for seed in range(4):
        choice = ask(client, tools=TOOLS, response_format=SHAPE, temperature=1.0, seed=seed).choices[0]
        if choice.message.tool_calls:
            assert choice.finish_reason == "tool_calls"
            for call in choice.message.tool_calls:
                assert_valid_call(call)
        else:
            Shape.model_validate_json(choice.message.content)


# --- usage ------------------------------------------------------------------------------------------------------------


def test_usage_so_far_comes_with_every_chunk_on_request(client: OpenAI):
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = list(ask(client, stream=True, stream_options=options, max_tokens=6, extra_body={"ignore_eos": True}))
    counts = [chunk.usage.completion_tokens for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[0] >= 1
    assert counts[-1] == 6
    assert len({chunk.usage.prompt_tokens for chunk in chunks}) == 1
