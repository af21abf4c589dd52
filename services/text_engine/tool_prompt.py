"""Tools for a chat template that knows nothing of them: what it would drop is said in plain text instead.

The words and marks are those that Hermes and Qwen models were trained on, and that other models have seen most often.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from itertools import groupby
from typing import Any, Final

from shared.wire.engine import ChatMessage, ContentPart, TextPart

_INSTRUCTIONS: Final = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{tools}
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""


def spell_tools(messages: Iterable[ChatMessage], tools: list[dict[str, Any]] | None) -> list[ChatMessage]:
    """The conversation with `tools`, earlier calls and their results as text of system, assistant and user turns."""
    spelled = [
        turn
        for is_result, group in groupby(messages, lambda message: message.role == "tool")
        for turn in ([_results(group)] if is_result else map(_with_calls, group))
    ]
    if not tools:
        return spelled
    system = spelled.pop(0) if spelled and spelled[0].role == "system" else ChatMessage(role="system")
    instructions = _INSTRUCTIONS.format(tools="\n".join(map(_json, tools)))
    return [_extended(system, instructions, gap="\n\n"), *spelled]


def parsed_calls(message: ChatMessage) -> list[dict[str, Any]]:
    """The calls of an assistant turn as templates expect them: arguments as an object, not as the API's JSON text."""
    return [_with_parsed_arguments(call) for call in message.tool_calls or ()]


def _with_parsed_arguments(call: dict[str, Any]) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"])
    except (ValueError, RecursionError):
        return call  # shown as it is: a model may have written it
    return {**call, "function": {**function, "arguments": arguments}} if isinstance(arguments, dict) else call


def _with_calls(message: ChatMessage) -> ChatMessage:
    for call in parsed_calls(message):
        function = call.get("function", call)
        message = _extended(message, f"<tool_call>\n{_json(function)}\n</tool_call>", gap="\n")
    return message.model_copy(update={"tool_calls": None})


def _results(messages: Iterable[ChatMessage]) -> ChatMessage:
    """Results of calls made at once, in one turn: templates want user and assistant to alternate."""
    turn = ChatMessage(role="user")
    for message in messages:
        turn = _extended(turn, "<tool_response>\n", gap="\n")
        for part in message.content:
            if isinstance(part, TextPart):
                turn = _extended(turn, part.text, gap="")
            else:
                turn = turn.model_copy(update={"content": [*turn.content, part]})
        turn = _extended(turn, "\n</tool_response>", gap="")
    return turn


def _extended(message: ChatMessage, text: str, *, gap: str) -> ChatMessage:
    """With more text in its last part; a part of its own would be joined in the template's way, whatever that is."""
    *parts, last = message.content or [TextPart(text="")]
    if isinstance(last, TextPart):
        extended: list[ContentPart] = [*parts, TextPart(text=last.text + (gap if last.text else "") + text)]
    else:
        extended = [*parts, last, TextPart(text=text)]
    return message.model_copy(update={"content": extended})


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)
