"""Kimi K2's calls: `<|tool_calls_section_begin|><|tool_call_begin|>functions.name:0<|tool_call_argument_begin|>{…}`
`<|tool_call_end|>…<|tool_calls_section_end|>`.

Source: Moonshot's tool-calling guide for Kimi K2. What names the function is also the call's id, which the chat
template writes back in later turns as it is, so clients get it as such.
"""

from __future__ import annotations

import re
from typing import Final

from services.gateway.tool_calls.cursor import Cursor, Marks
from services.gateway.tool_calls.json_text import json_object
from services.gateway.tool_calls.pieces import CallEnd, CallStart, NotACall, Reading, preceded

_SECTION_BEGIN: Final = "<|tool_calls_section_begin|>"
_BEGIN: Final = "<|tool_call_begin|>"
_ID: Final = re.compile(r"(?:functions\.)?(?P<name>.+?)(?P<number>:\d+)?")


class KimiCalls:
    openings = Marks(_SECTION_BEGIN, _BEGIN)
    bare_signs = ""

    def read(self, cursor: Cursor) -> Reading[None]:
        yield from cursor.accept(_SECTION_BEGIN)
        yield from cursor.space()
        yield from cursor.expect(_BEGIN)
        yield from cursor.space()
        call_id = yield from cursor.name()
        yield from cursor.space()
        yield from cursor.expect("<|tool_call_argument_begin|>")
        yield from cursor.space()
        yield from preceded(json_object(cursor), _start(call_id))
        yield CallEnd()
        yield from cursor.closings("<|tool_call_end|>", "<|tool_calls_section_end|>")


def _start(call_id: str) -> CallStart:
    found = _ID.fullmatch(call_id)
    if not found:
        raise NotACall
    return CallStart(found["name"], call_id if found["number"] else None)
