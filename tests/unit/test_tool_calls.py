"""Calls of tools in a model's text: however it is cut into pieces, the same calls and the same text come out."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gateway.output_schema import ToolFunction
from services.gateway.tool_calls import ToolCall, ToolCallParser, ToolReader, calls_grammar
from shared.wire.engine import Tokens, ToolFormat

FORMATS: tuple[ToolFormat, ...] = ("hermes", "llama3_json", "mistral")
LOOK = '{"name": "look", "arguments": {"at": "the cat"}}'
LLAMA_LOOK = '{"name": "look", "parameters": {"at": "the cat"}}'
CALLED = ToolCall("look", '{"at": "the cat"}')
NOW = ToolCall("now", "{}")


def read(form: ToolFormat, pieces: list[str], *, forced: bool = False) -> tuple[str, list[ToolCall]]:
    parser = ToolCallParser(form, forced=forced)
    found = [item for piece in pieces for item in parser.feed(piece)] + parser.finish()
    text = "".join(item for item in found if isinstance(item, str))
    return text, [item for item in found if isinstance(item, ToolCall)]


@pytest.mark.parametrize(
    ("form", "text", "content", "calls"),
    [
        ("hermes", f"<tool_call>\n{LOOK}\n</tool_call>", "", [CALLED]),
        ("hermes", f"I look.\n<tool_call>{LOOK}</tool_call>", "I look.\n", [CALLED]),
        ("hermes", f"\n\n<tool_call>{LOOK}</tool_call>\n", "", [CALLED]),
        ("hermes", f"<tool_call>{LOOK}</tool_call>\n<tool_call>{{'a}}", "\n<tool_call>{'a}", [CALLED]),
        ("hermes", f'<tool_call>{LOOK}</tool_call>\n<tool_call>{{"name": "now"}}</tool_call>', "", [CALLED, NOW]),
        ("hermes", f"<tool_call>{LOOK}", "", [CALLED]),
        ("hermes", f"<tool_call>{LOOK}</tool_call> Done.", " Done.", [CALLED]),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "</tool_call>}"}}</tool_call>', "", [
            ToolCall("f", '{"a": "</tool_call>}"}')
        ]),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "\\"}\\\\"}}</tool_call>', "", [
            ToolCall("f", '{"a": "\\"}\\\\"}')
        ]),
        ("mistral", f"[TOOL_CALLS][{LOOK}]", "", [CALLED]),
        ("mistral", f'[TOOL_CALLS] [{LOOK}, {{"name": "now", "arguments": {{}}}}]', "", [CALLED, NOW]),
        ("mistral", f"Well.[TOOL_CALLS]{LOOK}", "Well.", [CALLED]),
        ("llama3_json", LLAMA_LOOK, "", [CALLED]),
        ("llama3_json", f"<|python_tag|>{LLAMA_LOOK}", "", [CALLED]),
        ("llama3_json", f'{LLAMA_LOOK}; {{"name": "now", "parameters": {{}}}}', "", [CALLED, NOW]),
        ("llama3_json", f"So: {LLAMA_LOOK}", f"So: {LLAMA_LOOK}", []),
    ],
)  # fmt: skip
def test_calls_are_taken_out_of_the_text(form: ToolFormat, text: str, content: str, calls: list[ToolCall]):
    assert read(form, [text]) == (content, calls)
    assert read(form, list(text)) == (content, calls)


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize(
    "text",
    [
        "",
        "  \n",
        "plain text, a < b, {braces} and [TOOL",
        "<tool_call>",
        "<tool_call>look at the cat</tool_call>",
        '<tool_call>{"name": "look", "arguments": {"at": "th',
        '<tool_call>{"name": "look", "arguments": {"at": }}</tool_call>',
        '<tool_call>{"name": "look", "arguments": ["at"]}</tool_call>',
        '<tool_call>{"name": 5, "arguments": {}}</tool_call>',
        '<tool_call>{"arguments": {}}</tool_call>',
        '<tool_call>["look"]</tool_call>',
        "<tool_call>[]</tool_call>",
        '<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {"a": "\\ud83d"}}</tool_call>',
        "<tool_call>" + '{"a":' * 5000 + "1" + "}" * 5000,
        "[TOOL_CALLS]look",
        "[TOOL_CALLS][{]",
        '<|python_tag|>import os; print("x")',
        "{not json",
        " \n[not json",
        '{"name": "Bob", "age": 7}',
    ],
)
def test_what_is_no_call_stays_text_to_the_last_character(form: ToolFormat, text: str):
    assert read(form, [text]) == (text, [])
    assert read(form, list(text)) == (text, [])


def test_a_broken_call_does_not_hide_a_good_one():
    text = f"<tool_call>{{bad}}</tool_call><tool_call>{LOOK}</tool_call>"
    assert read("hermes", list(text)) == ("<tool_call>{bad}</tool_call>", [CALLED])
    text = f'<tool_call>{{"name": "x <tool_call>{LOOK}</tool_call>'
    assert read("hermes", list(text)) == ('<tool_call>{"name": "x ', [CALLED])


SIGNS = [
    "<tool_call>",
    "</tool_call>",
    "<tool_",
    "[TOOL_CALLS]",
    "<|python_tag|>",
    "{",
    "}",
    '"',
    "\\",
    "[",
    "]",
    ";",
    "<",
    "text",
    "{bad}",
    "🙂",
]
FRAGMENTS = st.sampled_from([*SIGNS, " ", "\n", LOOK, LLAMA_LOOK, f"[{LOOK}, {LOOK}]", '{"name": "now"}'])


@given(st.sampled_from(FORMATS), st.lists(FRAGMENTS, max_size=12).map("".join), st.data(), st.booleans())
def test_any_cut_of_the_text_gives_the_same(form: ToolFormat, text: str, data: Any, forced: bool):
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    whole = read(form, [text], forced=forced)
    assert read(form, pieces, forced=forced) == whole
    assert read(form, list(text), forced=forced) == whole
    content, calls = whole
    for call in calls:
        assert isinstance(json.loads(call.arguments), dict)
    if not calls:
        assert content == text


def test_text_that_cannot_become_a_call_is_not_held_back():
    parser = ToolCallParser("hermes")
    assert parser.feed("Hello <") == ["Hello "]
    assert parser.feed("b>") == ["<b>"]
    assert parser.feed(" and <tool") == [" and "]
    assert parser.finish() == ["<tool"]


@pytest.mark.parametrize("text", ["<tool_call>{" * 300, '<tool_call>{"' * 300, "<tool_call>" * 3000, "{" * 20_000])
def test_what_never_closes_is_read_in_reasonable_time(text: str):
    started = time.monotonic()
    for form in FORMATS:
        assert read(form, [text[i : i + 7] for i in range(0, len(text), 7)]) == (text, [])
    assert time.monotonic() - started < 5


# --- events -----------------------------------------------------------------------------------------------------------


def event(text: str, *, finish_reason: Any = None, index: int = 0) -> Tokens:
    return Tokens(index=index, text=text, token_ids=[1], finish_reason=finish_reason)


def test_a_choice_that_called_ends_with_tool_calls_and_one_that_was_cut_with_length():
    reader = ToolReader("hermes", forced=False, parallel=True)
    reader.read(event("Hi <tool_call>"))
    reader.read(event("Hi <tool_call>", index=1))
    _, [call] = reader.read(event(LOOK))
    assert call.to_body() == {
        "id": call.id,
        "type": "function",
        "function": {"name": "look", "arguments": '{"at": "the cat"}'},
    }
    assert len(call.id) == 9
    assert call.id.isalnum()
    last, calls = reader.read(event("</tool_call>", finish_reason="stop"))
    assert (last.text, last.finish_reason, calls) == ("", "tool_calls", [])
    cut, calls = reader.read(event('{"name', finish_reason="length", index=1))
    assert (cut.text, cut.finish_reason, calls) == ('<tool_call>{"name', "length", [])


def test_without_parallel_calls_only_the_first_counts():
    reader = ToolReader("mistral", forced=False, parallel=False)
    read, calls = reader.read(event(f"[TOOL_CALLS][{LOOK}, {LOOK}]", finish_reason="stop"))
    assert len(calls) == 1
    assert read.finish_reason == "tool_calls"


# --- the grammar ------------------------------------------------------------------------------------------------------


def function(name: str, parameters: dict[str, Any] | None = None, **fields: Any) -> ToolFunction:
    return ToolFunction.model_validate({"name": name, "parameters": parameters, **fields})


def test_the_grammar_spells_calls_as_the_family_writes_them():
    look = function("look", {"type": "object", "properties": {"at": {"type": "string"}}}, strict=True)
    lines = calls_grammar([look, function("now")], "hermes", parallel=False).split("\n")
    assert lines[:4] == [
        "start: calls",
        'calls: "<tool_call>\\n" call "\\n</tool_call>"',
        "call: call_0 | call_1",
        'call_0: "{\\"name\\": \\"look\\", \\"arguments\\": " arguments_0 "}"',
    ]
    schema = json.loads(lines[4].removeprefix("arguments_0: %json "))
    assert schema["properties"] == {"at": {"type": "string"}}
    assert schema["x-guidance"]["lenient"] is False
    assert '"additionalProperties": false' in lines[6]


@pytest.mark.parametrize("form", FORMATS)
def test_several_calls_are_allowed_if_they_may_be_parallel(form: ToolFormat):
    grammar = calls_grammar([function("now")], form, parallel=True, or_answer={"type": "object"})
    assert "call){0,15}" in grammar
    assert grammar.startswith("start: calls | answer\n")
    assert 'answer: %json {"type": "object", "x-guidance"' in grammar


@pytest.mark.parametrize(
    "text", ["<tool_call>{" * 20_000, "<tool_call>{" * 5_000 + "}" * 5_000, "<tool_call>{}" * 20_000]
)
def test_a_model_that_repeats_an_opening_takes_no_time_and_loses_no_text(text: str):
    parser = ToolCallParser("hermes")
    begun = time.perf_counter()
    pieces = [*parser.feed(text), *parser.finish()]
    assert time.perf_counter() - begun < 2
    assert "".join(str(piece) for piece in pieces) == text
