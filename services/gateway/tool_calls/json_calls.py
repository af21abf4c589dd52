"""Calls that are JSON objects with a name and arguments, alone or in a list.

`<tool_call>{"name": …, "arguments": {…}}</tool_call>`: the Hermes function-calling datasets, Qwen 2.5 and 3 after them.
`{"name": …, "parameters": {…}}`, several separated by `;`, at times after `<|python_tag|>`: Llama 3.1's model card and
chat template. A list of such objects is what answers are made to be that no family's own marks can be forced upon.
"""

from __future__ import annotations

from collections.abc import Set
from typing import Final

from services.gateway.tool_calls.cursor import MAX_NAME_CHARS, Cursor, Marks
from services.gateway.tool_calls.json_text import json_object, json_string, skip_value
from services.gateway.tool_calls.pieces import (
    Arguments,
    CallEnd,
    CallPiece,
    CallStart,
    NotACall,
    Reading,
    collected,
    preceded,
)

_ARGUMENTS: Final = ("arguments", "parameters")
_BESIDE: Final = ("id", "type")  # what a call without an opening may say besides; an answer in JSON says other things


class JsonCalls:
    """bare_names   of functions; an answer that begins with a call of one of them needs no opening. JSON without such a
    name may be meant as an answer.

    separator       between calls after one opening
    """

    def __init__(
        self, opening: str = "", closing: str = "", separator: str = "", bare_names: Set[str] = frozenset()
    ) -> None:
        self.openings = Marks(opening) if opening else Marks()
        self.bare_signs = "{[" if bare_names else ""
        self._opening = opening
        self._closing = closing
        self._separator = separator
        self._bare_names = bare_names

    def read(self, cursor: Cursor) -> Reading[None]:
        is_marked = bool(self._opening) and (yield from cursor.accept(self._opening))
        names = None if is_marked else self._bare_names
        yield from cursor.space()
        yield from calls_or_list(cursor, names)
        while self._separator and (yield from self._accept_separator(cursor)):
            yield from json_call(cursor, names)
        if self._closing:
            yield from cursor.closings(self._closing)

    def _accept_separator(self, cursor: Cursor) -> Reading[bool]:
        place = cursor.place
        yield from cursor.space()
        if (yield from cursor.accept(self._separator)):
            yield from cursor.space()
            return True
        cursor.rewind(place)
        return False


def calls_or_list(cursor: Cursor, names: Set[str] | None = None) -> Reading[None]:
    """One call, or a list of one or more."""
    if not (yield from cursor.accept("[")):
        yield from json_call(cursor, names)
        return
    while True:
        yield from cursor.space()
        yield from json_call(cursor, names)
        yield from cursor.space()
        if (yield from cursor.accept("]")):
            return
        yield from cursor.expect(",")


def json_call(cursor: Cursor, names: Set[str] | None = None) -> Reading[None]:
    """One object. Its call begins with its arguments, or with its end if there are none or they come before the name.

    names   of the functions that it may call, and then it must have arguments; None: it calls whatever it says
    """
    name: str | None = None
    held: list[CallPiece] = []
    has_called = False
    yield from cursor.expect("{")
    while True:
        key = yield from _key(cursor)
        if key == "name" and name is None:
            name = _checked((yield from json_string(cursor)), names)
        elif key not in _ARGUMENTS or has_called or held:
            if names is not None and key not in _BESIDE:
                raise NotACall
            yield from skip_value(cursor)
        elif name is None:
            yield from collected(json_object(cursor), into=held)
        else:
            yield from preceded(json_object(cursor), CallStart(name))
            yield CallEnd()
            has_called = True
        yield from cursor.space()
        if (yield from cursor.accept("}")):
            break
        yield from cursor.expect(",")
    if has_called:
        cursor.settle()
        return
    if name is None or (names is not None and not held):
        raise NotACall
    yield CallStart(name)
    yield from held or (Arguments("{}"),)
    yield CallEnd()


def _key(cursor: Cursor) -> Reading[str]:
    yield from cursor.space()
    key = yield from json_string(cursor)
    yield from cursor.space()
    yield from cursor.expect(":")
    yield from cursor.space()
    return key


def _checked(name: str, names: Set[str] | None) -> str:
    is_name = 0 < len(name) <= MAX_NAME_CHARS and name.isprintable() and " " not in name
    if not is_name or (names is not None and name not in names):
        raise NotACall
    return name
