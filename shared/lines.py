"""Lines of a stream, by bytes: NDJSON events and server-sent ones.

Not by an HTTP client's own `iter_lines`: that decodes text and knows ten kinds of line end, some of which, such as
U+2028, are ordinary characters inside JSON; and it is several times slower.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Final

MAX_LINE_BYTES: Final = 64 << 20  # the longest event has the text of a prompt to be echoed


class LineTooLong(ValueError):
    """The sender does not end its line: no more of it is kept."""


class LineSplitter:
    """Cuts chunks at line feeds; empty lines are left out, and so is the carriage return that some servers send."""

    def __init__(self, max_line_bytes: int = MAX_LINE_BYTES) -> None:
        self._max_line_bytes = max_line_bytes
        self._rest = bytearray()

    def feed(self, chunk: bytes) -> list[bytes]:
        """The lines that `chunk` completes. Raises LineTooLong, after which the stream is of no use."""
        end = chunk.rfind(b"\n")
        if end < 0:  # only appended, never looked through again: a line may come byte by byte
            self._rest += chunk
            lines = []
        else:
            lines = (bytes(self._rest) + chunk[:end]).split(b"\n")
            self._rest = bytearray(chunk[end + 1 :])
        if len(self._rest) > self._max_line_bytes:
            raise LineTooLong(f"a line has more than {self._max_line_bytes} bytes")
        return [line for line in (line.removesuffix(b"\r") for line in lines) if line]


def lines_of(chunks: Iterator[bytes]) -> Iterator[bytes]:
    splitter = LineSplitter()
    for chunk in chunks:
        yield from splitter.feed(chunk)


async def async_lines_of(chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    splitter = LineSplitter()
    async for chunk in chunks:
        for line in splitter.feed(chunk):
            yield line
