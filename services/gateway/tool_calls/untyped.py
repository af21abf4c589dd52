"""Arguments that a model writes as bare text between marks: JSON values, of the types that the tool's schema allows.

As vLLM and SGLang do it: where the schema says string, the text is the string; elsewhere it is read as JSON, or as the
Python literal that some models write instead, and stays a string if it is neither. Strings are given out while they are
written; all else when it is complete, since its type shows only then.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Final

from services.gateway.base_schema import JsonObject
from services.gateway.tool_calls.cursor import Cursor, Marks
from services.gateway.tool_calls.pieces import Arguments, NotACall, Reading, json_characters
from services.gateway.tool_calls.python_literal import literal_to_json

_MAX_DEPTH: Final = 8  # of references and alternatives: a schema may refer to itself
_STRING: Final = frozenset({"string"})
_STRING_OR_NULL: Final = frozenset({"string", "null"})


class ParameterTypes:
    """What one function's schema says of its parameters."""

    def __init__(self, schema: JsonObject | None) -> None:
        self._schema = schema or {}

    def of(self, name: str) -> frozenset[str]:
        """JSON Schema's names of the types that it may have; none if nothing is said."""
        properties = self._schema.get("properties")
        found = properties.get(name) if isinstance(properties, dict) else None
        return self._types(found, _MAX_DEPTH)

    def _types(self, schema: object, depth: int) -> frozenset[str]:
        if not isinstance(schema, dict) or not depth:
            return frozenset()
        if isinstance(said := schema.get("type"), str):
            return frozenset({said})
        if isinstance(said, list):
            return frozenset(filter(lambda name: isinstance(name, str), said))
        if "const" in schema or isinstance(schema.get("enum"), list):
            values = [schema["const"]] if "const" in schema else schema["enum"]
            return frozenset(kind for value in values for kind in _kinds(value))
        for keyword in ("anyOf", "oneOf"):
            if isinstance(parts := schema.get(keyword), list):
                all_types = [self._types(part, depth - 1) for part in parts]
                return frozenset().union(*all_types) if all(all_types) else frozenset()
        return next(filter(None, self._of_whole(schema, depth - 1)), frozenset())

    def _of_whole(self, schema: JsonObject, depth: int) -> Iterator[frozenset[str]]:
        """What those say that the value must follow as well."""
        if isinstance(reference := schema.get("$ref"), str):
            yield self._types(self._referred(reference), depth)
        if isinstance(parts := schema.get("allOf"), list):
            yield from (self._types(part, depth) for part in parts)

    def _referred(self, reference: str) -> object:
        found: Any = self._schema
        for key in reference.removeprefix("#").split("/")[1:]:
            found = found.get(key) if isinstance(found, dict) else None
        return found


def untyped_value(cursor: Cursor, types: frozenset[str], endings: Marks) -> Reading[None]:
    """The text up to one of `endings` as a JSON value. One that is cut is given as far as it goes."""
    if types not in (_STRING, _STRING_OR_NULL):
        yield from _whole_value(cursor, types, endings)
        return
    start = "null" if "null" in types and (yield from cursor.accept("null")) else ""
    text = yield from cursor.text_before(endings)
    if start and not text:
        yield Arguments(start)
        return
    yield Arguments('"' + start + json_characters(text))
    while text:
        text = yield from cursor.text_before(endings)
        yield Arguments(json_characters(text))
    if not cursor.num_left:
        raise NotACall
    yield Arguments('"')


def _whole_value(cursor: Cursor, types: frozenset[str], endings: Marks) -> Reading[None]:
    pieces = []
    while text := (yield from cursor.text_before(endings)):
        pieces.append(text)
    text = "".join(pieces)
    if not cursor.num_left:
        yield Arguments(text)
        raise NotACall
    yield Arguments(to_json(text, types))


def to_json(text: str, types: frozenset[str]) -> str:
    """JSON text of what `text` means where these types are allowed; of itself where it means none of them."""
    for written in (text, literal_to_json(text.strip())):
        try:
            value = json.loads(written, parse_constant=_refuse)
        except (ValueError, RecursionError):
            continue
        # A string is what is left where nothing else fits; null is for whatever a model leaves out.
        if value is None or not types or types & _kinds(value) or "string" not in types:
            return _dumped(value, types)
        break
    return json.dumps(text, ensure_ascii=False)


def _dumped(value: Any, types: frozenset[str]) -> str:
    if isinstance(value, float) and value.is_integer() and "number" not in types and "integer" in types:
        value = int(value)
    return json.dumps(value, ensure_ascii=False)


def _kinds(value: object) -> frozenset[str]:
    match value:
        case None:
            return frozenset({"null"})
        case bool():
            return frozenset({"boolean"})
        case int():
            return frozenset({"integer", "number"})
        case float():
            return frozenset({"number", "integer"} if value.is_integer() else {"number"})
        case str():
            return _STRING
        case list():
            return frozenset({"array"})
    return frozenset({"object"})


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is not JSON")
