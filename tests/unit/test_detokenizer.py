"""Streaming text: whole characters, stop strings, and the same text however the tokens are cut."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.text_engine.detokenizer import Detokenizer


class ByteTokenizer:
    """Token i is the i-th of the given byte strings."""

    def __init__(self, *tokens: bytes, strips_leading_space: bool = False) -> None:
        self.tokens = tokens
        self.strips_leading_space = strips_leading_space

    def token_bytes(self, token_id: int) -> bytes:
        return self.tokens[token_id]


def stream(tokens: list[bytes], **options: object) -> tuple[list[str], Detokenizer]:
    detokenizer = Detokenizer(ByteTokenizer(*tokens), **options)  # type: ignore[arg-type]
    released = []
    for token_id in range(len(tokens)):
        released.append(detokenizer.append(token_id))
        if detokenizer.matched_stop is not None:
            return released, detokenizer
    released.append(detokenizer.finish())
    return released, detokenizer


def split(text: str, sizes: list[int]) -> list[bytes]:
    raw, tokens = text.encode(), []
    for size in sizes:
        tokens.append(raw[:size])
        raw = raw[size:]
    return [*tokens, raw]


def test_characters_split_over_tokens_come_out_whole():
    """Case B16: emoji with ZWJ, Korean, Czech and Hebrew, one byte a token."""
    text = "👩‍👩‍👧 안녕하세요 příliš שלום"
    released, _ = stream([bytes([byte]) for byte in text.encode()])
    assert "".join(released) == text
    assert all("\ufffd" not in piece for piece in released)


def test_an_answer_cut_inside_a_character_drops_the_unfinished_rest():
    released, _ = stream([b"ab", "é".encode()[:1]])
    assert "".join(released) == "ab"


def test_invalid_bytes_never_stall_the_stream():
    released, _ = stream([b"a", b"\xff", b"b", b"\xf0\x9f", b"c"])
    assert released[2].endswith("b")
    assert "".join(released) == "a\ufffdb\ufffdc"


def test_a_stop_string_that_spans_tokens_never_leaks_its_beginning():
    """Case B12."""
    released, detokenizer = stream([b"ABC", b"D", b"EF", b"G", b"HI", b"J"], stop=("DEFGHIJ",))
    assert "".join(released) == "ABC"
    assert detokenizer.matched_stop == "DEFGHIJ"


def test_held_text_is_released_in_order_when_the_model_diverges():
    """Case B12."""
    released, detokenizer = stream([b"D", b"EF", b"G", b"HX", b"Y"], stop=("DEFGHIJ",))
    assert "".join(released) == "DEFGHXY"
    assert detokenizer.matched_stop is None


@pytest.mark.parametrize(
    ("stop", "expected"),
    [(("O P Q",), "N "), (("AB", "ABC"), "N O P Q "), (("P Q AB", "Q"), "N O P "), (("zzz",), "N O P Q ABCD")],
)
def test_the_match_that_ends_first_wins(stop: tuple[str, ...], expected: str):
    """Case B14: also where one stop string is a prefix of another and where one ends inside a token."""
    for tokens in ([b"N O P Q ABCD"], [b"N ", b"O P", b" Q ", b"ABCD"], [bytes([b]) for b in b"N O P Q ABCD"]):
        released, _ = stream(tokens, stop=stop)
        assert "".join(released) == expected


def test_the_stop_string_is_kept_when_asked_for():
    released, _ = stream([b"one END two"], stop=("END",), include_stop=True)
    assert "".join(released) == "one END"


def test_below_min_tokens_stop_strings_are_ordinary_text():
    detokenizer = Detokenizer(ByteTokenizer(b"END", b"x", b"END"), stop=("END",))  # type: ignore[arg-type]
    assert detokenizer.append(0, search_stop=False) == "END"
    assert detokenizer.append(1) + detokenizer.append(2) == "x"
    assert detokenizer.matched_stop == "END"


def test_the_space_that_marks_a_first_word_is_dropped_once():
    tokenizer = ByteTokenizer(b" Hello", b" there", strips_leading_space=True)
    detokenizer = Detokenizer(tokenizer)  # type: ignore[arg-type]
    assert detokenizer.append(0) + detokenizer.append(1) == "Hello there"


@settings(deadline=None, max_examples=200)
@given(
    text=st.text(alphabet="ABCab é🙂", max_size=24),
    sizes=st.lists(st.integers(1, 5), max_size=20),
    stop=st.lists(st.text(alphabet="ABCab é", min_size=1, max_size=3), max_size=3),
)
def test_text_and_stop_do_not_depend_on_where_tokens_are_cut(text: str, sizes: list[int], stop: list[str]):
    whole, whole_state = stream([bytes([byte]) for byte in text.encode()], stop=tuple(stop))
    cut, cut_state = stream(split(text, sizes), stop=tuple(stop))
    assert "".join(cut) == "".join(whole)
    assert cut_state.matched_stop == whole_state.matched_stop
