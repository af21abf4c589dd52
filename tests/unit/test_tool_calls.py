"""Calls of tools in a model's text: however it is cut into pieces, the same calls and the same text come out."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gateway.output_schema import ToolFunction
from services.gateway.tool_calls.grammar import calls_grammar
from services.gateway.tool_calls.parser import ToolCallParser
from services.gateway.tool_calls.pieces import Arguments, CallEnd, CallStart, Piece
from shared.wire.engine import ToolFormat
from tests.tool_call_texts import Call, written

FORMATS: tuple[ToolFormat, ...] = get_args(ToolFormat)
LOOK = '{"name": "look", "arguments": {"at": "the cat"}}'
LLAMA_LOOK = '{"name": "look", "parameters": {"at": "the cat"}}'
CALLED = ("look", '{"at": "the cat"}')
NOW = ("now", "{}")


def function(name: str, parameters: dict[str, Any] | None = None, **fields: Any) -> ToolFunction:
    return ToolFunction.model_validate({"name": name, "parameters": parameters, **fields})


STRING = {"type": "string"}
FUNCTIONS = (
    function("look", {"type": "object", "properties": {"at": STRING, "how": STRING, "times": {"type": "integer"}}}),
    function("now"),
)


def read_in_order(
    form: ToolFormat, pieces: Sequence[str], functions: Sequence[ToolFunction] = FUNCTIONS, **options: bool
) -> list[str | list[Any]]:
    """Text, and calls as [name, arguments, whether they are whole], in order."""
    parser = ToolCallParser(form, functions, **options)
    found: list[str | list[Any]] = []
    for piece in [item for text in pieces for item in parser.feed(text)] + parser.finish():
        _add(piece, found)
    return found


def _add(piece: Piece, found: list[str | list[Any]]) -> None:
    last = found[-1] if found else None
    match piece:
        case str():
            if isinstance(last, str):
                found.pop()
                piece = last + piece
            found.append(piece)
        case CallStart(name=name):
            assert not isinstance(last, list) or last[2] is not None, "one call at a time"
            found.append([name, "", None])
        case Arguments(text=text):
            assert isinstance(last, list)
            assert last[2] is None
            last[1] += text
        case CallEnd(is_whole=is_whole):
            assert isinstance(last, list)
            last[2] = is_whole


def read(
    form: ToolFormat, pieces: Sequence[str], functions: Sequence[ToolFunction] = FUNCTIONS, **options: bool
) -> tuple[str, list[tuple[str, str]]]:
    """All of the text, and all calls, which must be whole."""
    found = read_in_order(form, pieces, functions, **options)
    assert all(item[2] for item in found if isinstance(item, list))
    text = "".join(item for item in found if isinstance(item, str))
    return text, [(item[0], item[1]) for item in found if isinstance(item, list)]


def cut(text: str, places: list[int]) -> list[str]:
    places = sorted(min(place, len(text)) for place in places)
    return [text[start:end] for start, end in zip([0, *places], [*places, len(text)], strict=True)]


# --- what a call looks like -------------------------------------------------------------------------------------------

QWEN_LOOK = "<function=look>\n<parameter=at>\nthe cat\n</parameter>\n</function>"
GLM_LOOK = "<tool_call>look\n<arg_key>at</arg_key>\n<arg_value>the cat</arg_value>\n</tool_call>"
DEEPSEEK_LOOK = '<｜tool▁call▁begin｜>look<｜tool▁sep｜>{"at": "the cat"}<｜tool▁call▁end｜>'
KIMI_LOOK = '<|tool_call_begin|>functions.look:0<|tool_call_argument_begin|>{"at": "the cat"}<|tool_call_end|>'


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
        ("hermes", f"<tool_call>{LOOK} Done.", " Done.", [CALLED]),
        ("hermes", '<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>', "", [("f", '{"a": 1}')]),
        ("hermes", '<tool_call>{"id": 7, "name": "f", "arguments": {}, "x": [{"y": "}"}]}', "", [("f", "{}")]),
        ("hermes", '<tool_call>{"name": "f", "parameters": {"a": 1}}</tool_call>', "", [("f", '{"a": 1}')]),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "</tool_call>}"}}</tool_call>', "", [
            ("f", '{"a": "</tool_call>}"}')
        ]),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "\\"}\\\\"}}</tool_call>', "", [
            ("f", '{"a": "\\"}\\\\"}')
        ]),
        ("mistral", f"[TOOL_CALLS][{LOOK}]", "", [CALLED]),
        ("mistral", f'[TOOL_CALLS] [{LOOK}, {{"name": "now", "arguments": {{}}}}]', "", [CALLED, NOW]),
        ("mistral", f"Well.[TOOL_CALLS]{LOOK}", "Well.", [CALLED]),
        ("mistral", '[TOOL_CALLS]look[ARGS]{"at": "the cat"}[TOOL_CALLS]now[ARGS]{}', "", [CALLED, NOW]),
        ("mistral", '[TOOL_CALLS]look[CALL_ID]a1b2c3d4e[ARGS]{"at": "the cat"}', "", [CALLED]),
        ("mistral", '[TOOL_CALLS]look{"at": "the cat"}', "", [CALLED]),
        ("llama3_json", LLAMA_LOOK, "", [CALLED]),
        ("llama3_json", f"<|python_tag|>{LLAMA_LOOK}", "", [CALLED]),
        ("llama3_json", f'{LLAMA_LOOK}; {{"name": "now", "parameters": {{}}}}', "", [CALLED, NOW]),
        ("llama3_json", '{"type": "function", "name": "now", "parameters": {}}', "", [NOW]),
        ("llama3_json", f"So: {LLAMA_LOOK}", f"So: {LLAMA_LOOK}", []),
        ("llama3_json", '{"name": "elsewhere", "parameters": {}}', '{"name": "elsewhere", "parameters": {}}', []),
        ("qwen3_coder", f"<tool_call>\n{QWEN_LOOK}\n</tool_call>", "", [CALLED]),
        ("qwen3_coder", f"Hm.\n{QWEN_LOOK}\n</tool_call>", "Hm.\n", [CALLED]),
        ("qwen3_coder", "<function=now>\n</function>", "", [NOW]),
        ("qwen3_coder", "<function=look>\n<parameter=at>\nthe cat\n<parameter=how>\nhard\n</function>", "", [
            ("look", '{"at": "the cat", "how": "hard"}')
        ]),
        ("glm45", GLM_LOOK, "", [CALLED]),
        ("glm45", GLM_LOOK.replace("\n", ""), "", [CALLED]),
        ("glm45", "Hm.<tool_call>now\n</tool_call> So.", "Hm. So.", [NOW]),
        ("pythonic", '[look(at="the cat"), now()]', "", [CALLED, NOW]),
        ("pythonic", "<|python_start|>[look(at='the cat')]<|python_end|>", "", [CALLED]),
        ("pythonic", "So: [now()]", "So: [now()]", []),
        ("pythonic", "[elsewhere()]", "[elsewhere()]", []),
        ("pythonic", '[look("the cat")]', '[look("the cat")]', []),
        ("deepseek_v31", f"<｜tool▁calls▁begin｜>{DEEPSEEK_LOOK}<｜tool▁calls▁end｜>", "", [CALLED]),
        ("deepseek_v31", f"Hm.{DEEPSEEK_LOOK}{DEEPSEEK_LOOK}", "Hm.", [CALLED, CALLED]),
        ("kimi_k2", f"<|tool_calls_section_begin|>{KIMI_LOOK}<|tool_calls_section_end|>", "", [CALLED]),
        ("kimi_k2", "<|tool_call_begin|>now <|tool_call_argument_begin|> {}", "", [NOW]),
    ],
)  # fmt: skip
def test_calls_are_taken_out_of_the_text(form: ToolFormat, text: str, content: str, calls: list[tuple[str, str]]):
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
        '<tool_call>{"name": "look", "arguments": ',
        '<tool_call>{"name": "look", "arguments": {bad}}</tool_call>',
        '<tool_call>{"name": "look", "arguments": ["at"]}</tool_call>',
        '<tool_call>{"name": 5, "arguments": {}}</tool_call>',
        '<tool_call>{"name": "\\ud83d", "arguments": {}}</tool_call>',
        '<tool_call>{"arguments": {}}</tool_call>',
        '<tool_call>["look"]</tool_call>',
        "<tool_call>[]</tool_call>",
        "<tool_call>" + '{"a":' * 5000 + "1" + "}" * 5000,
        "<tool_call><function=",
        "<function=look",
        "<tool_call><arg_key>at</arg_key>",
        "[TOOL_CALLS]look",
        "[TOOL_CALLS][{]",
        '<|python_tag|>import os; print("x")',
        "<|python_start|>print('x')",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>look",
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.look:0",
        "{not json",
        " \n[not json",
        '{"name": "Bob", "age": 7}',
        "[look(x)]",
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
    text = f"[TOOL_CALLS][{LOOK}, {{bad}}][TOOL_CALLS]now{{}}"
    assert read_in_order("mistral", list(text)) == [[*CALLED, True], ", {bad}]", [*NOW, True]]


@pytest.mark.parametrize(
    ("form", "text", "expected"),
    [
        ("hermes", '<tool_call>{"name": "look", "arguments": {"at": "th', [["look", '{"at": "th', False]]),
        ("mistral", '[TOOL_CALLS]look[ARGS]{"at": "th', [["look", '{"at": "th', False]]),
        ("qwen3_coder", "<function=look>\n<parameter=at>\nth", [["look", '{"at": "th', False]]),
        ("qwen3_coder", "<function=look>\n<parameter=times>\n1", [["look", '{"times": 1', False]]),
        ("qwen3_coder", "<function=look>\n<oh>", [["look", "", False], "\n<oh>"]),
        ("glm45", "<tool_call>look<arg_key>at</arg_key><arg_value>th", [["look", '{"at": "th', False]]),
        ("pythonic", '[look(at="th', [["look", '{"at": "th', False]]),
        ("pythonic", "[look(at=1, how=oh)]", [["look", '{"at": 1', False], ", how=oh)]"]),
        ("deepseek_v31", DEEPSEEK_LOOK.partition(" cat")[0], [["look", '{"at": "the', False]]),
        ("kimi_k2", KIMI_LOOK.partition(" cat")[0], [["look", '{"at": "the', False]]),
    ],
)
def test_a_call_that_is_cut_or_breaks_has_its_arguments_as_far_as_they_go(
    form: ToolFormat, text: str, expected: list[Any]
):
    assert read_in_order(form, [text]) == expected
    assert read_in_order(form, list(text)) == expected


def test_a_line_feed_that_a_model_writes_into_a_json_string_is_escaped():
    text = '<tool_call>{"name": "f", "arguments": {\n"a": "one\n\ttwo\\n"}}</tool_call>'
    [(_, arguments)] = read("hermes", list(text))[1]
    assert json.loads(arguments) == {"a": "one\n\ttwo\n"}
    assert read("hermes", [text])[1] == [("f", arguments)]


def test_kimis_own_ids_are_kept():
    parser = ToolCallParser("kimi_k2", FUNCTIONS)
    starts = [piece for piece in parser.feed(KIMI_LOOK) if isinstance(piece, CallStart)]
    assert starts == [CallStart("look", id="functions.look:0")]


# --- pieces -----------------------------------------------------------------------------------------------------------

SIGNS = [
    *("<tool_call>", "</tool_call>", "<tool_", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", "<|python_start|>", "["),
    *("<function=look>", "<parameter=at>", "</parameter>", "</function>", "<arg_key>", "</arg_key>", "<arg_value>"),
    *(
        "</arg_value>",
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁call▁begin｜>",
        "<｜tool▁sep｜>",
        "<｜tool▁call▁end｜>",
        "```json",
    ),
    *("<|tool_calls_section_begin|>", "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"),
    *("{", "}", '"', "'", "\\", "]", ";", "<", "(", ")", "=", ",", ":", "null", "5", "at", "look", "functions.look:0"),
    *("{bad}", "🙂", " ", "\n", "text", LOOK, LLAMA_LOOK, f"[{LOOK}, {LOOK}]", '{"name": "now"}', QWEN_LOOK, GLM_LOOK),
    *(DEEPSEEK_LOOK, KIMI_LOOK, "[now(), look(at='it')]", "[look(at=", "\\u00", "\\x4", "'''"),
]


@given(st.sampled_from(FORMATS), st.lists(st.sampled_from(SIGNS), max_size=14).map("".join), st.data(), st.booleans())
def test_any_cut_of_any_text_gives_the_same(form: ToolFormat, text: str, data: Any, by_grammar: bool):
    whole = read_in_order(form, [text], by_grammar=by_grammar)
    pieces = cut(text, data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    assert read_in_order(form, pieces, by_grammar=by_grammar) == whole
    assert read_in_order(form, list(text), by_grammar=by_grammar) == whole
    if all(isinstance(item, str) for item in whole):
        assert "".join(map(str, whole)) == text


WORDS = st.text(st.characters(codec="utf-8", exclude_characters="<>"), max_size=12)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=3),
    max_leaves=6,
)
CALLS: st.SearchStrategy[list[Call]] = st.lists(
    st.one_of(
        st.builds(Call, st.just("now"), st.just({})),
        st.builds(
            Call,
            st.just("make"),
            st.fixed_dictionaries({}, optional={"text": WORDS, "maybe": st.none() | WORDS, "any": VALUES}),
        ),
    ),
    min_size=1,
    max_size=3,
)
MAKE = function(
    "make", {"properties": {"text": STRING, "maybe": {"anyOf": [STRING, {"type": "null"}]}, "any": {"title": "Any"}}}
)


@given(st.sampled_from(FORMATS), CALLS, WORDS, st.lists(st.integers(0, 400), max_size=12))
def test_what_a_model_calls_is_what_a_client_gets(form: ToolFormat, calls: list[Call], before: str, places: list[int]):
    before = before.strip("[{ \n") and f"So {before}: "
    opening = (
        "" if form in ("llama3_json", "pythonic") else before
    )  # only an answer's beginning is a call without a mark
    text = opening + written(form, calls)
    content, found = read(form, cut(text, places), (MAKE, function("now")))
    assert content == opening
    assert [name for name, _ in found] == [call.name for call in calls]
    for (_, arguments), call in zip(found, calls, strict=True):
        assert_means(json.loads(arguments), call.arguments, form)
    assert read(form, list(text), (MAKE, function("now"))) == (content, found)


def assert_means(found: dict[str, Any], meant: dict[str, Any], form: ToolFormat) -> None:
    if form not in ("qwen3_coder", "glm45"):
        assert found == meant
        return
    # Text without a type cannot say everything: "5" and 5 are written alike, and so are "null" and null.
    untyped = {name: value for name, value in meant.items() if name != "text"}
    assert {name: found.get(name) for name in meant if name == "text"} == {
        k: v for k, v in meant.items() if k == "text"
    }
    assert found.keys() == meant.keys()
    for name, value in untyped.items():
        if not isinstance(value, str):
            assert found[name] == value


@pytest.mark.parametrize("form", FORMATS)
def test_arguments_are_given_out_as_they_are_written(form: ToolFormat):
    [call] = calls = [Call("look", {"at": "one two three"})]
    text = written(form, calls)
    parser = ToolCallParser(form, FUNCTIONS)
    place = text.index("two")
    before = [piece for character in text[:place] for piece in parser.feed(character)]
    assert isinstance(before[0], CallStart)
    assert arguments_in(before) == '{"at": "one '
    assert parser.feed("two") == [Arguments("two")]
    assert read(form, [text])[1] == [(call.name, json.dumps(call.arguments))]


def arguments_in(pieces: Sequence[Piece]) -> str:
    return "".join(piece.text for piece in pieces if isinstance(piece, Arguments))


def test_text_that_cannot_become_a_call_is_not_held_back():
    parser = ToolCallParser("hermes")
    assert parser.feed("Hello <") == ["Hello "]
    assert parser.feed("b>") == ["<b>"]
    assert parser.feed(" and <tool") == [" and "]
    assert parser.finish() == ["<tool"]


@pytest.mark.parametrize("form", ["llama3_json", "mistral", "glm45"])
def test_an_answer_in_json_beside_calls_is_streamed(form: ToolFormat):
    parser = ToolCallParser(form, FUNCTIONS, by_grammar=True)
    assert parser.feed('{"colour": "') == ['{"colour": "']
    assert parser.feed('red"}') == ['red"}']


# --- the grammar ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMATS)
def test_what_the_grammar_spells_is_read_while_it_is_written(form: ToolFormat):
    look = "parameters" if form == "llama3_json" else "arguments"
    objects = [f'{{"name": "look", "{look}": {{"at": "the cat"}}}}', f'{{"name": "now", "{look}": {{}}}}']
    text = {
        "hermes": "<tool_call>\n{}\n</tool_call>\n<tool_call>\n{}\n</tool_call>",
        "llama3_json": "{}; {}",
    }.get(form, "[{}, {}]").format(*objects)  # fmt: skip
    assert read(form, list(text), by_grammar=True) == ("", [CALLED, NOW])
    parser = ToolCallParser(form, FUNCTIONS, by_grammar=True)
    assert arguments_in(parser.feed(text[: text.index(" cat")])) == '{"at": "the'


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


# --- work -------------------------------------------------------------------------------------------------------------


def num_steps(act: Callable[[], object]) -> int:
    """Lines and calls that run, in Python and out of it."""
    count = 0

    def traced(*_event: object) -> Any:
        nonlocal count
        count += 1
        return traced

    before = sys.gettrace()
    sys.settrace(traced)
    try:
        act()
    finally:
        sys.settrace(before)
    return count


LONG: dict[str, Callable[[int], dict[str, Any]]] = {
    "a long string": lambda size: {"at": "x\n" * (size // 2)},
    "a long list": lambda size: {"list": [1] * (size // 4)},
    "white space": lambda size: {"at": " " * size},
}


@pytest.mark.parametrize("kind", LONG)
@pytest.mark.parametrize("form", FORMATS)
def test_a_character_of_long_arguments_costs_what_one_of_short_ones_does(form: ToolFormat, kind: str):
    def most_held(size: int) -> int:
        parser = ToolCallParser(form, FUNCTIONS)
        most = 0
        for character in written(form, [Call("look", LONG[kind](size))]):
            parser.feed(character)
            most = max(most, parser.num_held)
        parser.finish()
        return most

    assert num_steps(lambda: most_held(4096)) < 2.2 * num_steps(lambda: most_held(2048))
    # What is scanned or copied with each further character is no longer than a name.
    assert most_held(1 << 16) < 300


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize(
    "text",
    ["<tool_call>{", '<tool_call>{"', "<tool_call>", "<tool_call>{}", "{", "\n", "[", "<function=", "[TOOL_CALLS]{"],
)
def test_a_model_that_repeats_an_opening_makes_no_work_and_loses_no_text(form: ToolFormat, text: str):
    def taken(times: int) -> int:
        return num_steps(lambda: read(form, [text * times])) + num_steps(lambda: read(form, list(text * times)))

    assert taken(600) < 2.2 * taken(300) + 20_000
    assert read(form, [text * 20_000]) == (text * 20_000, [])
