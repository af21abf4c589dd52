"""The grammar of answers that are nothing but calls, so that any model writes calls that can be read and carried out.

Two families write them in their own way. The others' marks are special tokens, which a grammar of text cannot spell, or
leave types to guess: for them calls are a list in JSON, as vLLM has it for all.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from pydantic import JsonValue

from services.gateway.base_schema import JsonObject
from services.gateway.json_schema import closed
from services.gateway.output_schema import ToolFunction
from shared.wire.engine import ToolFormat

MAX_FORCED_CALLS = 16  # a model that was never taught tools would go on for ever
_JSON_STYLE: Final = {"whitespace_pattern": " "}


@dataclass(frozen=True, slots=True)
class ForcedStyle:
    """What stands before the first, between two and after the last call; the name under which calls carry arguments."""

    before: str = "["
    between: str = ", "
    after: str = "]"
    arguments: str = "arguments"


FORCED_STYLES: Final[Mapping[ToolFormat, ForcedStyle]] = {
    "hermes": ForcedStyle("<tool_call>\n", "\n</tool_call>\n<tool_call>\n", "\n</tool_call>"),
    "llama3_json": ForcedStyle("", "; ", "", arguments="parameters"),
}


def calls_grammar(
    functions: Sequence[ToolFunction], form: ToolFormat, *, parallel: bool, or_answer: JsonObject | None = None
) -> str:
    """A Lark grammar of answers that are nothing but calls, with arguments as the tools' schemas want them.

    parallel    several calls are allowed, one otherwise
    or_answer   a JSON schema: an answer may be such JSON instead
    """
    style = FORCED_STYLES.get(form, ForcedStyle())
    first, between, last = (json.dumps(text) if text else "" for text in (style.before, style.between, style.after))
    more = f" ({between} call){{0,{MAX_FORCED_CALLS - 1}}}" if parallel else ""
    rules = [
        "start: calls" + ("" if or_answer is None else " | answer"),
        f"calls: {first} call{more} {last}",
        "call: " + " | ".join(f"call_{i}" for i in range(len(functions))),
    ]
    for i, function in enumerate(functions):
        opening = json.dumps(f'{{"name": "{function.name}", "{style.arguments}": ')
        rules += [f'call_{i}: {opening} arguments_{i} "}}"', f"arguments_{i}: %json {_arguments_schema(function)}"]
    if or_answer is not None:
        rules.append(f"answer: %json {_styled(or_answer)}")
    return "\n".join(rules)


def _arguments_schema(function: ToolFunction) -> str:
    """A document of its own, so that its references stay true. Without `strict` the schema is followed as far as the
    grammar library knows it."""
    schema = function.parameters or {"type": "object", "properties": {}, "additionalProperties": False}
    return _styled(closed(schema), lenient=not function.strict)


def _styled(schema: JsonObject, **style: JsonValue) -> str:
    given = schema.get("x-guidance")
    merged = {**_JSON_STYLE, **style, **(given if isinstance(given, dict) else {})}
    return json.dumps({**schema, "x-guidance": merged}, ensure_ascii=False)
