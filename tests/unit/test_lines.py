"""Lines of a stream, however it is cut into chunks and whatever characters are in it."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from shared.lines import LineSplitter, lines_of

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
