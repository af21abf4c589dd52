"""JSON inside a growing text: its objects as they were written, and the parts of those that describe a call."""

from __future__ import annotations

import json
import re
from typing import Final

from services.gateway.tool_calls.cursor import Cursor
from services.gateway.tool_calls.pieces import Arguments, NotACall, Reading

_SIGN: Final = re.compile(r'["\\{}\[\]\x00-\x1f]')
_MAX_STRING_CHARS: Final = 256
_STRING: Final = re.compile(rf'"(?:[^"\\]|\\.){{0,{_MAX_STRING_CHARS}}}"')
_MAX_SCALAR_CHARS: Final = 64
_SCALAR: Final = re.compile(rf"[-+.\w]{{0,{_MAX_SCALAR_CHARS}}}")


class JsonScan:
    """Finds where a JSON object, list or string ends, reading each character once.

    Control characters in strings, which JSON forbids and models write, are replaced by their escapes.
    """

    def __init__(self) -> None:
        self._depth = 0
        self._is_in_string = False
        self._is_escaped = False
        self.is_over = False

    def read(self, text: str, start: int) -> tuple[str, int]:
        """What `text` adds to the value from `start` on, and where that ends."""
        written: list[str] = []
        position = start
        if self._is_escaped and start < len(text):
            position, self._is_escaped = start + 1, False
        while not self.is_over and (found := _SIGN.search(text, position)):
            sign, position = found.group(), found.end()
            if self._is_in_string and sign < " ":
                written += text[start : found.start()], json.dumps(sign)[1:-1]
                start = position
            elif self._is_in_string and sign == "\\":
                # Whatever is escaped, it is no sign.
                self._is_escaped = position == len(text)
                position += 1
            else:
                self._count(sign)
        end = position if self.is_over else len(text)
        written.append(text[start:end])
        return "".join(written), end

    def _count(self, sign: str) -> None:
        if sign == '"':
            self._is_in_string = not self._is_in_string
        elif self._is_in_string:
            return
        elif sign in "{[":
            self._depth += 1
        elif sign in "}]":
            self._depth -= 1
        else:  # white space
            return
        self.is_over = not self._depth and not self._is_in_string


def json_object(cursor: Cursor) -> Reading[None]:
    """The arguments that an object from here on is, while it is written. Only what begins as one is one."""
    yield from cursor.expect("{")
    space = yield from cursor.space()
    if (yield from cursor.peek()) not in ('"', "}"):
        raise NotACall
    scan = JsonScan()
    scan.read("{", 0)
    yield Arguments("{" + space)
    yield from _rest(cursor, scan)


def _rest(cursor: Cursor, scan: JsonScan) -> Reading[None]:
    while not scan.is_over:
        if not (yield from cursor.peek()):
            raise NotACall
        yield Arguments(cursor.take_as(scan.read))


def skip_value(cursor: Cursor) -> Reading[None]:
    """Any JSON value, of which nothing is told."""
    if (yield from cursor.peek()) in ("{", "[", '"'):
        for piece in _rest(cursor, JsonScan()):
            if piece is None:
                yield None
    elif not (yield from cursor.run(_SCALAR, _MAX_SCALAR_CHARS)):
        raise NotACall


def json_string(cursor: Cursor) -> Reading[str]:
    """What a short string says."""
    if (yield from cursor.peek()) != '"':
        raise NotACall
    while not (written := cursor.take_match(_STRING)):
        if cursor.is_over or cursor.num_left > 2 * _MAX_STRING_CHARS:
            raise NotACall
        yield None
    try:
        said: str = json.loads(written)
    except ValueError:
        raise NotACall from None
    return said
