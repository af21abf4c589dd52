"""What an answer must look like: every way to ask for it, and which ways exclude each other."""

from __future__ import annotations

import json
from typing import Any

import orjson
import pytest

from services.gateway.body import parse
from services.gateway.constraints import ToolPlan, constraint_of
from services.gateway.json_schema import closed
from services.gateway.schema import ChatRequest, CompletionRequest, wire_sampling, wire_tools
from shared.errors import InvalidRequest
from shared.sampling import Constraint, SamplingParams

HELLO = [{"role": "user", "content": "hi"}]
SCHEMA = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {"type": "string"}}}
LOOK = {"type": "function", "function": {"name": "look", "parameters": SCHEMA, "x-extra": 1}, "cache": True}
NOW = {"type": "function", "function": {"name": "now"}}


def chat(**fields: Any) -> ChatRequest:
    return parse(orjson.dumps({"messages": HELLO, **fields}), ChatRequest)


def asked(**fields: Any) -> Constraint | None:
    return constraint_of(chat(**fields))


def refused(**fields: Any) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as error:
        planned(**fields)
    return error.value


def planned(**fields: Any) -> SamplingParams:
    body = chat(**fields)
    return ToolPlan.of(body, "hermes").applied_to(body.sampling(), constraint_of(body))


# --- formats and extras -----------------------------------------------------------------------------------------------


def test_nothing_is_asked_for_by_text_and_by_null():
    for nothing in ({}, {"response_format": {"type": "text"}}, {"guided_choice": None}, {"structured_outputs": None}):
        assert asked(**nothing) is None


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"guided_regex": ""}, "guided_regex"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_grammar": ""}, "guided_grammar"),
        ({"guided_json": ""}, "guided_json"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"json_object": False}}, "structured_outputs"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"structured_outputs": {"jsn": {}}}, "structured_outputs.jsn"),
    ],
)
def test_an_empty_or_misspelt_wish_is_refused_and_not_passed_over(fields: dict[str, Any], named: str):
    assert refused(**fields).param == named


def test_response_formats_become_constraints():
    assert asked(response_format={"type": "json_object"}) == Constraint(kind="json_object", param="response_format")
    given = {"name": "x", "schema": SCHEMA, "strict": True}
    constraint = asked(response_format={"type": "json_schema", "json_schema": given})
    assert constraint is not None
    assert (constraint.kind, constraint.param) == ("json_schema", "response_format.json_schema.schema")
    assert json.loads(constraint.value) == SCHEMA | {"additionalProperties": False}
    assert constraint.value.index('"b"') < constraint.value.index('"a"'), "the order of properties is the answer's"


OPEN: Any = {"type": "object", "properties": {"a": {}}}
CLOSED: Any = {**OPEN, "additionalProperties": False}


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        (OPEN, CLOSED),
        ({"type": "array", "items": OPEN}, {"type": "array", "items": CLOSED}),
        ({"anyOf": [OPEN, {"type": "null"}]}, {"anyOf": [CLOSED, {"type": "null"}]}),
        ({"$defs": {"x": OPEN}, "$ref": "#/$defs/x"}, {"$defs": {"x": CLOSED}, "$ref": "#/$defs/x"}),
        ({"properties": {"properties": OPEN}}, {"properties": {"properties": CLOSED}, "additionalProperties": False}),
        ({"type": "object"}, {"type": "object"}),
        ({**OPEN, "additionalProperties": True}, {**OPEN, "additionalProperties": True}),
        ({**OPEN, "patternProperties": {"^x": {}}}, {**OPEN, "patternProperties": {"^x": {}}}),
        ({"enum": [OPEN], "default": OPEN}, {"enum": [OPEN], "default": OPEN}),
    ],
)
def test_objects_are_closed_to_what_they_do_not_list_unless_they_say_otherwise(schema: Any, expected: Any):
    assert closed(schema) == expected


