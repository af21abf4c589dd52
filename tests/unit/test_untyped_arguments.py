"""Arguments that are written as bare text: JSON values of the types that the tool's schema allows."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gateway.tool_calls.python_literal import literal_to_json
from services.gateway.tool_calls.untyped import ParameterTypes, to_json

STRING = {"type": "string"}


@pytest.mark.parametrize(
    ("schema", "types"),
    [
        ({"type": "integer"}, {"integer"}),
        ({"type": ["string", "null"]}, {"string", "null"}),
        ({"anyOf": [STRING, {"type": "null"}]}, {"string", "null"}),
        ({"oneOf": [{"type": "array"}, {"$ref": "#/$defs/Size"}]}, {"array", "number"}),
        ({"anyOf": [STRING, {"title": "anything"}]}, set()),
        ({"$ref": "#/$defs/Size"}, {"number"}),
        ({"$ref": "#/$defs/Nowhere"}, set()),
        ({"$ref": "#/$defs/Endless"}, set()),
        ({"allOf": [{"title": "x"}, {"$ref": "#/$defs/Size"}]}, {"number"}),
        ({"enum": ["red", "green"]}, {"string"}),
        ({"const": True}, {"boolean"}),
        ({"description": "whatever"}, set()),
        ({"type": 7}, set()),
        (True, set()),
    ],
)
def test_a_schema_tells_the_types_it_allows_or_nothing(schema: Any, types: set[str]):
    definitions: Any = {"Size": {"type": "number"}, "Endless": {"$ref": "#/$defs/Endless"}}
    assert ParameterTypes({"properties": {"a": schema}, "$defs": definitions}).of("a") == types


@pytest.mark.parametrize("schema", [None, {}, {"properties": []}, {"properties": {"b": STRING}}])
def test_of_a_parameter_that_no_schema_lists_nothing_is_known(schema: Any):
    assert ParameterTypes(schema).of("a") == set()


@pytest.mark.parametrize(
    ("text", "types", "value"),
    [
        ("5", {"integer"}, 5),
        (" 5\n", {"integer"}, 5),
        ("5.0", {"integer"}, 5),
        ("5.0", {"number"}, 5.0),
        ("5.5", {"integer"}, 5.5),
        ("five", {"integer"}, "five"),
        ("true", {"boolean"}, True),
        ("False", {"boolean"}, False),
        ("null", {"integer"}, None),
        ("None", {"object"}, None),
        ('{"a": [1]}', {"object"}, {"a": [1]}),
        ("{'a': (1, True)}", {"object"}, {"a": [1, True]}),
        ("[1, 2", {"array"}, "[1, 2"),
        ("NaN", {"number"}, "NaN"),
        ("5", {"string", "integer"}, 5),
        ("[5]", {"string", "integer"}, "[5]"),
        ("a b", set(), "a b"),
        ("5", set(), 5),
        ('"5"', set(), "5"),
        ("[" * 100_000, set(), "[" * 100_000),
        ("9" * 5000, {"integer"}, "9" * 5000),
    ],
)
def test_text_becomes_the_value_that_the_schema_wants_or_stays_a_string(text: str, types: set[str], value: Any):
    assert json.loads(to_json(text, frozenset(types))) == value


WORDS = st.text(st.characters(codec="utf-8"), max_size=12)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=3),
    max_leaves=8,
)


@given(VALUES)
def test_python_literals_mean_the_same_in_json(value: Any):
    assert json.loads(literal_to_json(repr(value))) == value


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("'''a'b'''", "a'b"),
        ('""', ""),
        (r"'\x41\u00e9\U0001F600\n\'\"\\'", "Aé😀\n'\"\\"),
        (r"'\d\xZ'", "\\d\\xZ"),
        ("'\\\n'", ""),
        ("(1, 2,)", [1, 2]),
        ("[[], {}, (),]", [[], {}, []]),
        ("{'a': true, 'b': null}", {"a": True, "b": None}),
        ("-1_000", -1000),
        ("0x1F", 31),
        (".5", 0.5),
        ("1e3", 1000.0),
    ],
)
def test_pythons_spellings_are_understood(written: str, value: Any):
    assert json.loads(literal_to_json(written)) == value


@pytest.mark.parametrize(
    "text", ["", "oh", "1 2", "[1", "'a", "f(1)", "nan", "1e999", "[1 2]", "[,]", "'\\", "{1", ")", "-"]
)
def test_what_is_no_literal_is_none(text: str):
    assert literal_to_json(text) == ""
