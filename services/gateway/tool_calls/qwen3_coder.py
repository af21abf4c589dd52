"""Qwen3-Coder's calls, and Qwen 3.5's: each parameter an element of its own, its value bare text between line feeds.

`<tool_call>\\n<function=name>\\n<parameter=key>\\nvalue\\n</parameter>\\n</function>\\n</tool_call>`, as the models'
chat templates write them. The models now and then leave out `<tool_call>`, or a parameter's end before the next mark.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from services.gateway.tool_calls.cursor import MAX_NAME_CHARS, Cursor, Marks
from services.gateway.tool_calls.pieces import CallEnd, CallStart, NotACall, Reading, end_of_object, member, preceded
from services.gateway.tool_calls.untyped import ParameterTypes, untyped_value

_KEY: Final = re.compile(rf"[^>\n]{{0,{MAX_NAME_CHARS}}}")
_PARAMETER: Final = "<parameter="
_FUNCTION_END: Final = "</function>"
_VALUE_END: Final = Marks("\n</parameter>", "</parameter>", f"\n{_PARAMETER}", f"\n{_FUNCTION_END}")


class QwenCoderCalls:
    """types   of the parameters, by the function's name"""

    openings = Marks("<tool_call>", "<function=")
    bare_signs = ""

    def __init__(self, types: Mapping[str, ParameterTypes]) -> None:
        self._types = types

    def read(self, cursor: Cursor) -> Reading[None]:
        yield from cursor.accept("<tool_call>")
        yield from cursor.space()
        yield from cursor.expect("<function=")
        name = yield from cursor.name()
        yield from cursor.expect(">")
        yield CallStart(name)
        yield from self._parameters(cursor, self._types.get(name, ParameterTypes(None)))
        yield CallEnd()
        yield from cursor.closings("</tool_call>")

    def _parameters(self, cursor: Cursor, types: ParameterTypes) -> Reading[None]:
        is_first = True
        while True:
            yield from cursor.space()
            mark = yield from cursor.accept_one(_PARAMETER, _FUNCTION_END)
            if mark != _PARAMETER:
                break
            key = yield from cursor.run(_KEY, MAX_NAME_CHARS)
            yield from cursor.expect(">")
            yield from cursor.accept("\n")
            value = untyped_value(cursor, types.of(key), _VALUE_END)
            yield from preceded(value, member(key, is_first=is_first))
            yield from cursor.accept("\n")
            yield from cursor.accept("</parameter>")
            is_first = False
        if not mark:
            raise NotACall
        yield end_of_object(is_empty=is_first)