@pytest.mark.parametrize(
    "schema",
    [
        {"allOf": [OPEN, {"properties": {"b": {}}}]},
        {"$defs": {"x": OPEN}, "allOf": [{"$ref": "#/$defs/x"}, {"properties": {"b": {}}}]},
        {**OPEN, "anyOf": [{"properties": {"b": {}}}, {"properties": {"c": {}}}]},
        {"items": {**OPEN, "$ref": "#/$defs/x"}, "$defs": {"x": {"properties": {"b": {}}}}},
    ],
)
def test_an_object_put_together_from_several_is_left_open(schema: Any):
    assert closed(schema) == schema


def test_only_without_strict_are_unknown_keywords_passed_over():
    def text(**strict: bool) -> str:
        format_ = {"type": "json_schema", "json_schema": {"schema": SCHEMA, **strict}}
        constraint = asked(response_format=format_)
        assert constraint is not None
        return constraint.value

    assert "lenient" in text(strict=False)
    assert "lenient" not in text(strict=True) + text()


@pytest.mark.parametrize(
    ("name", "kind", "given", "value"),
    [
        ("json", "json_schema", {"enum": [1]}, '{"enum":[1]}'),
        ("json", "json_schema", '{"type": "object"}', '{"type":"object"}'),
        ("json", "json_schema", {}, "{}"),
        ("regex", "regex", "a+", "a+"),
        ("choice", "choice", ["yes", "nö"], '["yes","nö"]'),
        ("grammar", "grammar", 'root ::= "a"', 'root ::= "a"'),
    ],
)
def test_both_spellings_of_vllms_extras_mean_the_same(name: str, kind: Any, given: Any, value: str):
    assert asked(**{f"guided_{name}": given}) == Constraint(kind=kind, value=value, param=f"guided_{name}")
    nested = asked(structured_outputs={name: given})
    assert nested == Constraint(kind=kind, value=value, param=f"structured_outputs.{name}")


def test_text_completions_take_them_too():
    body = parse(orjson.dumps({"prompt": "a", "guided_regex": "b"}), CompletionRequest)
    assert constraint_of(body) == Constraint(kind="regex", value="b", param="guided_regex")


def test_a_constraint_travels_as_plain_json():
    sampling = wire_sampling(SamplingParams(constraint=Constraint(kind="regex", value="b", param="guided_regex")))
    sent = orjson.loads(orjson.dumps(sampling))
    assert sent == {"constraint": {"kind": "regex", "value": "b", "param": "guided_regex"}}
    assert Constraint(**sent["constraint"]) == Constraint(kind="regex", value="b", param="guided_regex")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"guided_json": SCHEMA, "guided_regex": "a"}, "guided_regex"),
        ({"response_format": {"type": "json_object"}, "guided_choice": ["a"]}, "guided_choice"),
        ({"structured_outputs": {"json": SCHEMA, "regex": "a"}}, "structured_outputs.regex"),
        ({"structured_outputs": {"regex": "a"}, "guided_grammar": "a"}, "guided_grammar"),
        ({"guided_choice": ["a", ""]}, "guided_choice"),
        ({"guided_choice": "a"}, "guided_choice"),
        ({"guided_json": 5}, "guided_json"),
        ({"guided_json": "{"}, "guided_json"),
        ({"structured_outputs": {"json": "[]"}}, "structured_outputs.json"),
        ({"guided_regex": "a" * 300_000}, "guided_regex"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format.json_schema.schema"),
        ({"response_format": {"type": "json_object", "json_schema": {"schema": {}}}}, "response_format"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": "json_object"}, "response_format"),
    ],
)  # fmt: skip
def test_contradictions_and_nonsense_name_their_field(fields: dict[str, Any], param: str):
    error = refused(**fields)
    assert (error.param or "").startswith(param)
    assert "Body" not in error.message


