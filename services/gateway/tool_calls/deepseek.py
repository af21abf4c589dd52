"""DeepSeek's calls, as its published chat templates write them.

V3 and R1: `<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>name`, the arguments as a fenced block of
JSON, `<｜tool▁call▁end｜>…<｜tool▁calls▁end｜>`. V3.1: `<｜tool▁call▁begin｜>name<｜tool▁sep｜>{…}<｜tool▁call▁end｜>`.
What follows the separator tells one from the other, so both are read here.
"""

from __future__ import annotations

from typing import Final

from services.gateway.tool_calls.cursor import Cursor, Marks
from services.gateway.tool_calls.json_text import json_object
from services.gateway.tool_calls.pieces import CallEnd, CallStart, Reading, preceded

_ALL_BEGIN: Final = "<｜tool▁calls▁begin｜>"
_ALL_END: Final = "<｜tool▁calls▁end｜>"
_BEGIN: Final = "<｜tool▁call▁begin｜>"
_END: Final = "<｜tool▁call▁end｜>"
_SEPARATOR: Final = "<｜tool▁sep｜>"


class DeepSeekCalls:
    openings = Marks(_ALL_BEGIN, _BEGIN)
    bare_signs = ""

    def read(self, cursor: Cursor) -> Reading[None]:
        yield from cursor.accept(_ALL_BEGIN)
        yield from cursor.space()
        yield from cursor.expect(_BEGIN)
        name = yield from cursor.name()
        yield from cursor.expect(_SEPARATOR)
        yield from cursor.space()
        if (yield from cursor.peek()) != "{":
            name = yield from cursor.name()
            yield from cursor.space()
            yield from cursor.accept("```json")
            yield from cursor.space()
        yield from preceded(json_object(cursor), CallStart(name))
        yield CallEnd()
        yield from cursor.closings("```", _END, _ALL_END)
