"""Lines of a stream, however it is cut into chunks and whatever characters are in it."""

from __future__ import annotations

import itertools
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.lines import MAX_LINE_BYTES, LineSplitter, LineTooLong, lines_of

LINES = st.lists(st.text(st.characters(exclude_characters="\r\n", exclude_categories=["Cs"]), min_size=1))


@given(lines=LINES, cuts=st.lists(st.integers(0, 500)), end=st.sampled_from([b"\n", b"\r\n", b"\n\n"]))
def test_chunks_change_nothing_and_only_line_feeds_end_lines(lines: list[str], cuts: list[int], end: bytes):
    stream = b"".join(line.encode() + end for line in lines)
    edges = sorted({0, len(stream), *(cut for cut in cuts if cut < len(stream))})
    chunks = [stream[start:stop] for start, stop in itertools.pairwise(edges)]
    assert [line.decode() for line in lines_of(iter(chunks))] == lines


def test_a_line_without_an_end_is_not_given_out():
    splitter = LineSplitter()
    assert splitter.feed(b"one\ntw") == [b"one"]
    assert splitter.feed(b"o\n") == [b"two"]


def test_a_long_line_may_come_in_small_pieces():
    """Looking through it again with every piece took 23 s for 8 MB."""
    splitter = LineSplitter()
    began_at = time.thread_time()
    assert not any(splitter.feed(bytes(1000)) for _ in range(8000))
    assert splitter.feed(b"\n") == [bytes(8_000_000)]
    assert time.thread_time() - began_at < 5


def test_no_more_is_kept_of_a_line_that_does_not_end():
    splitter = LineSplitter(max_line_bytes=10)
    assert splitter.feed(b"0123456789\n0123456789") == [b"0123456789"]
    with pytest.raises(LineTooLong, match="more than 10 bytes"):
        splitter.feed(b"x")


def test_a_line_may_be_as_long_as_the_limit_and_no_longer():
    splitter = LineSplitter()
    piece = bytes(1 << 20)
    for _ in range(MAX_LINE_BYTES // len(piece)):
        assert splitter.feed(piece) == []
    [line] = splitter.feed(b"\nrest")
    assert len(line) == MAX_LINE_BYTES
    for _ in range(MAX_LINE_BYTES // len(piece) - 1):
        splitter.feed(piece)
    splitter.feed(piece[len(b"rest") :])
    with pytest.raises(LineTooLong, match=f"more than {MAX_LINE_BYTES} bytes"):
        splitter.feed(b"x")
