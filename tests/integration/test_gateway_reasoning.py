"""Reasoning through the API: in fields and items of its own, whole and streamed, counted, and never among the calls."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.gateway_stack import HELLO, Stack, assert_openai_error, running_stack
from tests.scripted import EngineScript

THOUGHT = ["<think>Two", "and two.", "</think>\n\nIt", "is", "4."]
CALL = ["<think>I call", "<tool_call>", "</think>", '<tool_call>{"name": "add", "arguments": {"a": 2}}</tool_call>']
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]


def script(tokens: list[str], *, is_reasoning_open: bool = False) -> EngineScript:
    return EngineScript(tokens=tokens, reasoning="think", is_reasoning_open=is_reasoning_open)


@pytest.fixture(scope="module")
def shared_stack() -> Iterator[Stack]:
    with running_stack(script=script(THOUGHT)) as running:
        yield running


@pytest.fixture
def stack(shared_stack: Stack) -> Stack:
    shared_stack.engine.script = script(THOUGHT)
    shared_stack.engine.requests.clear()
    return shared_stack


@pytest.fixture
def client(stack: Stack) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{stack.url}/v1", api_key="any", max_retries=0) as made:
        yield made


def chunks(stack: Stack, **fields: Any) -> list[dict[str, Any]]:
    answer = stack.chat(stream=True, **fields)
    assert answer.status_code == 200, answer.text
    lines = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


def test_reasoning_has_a_field_of_its_own(stack: Stack):
    answer = stack.chat().json()
    [choice] = answer["choices"]
    assert choice["message"]["content"] == "It is 4."
    assert choice["message"]["reasoning_content"] == choice["message"]["reasoning"] == "Two and two. "
    assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": 3}
    assert answer["usage"]["completion_tokens"] == 5


def test_a_prompt_that_opened_the_reasoning_is_told_by_the_engine(stack: Stack):
    stack.engine.script = script(["Two", "and two.</think>", "4"], is_reasoning_open=True)
    [choice] = stack.chat().json()["choices"]
    assert (choice["message"]["reasoning_content"], choice["message"]["content"]) == ("Two and two.", " 4")


def test_streamed_reasoning_comes_first_and_adds_up(stack: Stack):
    said = chunks(stack, n=2, stream_options={"include_usage": True})
    assert said[-1]["usage"]["completion_tokens_details"]["reasoning_tokens"] == 6
    for index in range(2):
        deltas = [c["choices"][0]["delta"] for c in said if c["choices"] and c["choices"][0]["index"] == index]
        kinds = [name for delta in deltas for name in ("reasoning_content", "content") if delta.get(name)]
        assert kinds == sorted(kinds, reverse=True)
        assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "Two and two. "
        assert "".join(delta.get("reasoning", "") for delta in deltas) == "Two and two. "
        assert "".join(delta.get("content") or "" for delta in deltas) == "It is 4."


def test_every_token_has_its_log_probability_reasoning_or_not(stack: Stack):
    told = [c["choices"][0]["logprobs"] for c in chunks(stack, logprobs=True)]
    entries = [entry["token"] for each in told if each for entry in each["content"]]
    assert entries == [THOUGHT[0], *(f" {text}" for text in THOUGHT[1:])]


def test_an_answer_cut_while_the_model_thinks_has_no_content(stack: Stack):
    [choice] = stack.chat(max_tokens=2).json()["choices"]
    assert choice["message"]["content"] is None
    assert choice["message"]["reasoning_content"] == "Two and two."
    assert choice["finish_reason"] == "length"


def test_a_call_that_the_model_only_thinks_of_is_none(stack: Stack):
    stack.engine.script = script(CALL)
    [choice] = stack.chat(tools=TOOLS).json()["choices"]
    assert choice["message"]["reasoning_content"] == "I call <tool_call> "
    assert choice["message"]["content"] is None
    [call] = choice["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"a": 2}
    assert choice["finish_reason"] == "tool_calls"


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, {}),
        ({"chat_template_kwargs": {"enable_thinking": False}}, {"enable_thinking": False}),
        ({"reasoning_effort": "high"}, {"reasoning_effort": "high"}),
        ({"reasoning_effort": "none"}, {"reasoning_effort": "none", "enable_thinking": False, "thinking": False}),
        (
            {"reasoning_effort": "none", "chat_template_kwargs": {"thinking": True}},
            {"reasoning_effort": "none", "enable_thinking": False, "thinking": True},
        ),
    ],
)
def test_the_template_hears_whether_to_think(stack: Stack, fields: dict[str, Any], expected: dict[str, Any]):
    assert stack.chat(**fields).status_code == 200
    assert stack.engine.requests[-1].template_kwargs == expected


def test_an_effort_that_does_not_exist_is_refused(stack: Stack):
    assert assert_openai_error(stack.chat(reasoning_effort="huge"), 400)["param"] == "reasoning_effort"
    assert assert_openai_error(stack.chat(chat_template_kwargs="x"), 400)["param"] == "chat_template_kwargs"


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
def test_reasoning_of_earlier_turns_goes_to_the_template(stack: Stack, name: str):
    earlier = {"role": "assistant", "content": "4", name: "Two and two."}
    assert stack.chat([*HELLO, earlier, *HELLO]).status_code == 200
    assert stack.engine.requests[-1].messages is not None
    assert stack.engine.requests[-1].messages[1].reasoning_content == "Two and two."


def test_a_response_has_the_reasoning_as_an_item(client: openai.OpenAI, stack: Stack):
    answer = client.responses.create(model="scripted", input="2 + 2?", reasoning={"effort": "low"})
    thought, message = answer.output
    assert thought.type == "reasoning"
    assert thought.content is not None
    assert [(part.type, part.text) for part in thought.content] == [("reasoning_text", "Two and two. ")]
    assert message.type == "message"
    assert answer.output_text == "It is 4."
    assert answer.usage is not None
    assert answer.usage.output_tokens_details.reasoning_tokens == 3
    assert answer.reasoning is not None
    assert answer.reasoning.effort == "low"
    assert stack.engine.requests[-1].template_kwargs == {"reasoning_effort": "low"}


def test_the_official_client_follows_the_streamed_items(client: openai.OpenAI):
    with client.responses.create(model="scripted", input="2 + 2?", stream=True) as stream:
        events = list(stream)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    thought = "".join(event.delta for event in events if event.type == "response.reasoning_text.delta")
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert (thought, text) == ("Two and two. ", "It is 4.")
    last = events[-1]
    assert last.type == "response.completed"
    done = [event.item for event in events if event.type == "response.output_item.done"]
    assert done == last.response.output
    added = [(e.output_index, e.item.type) for e in events if e.type == "response.output_item.added"]
    assert added == [(0, "reasoning"), (1, "message")]
    places = {e.output_index for e in events if e.type == "response.reasoning_text.delta"}
    assert places == {0}


def test_the_items_of_a_response_can_be_sent_back(client: openai.OpenAI, stack: Stack):
    first = client.responses.create(model="scripted", input="2 + 2?")
    items: list[Any] = [item.model_dump(exclude_none=True) for item in first.output]
    client.responses.create(model="scripted", input=[{"role": "user", "content": "2 + 2?"}, *items])
    messages = stack.engine.requests[-1].messages
    assert messages is not None
    user, assistant = messages
    assert (user.role, assistant.role) == ("user", "assistant")
    assert assistant.reasoning_content == "Two and two. "
    assert [part.text for part in assistant.content if part.type == "text"] == ["It is 4."]


def test_a_call_of_an_earlier_response_keeps_its_reasoning(client: openai.OpenAI, stack: Stack):
    items: list[Any] = [
        {"role": "user", "content": "2 + 2?"},
        {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "I add."}]},
        {"type": "function_call", "call_id": "c1", "name": "add", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "4"},
    ]
    client.responses.create(model="scripted", input=items)
    messages = stack.engine.requests[-1].messages
    assert messages is not None
    assert [message.role for message in messages] == ["user", "assistant", "tool"]
    assert messages[1].reasoning_content == "I add."
    assert messages[1].tool_calls is not None
