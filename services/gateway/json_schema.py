"""JSON schemas as constraints: what a schema leaves open is decided in favour of answers that come to an end."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from pydantic import JsonValue

from services.gateway.base_schema import JsonObject

# Keywords whose values hold schemas: by name, in a list, or one.
_NAMED: Final = frozenset({"properties", "$defs", "definitions"})
_LISTED: Final = frozenset({"anyOf", "oneOf", "prefixItems"})
_SINGLE: Final = frozenset({"items", "additionalProperties"})
_SAYS_WHAT_ELSE: Final = frozenset({"additionalProperties", "patternProperties", "unevaluatedProperties"})
_COMBINING: Final = frozenset({"allOf", "anyOf", "oneOf", "$ref", "if", "dependentSchemas"})


def closed(schema: JsonObject) -> JsonObject:
    """The schema with its objects closed to properties that they do not list, wherever it does not say otherwise.

    A validator takes such objects for open, so a model could invent properties until max_tokens. What the closed schema
    allows, the given one allows. A schema that puts one object together from several is left as it is: parts that are
    closed to each other would leave nothing.
    """
    return schema if any(map(_combines, _objects(schema))) else _closed(schema)


def _closed(schema: JsonObject) -> JsonObject:
    result = {keyword: _closed_within(keyword, value) for keyword, value in schema.items()}
    if "properties" in schema and not schema.keys() & _SAYS_WHAT_ELSE:
        result["additionalProperties"] = False
    return result


def _closed_within(keyword: str, value: JsonValue) -> JsonValue:
    if keyword in _NAMED and isinstance(value, dict):
        return {name: _closed(item) if isinstance(item, dict) else item for name, item in value.items()}
    if keyword in _LISTED and isinstance(value, list):
        return [_closed(item) if isinstance(item, dict) else item for item in value]
    return _closed(value) if keyword in _SINGLE and isinstance(value, dict) else value


def _combines(value: JsonObject) -> bool:
    parts = value.get("allOf")
    is_joined = isinstance(parts, list) and len(parts) > 1
    return is_joined or ("properties" in value and bool(value.keys() & _COMBINING))


def _objects(value: JsonValue) -> Iterator[JsonObject]:
    """Every JSON object in it, schemas or not."""
    rest = [value]
    while rest:
        item = rest.pop()
        if isinstance(item, dict):
            yield item
            rest += item.values()
        elif isinstance(item, list):
            rest += item