@pytest.mark.parametrize("depth", [55, 130, 500])
def test_what_is_nested_without_end_is_refused_in_few_words(depth: int):
    """Case B32."""
    schema = '{"properties":{"a":' * depth + "{}" + "}}" * depth
    for param, value in {
        "guided_json": schema,
        "structured_outputs": f'{{"json":{json.dumps(schema)}}}',
        "response_format": f'{{"type":"json_schema","json_schema":{{"schema":{schema}}}}}',
        "tools": f'[{{"type":"function","function":{{"name":"f","parameters":{schema}}}}}]',
        "messages": f'[{{"role":"assistant","tool_calls":[{schema}]}}]',
    }.items():
        body = f'{{"messages":[{{"role":"user","content":"hi"}}],"{param}":{value}}}'
        with pytest.raises(InvalidRequest, match="more than 100 levels deep") as error:
            parse(body.encode(), ChatRequest)
        assert (error.value.param or "").startswith(param)
        assert len(error.value.message) < 200


@pytest.mark.parametrize("fields", [{"kind": "xml"}, {"kind": "regex"}, {"kind": "json_object", "value": "{}"}])
def test_a_constraint_that_says_nothing_is_none(fields: dict[str, Any]):
    with pytest.raises(InvalidRequest):
        Constraint(**fields, param="constraint")


# --- tools ------------------------------------------------------------------------------------------------------------


def test_tools_reach_the_template_as_the_client_wrote_them():
    assert wire_tools(chat(tools=[LOOK, NOW]).tools) == [LOOK, NOW]
    assert wire_tools(chat().tools) is None


def test_tools_are_offered_forced_or_not_at_all():
    auto = planned(tools=[LOOK, NOW])
    assert auto.constraint is None
    assert not auto.skip_special_tokens
    required = planned(tools=[LOOK, NOW], tool_choice="required").constraint
    assert required is not None
    assert (required.kind, required.param) == ("grammar", "tools")
    assert "call: call_0 | call_1\n" in required.value
    named = planned(tools=[LOOK, NOW], tool_choice={"type": "function", "function": {"name": "now"}}).constraint
    assert named is not None
    assert "look" not in named.value
    assert planned(tools=[LOOK], tool_choice="none") == SamplingParams()
    assert ToolPlan.of(chat(tools=[LOOK], tool_choice="none"), "hermes").reader(None) is None


def test_one_call_only_if_calls_may_not_be_parallel():
    grammar = planned(tools=[LOOK], tool_choice="required", parallel_tool_calls=False).constraint
    assert grammar is not None
    assert "{0," not in grammar.value


def test_with_tools_at_hand_a_json_format_holds_for_answers_that_are_no_call():
    format_ = {"type": "json_schema", "json_schema": {"schema": SCHEMA}}
    either = planned(tools=[NOW], response_format=format_).constraint
    assert either is not None
    assert either.value.startswith("start: calls | answer\n")
    assert either.param == "response_format.json_schema.schema"
    forced = planned(tools=[NOW], tool_choice="required", response_format=format_).constraint
    assert forced is not None
    assert "answer" not in forced.value


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice"),
        ({"tools": [NOW], "tool_choice": {"type": "function", "function": {"name": "look"}}}, "tool_choice"),
        ({"tools": [NOW], "tool_choice": {"type": "function"}}, "tool_choice.function"),
        ({"tools": [NOW], "tool_choice": "always"}, "tool_choice"),
        ({"tools": [NOW], "tool_choice": 5}, "tool_choice"),
        ({"tools": [NOW, NOW]}, "tools"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "custom", "function": {"name": "a"}}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "function": {"name": "a", "parameters": []}}]}, "tools[0].function.param"),
        ({"tools": [NOW] * 200}, "tools"),
        ({"tools": [NOW], "guided_regex": "a"}, "guided_regex"),
        ({"tools": [NOW], "tool_choice": "required", "guided_choice": ["a"]}, "guided_choice"),
    ],
)  # fmt: skip
def test_tools_that_make_no_sense_name_their_field(fields: dict[str, Any], param: str):
    error = refused(**fields)
    assert (error.param or "").startswith(param), error.param
    assert "<" not in (error.param or "")
