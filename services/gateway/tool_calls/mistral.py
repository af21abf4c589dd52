"""Mistral's calls: `[TOOL_CALLS][{"name": …, "arguments": {…}}, …]`, since version 11 of its tokenizer
`[TOOL_CALLS]name[ARGS]{…}` for each call, in some models with `[CALL_ID]id` before the arguments, in some with no mark.

Source: mistral-common's instruct tokenizers. Ids are not read: the API's own suit Mistral's templates as well.
"""

from __future__ import annotations

from services.gateway.tool_calls.cursor import Cursor, Marks
from services.gateway.tool_calls.json_calls import calls_or_list
from services.gateway.tool_calls.json_text import json_object
from services.gateway.tool_calls.pieces import CallEnd, CallStart, Reading, preceded


class MistralCalls:
    openings = Marks("[TOOL_CALLS]")
    bare_signs = ""

    def read(self, cursor: Cursor) -> Reading[None]:
        yield from cursor.expect("[TOOL_CALLS]")
        yield from cursor.space()
        if (yield from cursor.peek()) in ("[", "{"):
            yield from calls_or_list(cursor)
            return
        name = yield from cursor.name()
        if (yield from cursor.accept("[CALL_ID]")):
            yield from cursor.name()
        yield from cursor.accept("[ARGS]")
        yield from cursor.space()
        yield from preceded(json_object(cursor), CallStart(name))
        yield CallEnd()
