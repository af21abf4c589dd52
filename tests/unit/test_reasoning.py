"""Reasoning kept apart from an answer: the same however the text is cut, and never a piece of a mark."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gateway.reasoning import ReasoningParser, ReasoningReader
from shared.reasoning import REASONING_MARKS, ReasoningFormat
from shared.wire.engine import Tokens

FORMATS: list[ReasoningFormat] = list(REASONING_MARKS)
# What texts around marks are made of: the marks, their beginnings, and what must not be taken for them.
PIECES = st.sampled_from(
    ["<think>", "</think>", "[THINK]", "[/THINK]", "<", "</th", "[", "[/THI", "\n", " ", "a", "é", "<tool_call>", ">"]
)
TEXTS = st.lists(PIECES, max_size=12).map("".join)


def parsed(pieces: list[str], form: ReasoningFormat, *, is_open: bool = False) -> tuple[str, str]:
    parser = ReasoningParser(form, is_open=is_open)
    said = [*map(parser.feed, pieces), parser.finish()]
    return "".join(reasoning for reasoning, _ in said), "".join(content for _, content in said)


@pytest.mark.parametrize(
    ("text", "is_open", "reasoning", "content"),
    [
        ("<think>\nLet me see.\n</think>\n\nIt is 4.", False, "Let me see.", "It is 4."),
        ("Let me see.\n</think>\n\nIt is 4.", True, "Let me see.", "It is 4."),
        ("<think>\nLet me see.\n</think>\n\nIt is 4.", True, "Let me see.", "It is 4."),
        ("It is 4.", False, "", "It is 4."),
        ("  It is 4.", False, "", "  It is 4."),
        ("\n<think>a</think>b", False, "a", "b"),
        ("<think>\n\n</think>\n\nIt is 4.", False, "", "It is 4."),
        ("<think>cut in the mid", False, "cut in the mid", ""),
        ("<think>cut in the mark</thi", False, "cut in the mark</thi", ""),
        ("<think>a < b </ c</think>d", False, "a < b </ c", "d"),
        ("<think>a</think>b<think>c</think>", False, "a", "b<think>c</think>"),
        ("what does <think> mean", False, "", "what does <think> mean"),
        ("<thi", False, "", "<thi"),
        ("<think>a\n\nb</think>\n    code()", False, "a\n\nb", "    code()"),
        ("", False, "", ""),
        ("", True, "", ""),
    ],
)
def test_what_stands_between_the_marks_is_reasoning(text: str, is_open: bool, reasoning: str, content: str):
    assert parsed([text], "think", is_open=is_open) == (reasoning, content)
    assert parsed(list(text), "think", is_open=is_open) == (reasoning, content)


def test_the_marks_of_one_format_are_text_to_another():
    assert parsed(["[THINK]a[/THINK]b"], "mistral") == ("a", "b")
    assert parsed(["[THINK]a[/THINK]b"], "think") == ("", "[THINK]a[/THINK]b")


@given(text=TEXTS, cuts=st.sets(st.integers(1, 60)), form=st.sampled_from(FORMATS), is_open=st.booleans())
def test_however_the_text_is_cut_the_result_is_the_same(
    text: str, cuts: set[int], form: ReasoningFormat, is_open: bool
):
    places = [0, *sorted(cut for cut in cuts if cut < len(text)), len(text)]
    pieces = [text[start:end] for start, end in itertools.pairwise(places)]
    assert parsed(pieces, form, is_open=is_open) == parsed([text], form, is_open=is_open)


@given(text=TEXTS, form=st.sampled_from(FORMATS), is_open=st.booleans())
def test_nothing_is_lost_but_marks_and_line_feeds_next_to_them(text: str, form: ReasoningFormat, is_open: bool):
    marks = REASONING_MARKS[form]
    reasoning, content = parsed(list(text), form, is_open=is_open)
    kept = reasoning + content
    assert marks.closing not in reasoning
    without_marks = text.replace(marks.opening, "", 1).replace(marks.closing, "", 1)
    assert len(kept) >= len("".join(without_marks.split()))
    assert "".join(kept.split()) in {"".join(each.split()) for each in _without_marks(text, form)}


def _without_marks(text: str, form: ReasoningFormat) -> list[str]:
    """The text, and the text without its first marks, in all combinations."""
    marks = REASONING_MARKS[form]
    texts = [text]
    for mark in (marks.opening, marks.closing):
        texts += [each.replace(mark, "", 1) for each in texts]
    return texts


def tokens(*texts: str, index: int = 0, finish: bool = True, **fields: Any) -> list[Tokens]:
    last = len(texts) - 1
    return [
        Tokens(index=index, text=text, token_ids=[i], finish_reason="stop" if finish and i == last else None, **fields)
        for i, text in enumerate(texts)
    ]


def test_tokens_of_reasoning_are_counted_with_their_marks():
    reader = ReasoningReader("think", is_open=False)
    said = [reader.read(event) for event in tokens("<thi", "nk>", "so", "</think>", "\n\n", "4", "")]
    assert reader.num_tokens == 4
    assert "".join(reasoning for _, reasoning in said) == "so"
    assert "".join(event.text for event, _ in said) == "4"
    assert said[-1][0].finish_reason == "stop"


def test_an_answer_without_reasoning_counts_none():
    reader = ReasoningReader("think", is_open=False)
    assert "".join(reader.read(event)[0].text for event in tokens("<", "b", ">")) == "<b>"
    assert reader.num_tokens == 0


def test_choices_are_read_apart():
    reader = ReasoningReader("think", is_open=True)
    first, second = tokens("a", "</think>b"), tokens("c", "</think>d", index=1)
    said = [reader.read(event) for pair in zip(first, second, strict=True) for event in pair]
    assert [(event.text, reasoning) for event, reasoning in said] == [("", "a"), ("", "c"), ("b", ""), ("d", "")]
    assert reader.num_tokens == 4
