"""Calls of an answer's choices as clients get them: ids, numbers, deltas, and how the choice ends."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gateway.answers import Choice
from services.gateway.output_schema import ToolFunction
from services.gateway.tool_calls.reader import CallDelta, ToolReader
from shared.wire.engine import TokenLogprob, Tokens, ToolFormat
from tests.tool_call_texts import Call, written

LOOK = '{"name": "look", "arguments": {"at": "the cat"}}'
FUNCTIONS = (ToolFunction(name="look"), ToolFunction(name="now"))
CALLS = [Call("look", {"at": "the 🐈", "text": 'a "b"\n'}), Call("now", {})]


def reader(form: ToolFormat = "hermes", *, parallel: bool = True) -> ToolReader:
    return ToolReader(form, FUNCTIONS, by_grammar=False, parallel=parallel)


def event(text: str, *, finish_reason: Any = None, index: int = 0, **fields: Any) -> Tokens:
    return Tokens(index=index, text=text, token_ids=[1], finish_reason=finish_reason, **fields)


def test_a_choice_that_called_ends_with_tool_calls_and_one_that_was_cut_with_length():
    tools = reader()
    tools.read(event("Hi <tool_call>"))
    tools.read(event("Hi <tool_call>", index=1))
    [(_, deltas)] = tools.read(event(LOOK))
    begun, grown, ended = deltas
    assert (begun.number, begun.name, begun.arguments) == (0, "look", "")
    assert len(begun.id) == 9
    assert begun.id.isalnum()
    assert grown == CallDelta(0, arguments='{"at": "the cat"}')
    assert ended == CallDelta(0, is_last=True, is_whole=True)
    [(last, deltas)] = tools.read(event("</tool_call>", finish_reason="stop"))
    assert (last.text, last.finish_reason, deltas) == ("", "tool_calls", [])
    [(cut, deltas)] = tools.read(event('{"name', finish_reason="length", index=1))
    assert (cut.text, cut.finish_reason, deltas) == ('<tool_call>{"name', "length", [])


def test_a_call_that_is_cut_is_told_as_far_as_it_goes_and_ends_with_length():
    tools = reader()
    [(_, deltas)] = tools.read(event(f"<tool_call>{LOOK.partition(' cat')[0]}", finish_reason="length"))
    choice = Choice()
    choice.add(event("", finish_reason="length"), deltas)
    assert deltas[-1] == CallDelta(0, is_last=True, is_whole=False)
    [call] = choice.to_chat(0)["message"]["tool_calls"]
    assert call["function"] == {"name": "look", "arguments": '{"at": "the'}
    assert choice.to_chat(0)["finish_reason"] == "length"


def test_without_parallel_calls_only_the_first_counts():
    [(end, deltas)] = reader("mistral", parallel=False).read(
        event(f"[TOOL_CALLS][{LOOK}, {LOOK}]", finish_reason="stop")
    )
    assert [delta.name for delta in deltas if delta.name] == ["look"]
    assert {delta.number for delta in deltas} == {0}
    assert end.finish_reason == "tool_calls"


def test_text_after_a_call_comes_after_it_and_what_an_event_says_once_is_said_once():
    logprobs = [TokenLogprob(token_id=1, token="a", logprob=-0.5, bytes=[97], top=[])]
    text = f"One <tool_call>{LOOK}</tool_call> two"
    first, second = reader().read(event(text, finish_reason="stop", logprobs=logprobs, stop_reason="x"))
    assert (first[0].text, first[0].token_ids, first[0].logprobs, first[0].finish_reason) == (
        "One ",
        [1],
        logprobs,
        None,
    )
    assert first[1][-1].is_last
    assert (second[0].text, second[0].token_ids, second[0].logprobs, second[1]) == (" two", [], None, [])
    assert (second[0].finish_reason, second[0].stop_reason) == ("tool_calls", "x")


@pytest.mark.parametrize("form", get_args(ToolFormat))
def test_the_first_delta_of_a_call_names_it_and_the_others_only_add_to_it(form: ToolFormat):
    tools = reader(form)
    deltas = [delta for character in written(form, CALLS) for _, each in tools.read(event(character)) for delta in each]
    deltas += [delta for _, each in tools.read(event("", finish_reason="stop")) for delta in each]
    chunks = [chunk for delta in deltas if (chunk := delta.to_chunk())]
    assert [chunk["function"]["name"] for chunk in chunks if "id" in chunk] == ["look", "now"]
    for chunk in chunks:
        if "id" in chunk:
            assert (chunk["type"], chunk["function"]["arguments"]) == ("function", "")
        else:
            assert chunk.keys() == {"index", "function"}
            assert chunk["function"].keys() == {"arguments"}
            assert chunk["function"]["arguments"]


@given(st.sampled_from(get_args(ToolFormat)), st.lists(st.integers(0, 300), max_size=10))
def test_streamed_deltas_add_up_to_what_an_unstreamed_answer_has(form: ToolFormat, places: list[int]):
    text = ("" if form in ("llama3_json", "pythonic") else "I look.") + written(form, CALLS)
    whole, calls, content = Choice(), dict[int, tuple[str, str]](), ""
    tools = reader(form)
    for part, deltas in tools.read(event(text, finish_reason="stop")):
        whole.add(part, deltas)
    cuts = sorted({min(place, len(text)) for place in [0, *places, len(text)]})
    pieces = [text[start:end] for start, end in pairwise(cuts)]
    tools = reader(form)
    for number, piece in enumerate(pieces):
        end = "stop" if number == len(pieces) - 1 else None
        for part, deltas in tools.read(event(piece, finish_reason=end)):
            content += part.text
            for chunk in filter(None, (delta.to_chunk() for delta in deltas)):
                name, arguments = calls.get(chunk["index"], ("", ""))
                added = chunk["function"]
                calls[chunk["index"]] = (name or added["name"], arguments + added["arguments"])
    message = whole.to_chat(0)["message"]
    functions = [call["function"] for call in message["tool_calls"]]
    assert [(function["name"], function["arguments"]) for function in functions] == list(calls.values())
    assert (message["content"] or "") == content
