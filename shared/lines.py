"""Lines of a stream, by bytes: NDJSON events and server-sent ones.

Not by an HTTP client's own `iter_lines`: that decodes text and knows ten kinds of line end, some of which, such as
U+2028, are ordinary characters inside JSON; and it is several times slower.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator


class LineSplitter:
    """Cuts chunks at line feeds; empty lines are left out, and so is the carriage return that some servers send."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, chunk: bytes) -> list[bytes]:
        """The lines that `chunk` completes."""
        *lines, self._rest = (self._rest + chunk).split(b"\n")
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
