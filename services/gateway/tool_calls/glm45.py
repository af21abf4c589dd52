"""GLM 4.5's calls, and those of its successors: the name, then pairs of keys and values, the values as bare text.

`<tool_call>name\\n<arg_key>key</arg_key>\\n<arg_value>value</arg_value>\\n</tool_call>`, as the models' chat templates
write them; GLM 4.7 leaves out the line feeds.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from services.gateway.tool_calls.cursor import MAX_NAME_CHARS, Cursor, Marks
from services.gateway.tool_calls.pieces import CallEnd, CallStart, NotACall, Reading, end_of_object, member, preceded
from services.gateway.tool_calls.untyped import ParameterTypes, untyped_value

_KEY: Final = re.compile(rf"[^<\n]{{0,{MAX_NAME_CHARS}}}")
_VALUE_END: Final = Marks("</arg_value>")
_END: Final = "</tool_call>"


class GlmCalls:
    """types   of the parameters, by the function's name"""

    openings = Marks("<tool_call>")
    bare_signs = ""

    def __init__(self, types: Mapping[str, ParameterTypes]) -> None:
        self._types = types

    def read(self, cursor: Cursor) -> Reading[None]:
        yield from cursor.expect("<tool_call>")
        yield from cursor.space()
        name = yield from cursor.name()
        mark = yield from self._mark(cursor)
        yield CallStart(name)
        types = self._types.get(name, ParameterTypes(None))
        is_first = True
        while mark != _END:
            yield from self._pair(cursor, types, is_first=is_first)
            mark = yield from self._mark(cursor)
            is_first = False
        yield end_of_object(is_empty=is_first)
        yield CallEnd()

    def _mark(self, cursor: Cursor) -> Reading[str]:
        """What stands next, another pair or the end."""
        yield from cursor.space()
        mark = yield from cursor.accept_one("<arg_key>", _END)
        if not mark:
            raise NotACall
        return mark

    def _pair(self, cursor: Cursor, types: ParameterTypes, *, is_first: bool) -> Reading[None]:
        key = (yield from cursor.run(_KEY, MAX_NAME_CHARS)).strip()
        yield from cursor.expect("</arg_key>")
        yield from cursor.space()
        yield from cursor.expect("<arg_value>")
        yield from preceded(untyped_value(cursor, types.of(key), _VALUE_END), member(key, is_first=is_first))
        yield from cursor.expect("</arg_value>")
