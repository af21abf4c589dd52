"""Python literals in a growing text as JSON, sign by sign: strings, numbers, True, False, None, lists, tuples, dicts.

JSON's own `true`, `false` and `null` are read, too: models mix them up. Nothing is evaluated.
"""

from __future__ import annotations

import json
import math
import re
from typing import Final

from services.gateway.tool_calls.cursor import Cursor, Marks
from services.gateway.tool_calls.pieces import Arguments, NotACall, Reading, json_characters

_CLOSING: Final = {"[": "]", "(": ")", "{": "}"}
_AS_JSON: Final = {"(": "[", ")": "]"}
_CONSTANTS: Final = {"True": "true", "False": "false", "None": "null"} | {w: w for w in ("true", "false", "null")}
_MAX_WORD_CHARS: Final = 64
_WORD: Final = re.compile(rf"[-+.\w]{{0,{_MAX_WORD_CHARS}}}")
_ENDS: Final = {quote: Marks(quote, "\\") for quote in ("'''", '"""', "'", '"')}
_ESCAPES: Final = dict(
    zip("abfnrtv0\\'\"\n", ["\a", "\b", "\f", "\n", "\r", "\t", "\v", "\0", "\\", "'", '"', ""], strict=True)
)
_NUM_HEX_DIGITS: Final = {"x": 2, "u": 4, "U": 8}
_HEX: Final = {num: re.compile(rf"[0-9a-fA-F]{{0,{num}}}") for num in _NUM_HEX_DIGITS.values()}


def literal(cursor: Cursor) -> Reading[None]:
    """One literal. Raises NotACall where there is none, or where it stops being one."""
    closings: list[str] = []  # of what is open, the innermost last
    while True:
        yield from cursor.space()
        sign = yield from cursor.peek()
        if sign and sign in _CLOSING:
            cursor.take(1)
            yield Arguments(_AS_JSON.get(sign, sign))
            closings.append(_CLOSING[sign])
            yield from cursor.space()
            if (yield from cursor.peek()) != closings[-1]:
                continue
        elif sign and sign in "'\"":
            yield from _string(cursor)
        else:
            yield Arguments(_json_word((yield from cursor.run(_WORD, _MAX_WORD_CHARS))))
        yield from _after_value(cursor, closings)
        if not closings:
            return


def _after_value(cursor: Cursor, closings: list[str]) -> Reading[None]:
    """Up to where the next value begins, or through the end of all that is open."""
    while closings:
        yield from cursor.space()
        if (yield from cursor.accept(closings[-1])):
            sign = closings.pop()
            yield Arguments(_AS_JSON.get(sign, sign))
        elif (yield from cursor.accept(",")):
            yield from cursor.space()
            if (yield from cursor.peek()) != closings[-1]:  # a comma after the last item is Python's only
                yield Arguments(", ")
                return
        else:
            yield from cursor.expect(":")
            yield Arguments(": ")
            return


def _json_word(word: str) -> str:
    if word in _CONSTANTS:
        return _CONSTANTS[word]
    try:
        return str(int(word, 0))
    except ValueError:
        pass
    try:
        number = float(word)
    except ValueError:
        raise NotACall from None
    if not math.isfinite(number):
        raise NotACall
    return json.dumps(number)


def _string(cursor: Cursor) -> Reading[None]:
    quote = yield from cursor.accept_one(*_ENDS)
    yield Arguments('"')
    while not (yield from cursor.accept(quote)):
        if text := (yield from cursor.text_before(_ENDS[quote])):
            yield Arguments(json_characters(text))
        else:
            yield from cursor.expect("\\")
            yield Arguments((yield from _escape(cursor)))
    yield Arguments('"')


def _escape(cursor: Cursor) -> Reading[str]:
    """What stands for the rest of an escape in a JSON string. One that Python does not know stands for itself."""
    sign = yield from cursor.peek()
    if not sign:
        raise NotACall
    cursor.take(1)
    if sign not in _NUM_HEX_DIGITS:
        return json_characters(_ESCAPES.get(sign, f"\\{sign}"))
    num_digits = _NUM_HEX_DIGITS[sign]
    digits = yield from cursor.run(_HEX[num_digits], num_digits)
    if len(digits) < num_digits or int(digits, 16) > 0x10FFFF:
        return json_characters(f"\\{sign}{digits}")
    # In ASCII: half of a surrogate pair may follow alone, and JSON can say so where UTF-8 cannot.
    return json.dumps(chr(int(digits, 16)))[1:-1]


def literal_to_json(text: str) -> str:
    """The same of a whole text; empty if it is no literal."""
    cursor = Cursor()
    cursor.feed(text)
    cursor.is_over = True
    try:
        written = [piece.text for piece in literal(cursor) if isinstance(piece, Arguments)]
    except NotACall:
        return ""
    return "" if cursor.num_left else "".join(written)
