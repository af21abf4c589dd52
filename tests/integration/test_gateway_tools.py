"""Calls of tools in every family's format, through the official client: whole and streamed, chosen and forced."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, get_args

import openai
import pytest

from shared.wire.engine import ToolFormat
from tests.gateway_stack import Stack, running_stack
from tests.scripted import EngineScript
from tests.tool_call_texts import Call, written

PARAMETERS = {"type": "object", "properties": {"at": {"type": "string"}, "times": {"type": "integer"}}}
LOOK = {"type": "function", "function": {"name": "look", "parameters": PARAMETERS}}
NOW = {"type": "function", "function": {"name": "now"}}
CALLS = [Call("look", {"at": "the cat on the mat", "times": 2}), Call("now", {})]
FUNCTIONS = [(call.name, json.dumps(call.arguments)) for call in CALLS]


@dataclass
class Family:
    form: ToolFormat
    stack: Stack
    client: openai.OpenAI

    def says(self, text: str) -> None:
        """Cut at spaces, so that calls come in pieces."""
        self.stack.engine.script.tokens = text.split(" ")

    def asks(self, **fields: Any) -> Any:
        messages: Any = [{"role": "user", "content": "hi there"}]
        given = {"model": "scripted", "messages": messages, "tools": [LOOK, NOW], **fields}
        return self.client.chat.completions.create(**given)


@pytest.fixture(scope="module", params=get_args(ToolFormat))
def family(request: pytest.FixtureRequest) -> Iterator[Family]:
    script = EngineScript(published={"tool_format": request.param})
    with (
        running_stack(script=script) as stack,
        openai.OpenAI(base_url=f"{stack.url}/v1", api_key="any", max_retries=0) as client,
    ):
        yield Family(request.param, stack, client)


def functions(message: Any) -> list[tuple[str, str]]:
    return [(call.function.name, call.function.arguments) for call in message.tool_calls or []]


def test_calls_are_read_and_streamed_while_they_are_written(family: Family):
    family.says(written(family.form, CALLS))
    [choice] = family.asks().choices
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
    assert functions(choice.message) == FUNCTIONS
    deltas = [delta for chunk in family.asks(stream=True) for delta in chunk.choices[0].delta.tool_calls or []]
    for number, function in enumerate(FUNCTIONS):
        first, *later = [delta.function for delta in deltas if delta.index == number]
        assert (first.name, first.arguments) == (function[0], "")
        assert "".join(delta.arguments for delta in later) == function[1]
    assert len([delta for delta in deltas if delta.index == 0]) > 4, "a delta for every piece"
    assert len({delta.id for delta in deltas if delta.id}) == len(CALLS)


def test_the_clients_helper_puts_the_stream_together(family: Family):
    family.says(written(family.form, CALLS))
    messages: Any = [{"role": "user", "content": "hi there"}]
    tools: Any = [LOOK, NOW]
    with family.client.chat.completions.stream(model="scripted", messages=messages, tools=tools) as stream:
        kinds = [event.type for event in stream]
        [choice] = stream.get_final_completion().choices
    assert functions(choice.message) == FUNCTIONS
    assert kinds.count("tool_calls.function.arguments.done") == len(CALLS)


def test_a_response_has_them_as_items_that_grow(family: Family):
    family.says(written(family.form, CALLS))
    tools: Any = [{"type": "function", **tool["function"]} for tool in (LOOK, NOW)]
    with family.client.responses.create(model="scripted", input="hi there", tools=tools, stream=True) as stream:
        events: list[Any] = list(stream)
    output = events[-1].response.output
    assert [(item.name, item.arguments) for item in output] == FUNCTIONS
    for index, item in enumerate(output):
        mine = [event for event in events if getattr(event, "output_index", None) == index]
        added, *deltas, done, ended = mine
        assert (added.type, added.item.arguments, added.item.status) == (
            "response.output_item.added",
            "",
            "in_progress",
        )
        assert {delta.type for delta in deltas} == {"response.function_call_arguments.delta"}
        assert done.type == "response.function_call_arguments.done"
        assert "".join(delta.delta for delta in deltas) == done.arguments == item.arguments
        assert (ended.type, ended.item) == ("response.output_item.done", item)
    assert (
        family.client.responses.create(model="scripted", input="hi there", tools=tools).output[0].type == output[0].type
    )


def test_a_call_that_is_cut_is_told_as_far_as_it_goes(family: Family):
    text = written(family.form, CALLS)
    family.says(text)
    num_tokens = 1 + text[: text.index(" on the")].count(" ")
    [choice] = family.asks(max_tokens=num_tokens).choices
    assert choice.finish_reason == "length"
    assert functions(choice.message) == [("look", '{"at": "the cat')]
    tools: Any = [{"type": "function", **LOOK["function"]}]
    told = family.client.responses.create(model="scripted", input="hi there", tools=tools, max_output_tokens=num_tokens)
    assert told.status == "incomplete"
    [item] = told.output
    assert item.type == "function_call"
    assert (item.status, item.arguments) == ("incomplete", '{"at": "the cat')


def test_one_call_is_told_if_calls_may_not_be_parallel(family: Family):
    family.says(written(family.form, CALLS))
    [choice] = family.asks(parallel_tool_calls=False).choices
    assert functions(choice.message) == FUNCTIONS[:1]
    chunks = family.asks(parallel_tool_calls=False, stream=True)
    assert {delta.index for chunk in chunks for delta in chunk.choices[0].delta.tool_calls or []} == {0}


def test_what_is_no_call_is_content(family: Family):
    for text in ("[look at", "<tool_call>oh no", "<function=", "[TOOL_CALLS] oh", '{"name": 5}', "plain [words]"):
        family.says(text)
        assert family.asks().choices[0].message.content == text
        assert "".join(chunk.choices[0].delta.content or "" for chunk in family.asks(stream=True)) == text


def test_without_a_choice_of_tools_text_stays_text(family: Family):
    text = written(family.form, CALLS)
    family.says(text)
    assert family.asks(tool_choice="none").choices[0].message.content == text
    assert family.asks(tools=openai.omit).choices[0].message.content == text


FORCED = {"hermes": "<tool_call>\n{}\n</tool_call>", "llama3_json": "{}"}


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "look"}}])
def test_a_forced_call_is_streamed_as_well(family: Family, choice: Any):
    name = "parameters" if family.form == "llama3_json" else "arguments"
    call = f'{{"name": "look", "{name}": {json.dumps(CALLS[0].arguments)}}}'
    family.says(FORCED.get(family.form, "[{}]").replace("{}", call))
    [whole] = family.asks(tool_choice=choice).choices
    assert functions(whole.message) == FUNCTIONS[:1]
    assert family.stack.engine.requests[-1].sampling["constraint"]["kind"] == "grammar"
    chunks = family.asks(tool_choice=choice, stream=True)
    first, *later = [delta for chunk in chunks for delta in chunk.choices[0].delta.tool_calls or []]
    assert (first.function.name, first.function.arguments) == ("look", "")
    assert len(later) > 4
    assert "".join(delta.function.arguments for delta in later) == FUNCTIONS[0][1]


def test_with_a_json_format_an_answer_is_streamed_as_text_and_a_call_as_a_call(family: Family):
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}
    family.says('{"colour": "red", "of": "the cat"}')
    texts = [chunk.choices[0].delta.content for chunk in family.asks(response_format=schema, stream=True)]
    assert len([text for text in texts if text]) > 3
    assert "".join(text or "" for text in texts) == '{"colour": "red", "of": "the cat"}'
    name = "parameters" if family.form == "llama3_json" else "arguments"
    family.says(FORCED.get(family.form, "[{}]").replace("{}", f'{{"name": "now", "{name}": {{}}}}'))
    assert functions(family.asks(response_format=schema).choices[0].message) == [("now", "{}")]
