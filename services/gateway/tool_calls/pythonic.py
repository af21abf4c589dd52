"""Calls as a Python list: `[first(a=1, b="x"), second()]`, Llama 3.2's and others', between `<|python_start|>` and
`<|python_end|>` in Llama 4's answers.

Source: Meta's prompt formats for Llama 3.2 and 4. Arguments are literals and have names.
"""

from __future__ import annotations

import re
from collections.abc import Set
from typing import Final

from services.gateway.tool_calls.cursor import MAX_NAME_CHARS, Cursor, Marks
from services.gateway.tool_calls.pieces import (
    CallEnd,
    CallPiece,
    CallStart,
    NotACall,
    Reading,
    end_of_object,
    member,
    preceded,
)
from services.gateway.tool_calls.python_literal import literal

_KEY: Final = re.compile(rf"\w{{0,{MAX_NAME_CHARS}}}")
_PYTHON_START: Final = "<|python_start|>"


class PythonicCalls:
    """bare_names   of functions; a list at the beginning of an answer, without a mark, calls these and no others"""

    openings = Marks(_PYTHON_START)
    bare_signs = "["

    def __init__(self, bare_names: Set[str]) -> None:
        self._bare_names = bare_names

    def read(self, cursor: Cursor) -> Reading[None]:
        names = None if (yield from cursor.accept(_PYTHON_START)) else self._bare_names
        yield from cursor.space()
        yield from cursor.expect("[")
        while True:
            yield from cursor.space()
            yield from _call(cursor, names)
            yield from cursor.space()
            if not (yield from cursor.accept(",")):
                break
        yield from cursor.expect("]")
        yield from cursor.closings("<|python_end|>")


def _call(cursor: Cursor, names: Set[str] | None) -> Reading[None]:
    """It begins with its first value, so that a list of something else is none."""
    name = yield from cursor.name()
    if names is not None and name not in names:
        raise NotACall
    yield from cursor.expect("(")
    waiting: tuple[CallPiece, ...] = (CallStart(name),)
    is_first = True
    while True:
        yield from cursor.space()
        if (yield from cursor.accept(")")):
            break
        if not is_first:
            yield from cursor.expect(",")
            yield from cursor.space()
            if (yield from cursor.accept(")")):
                break
        key = yield from cursor.run(_KEY, MAX_NAME_CHARS)
        yield from cursor.space()
        yield from cursor.expect("=")
        yield from preceded(literal(cursor), *waiting, member(key, is_first=is_first))
        waiting = ()
        is_first = False
    yield from waiting
    yield end_of_object(is_empty=is_first)
    yield CallEnd()
