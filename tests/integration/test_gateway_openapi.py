"""The OpenAPI document is true: made-up requests find no failure, no unknown status and no answer of another shape.

Requests are made up by schemathesis from the document, some as it wants them, some not, and sent to a running gateway
with scripted services behind it. The seed is fixed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jsonschema_rs import validator_for
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from services.gateway.schema import ChatRequest, CompletionRequest, TokenizeBody
from tests.gateway_stack import HELLO, Stack, running_stack

CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]
OPERATIONS = [
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/completions"),
    ("POST", "/v1/responses"),
    ("POST", "/v1/tokenize"),
    ("POST", "/v1/files"),
    ("GET", "/v1/files"),
    ("GET", "/v1/files/{file_id}"),
    ("GET", "/v1/files/{file_id}/content"),
    ("DELETE", "/v1/files/{file_id}"),
    ("GET", "/v1/models"),
    ("GET", "/v1/models/{model_id}"),
    ("GET", "/health"),
    ("GET", "/ready"),
    ("GET", "/metrics"),
]


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    with running_stack(log_level="error") as running:
        yield running


@pytest.fixture(scope="module")
def described(stack: Stack) -> dict[str, Any]:
    document: dict[str, Any] = stack.http.get("/openapi.json").json()
    return document


def test_the_document_names_every_operation_and_no_other(described: dict[str, Any]):
    found = [(method.upper(), path) for path, methods in described["paths"].items() for method in methods]
    assert sorted(found) == sorted(OPERATIONS)


def test_every_reference_of_the_document_leads_somewhere(described: dict[str, Any]):
    referred = set(re.findall(r'"#/components/schemas/(\w+)"', json.dumps(described)))
    assert referred == referred & described["components"]["schemas"].keys()


@pytest.mark.parametrize("model", [ChatRequest, CompletionRequest, TokenizeBody])
def test_every_field_of_a_request_is_documented(described: dict[str, Any], model: Any):
    fields = {info.alias or name for name, info in model.model_fields.items()}
    assert described["components"]["schemas"][model.__name__]["properties"].keys() == fields


def test_ranges_of_sampling_fields_are_documented(described: dict[str, Any]):
    properties = described["components"]["schemas"]["ChatRequest"]["properties"]
    [temperature] = [choice for choice in properties["temperature"]["anyOf"] if choice["type"] == "number"]
    assert (temperature["minimum"], temperature["maximum"]) == (0.0, 2.0)
    [top_k] = [choice for choice in properties["top_k"]["anyOf"] if choice["type"] == "integer"]
    assert top_k["minimum"] == -1


@pytest.mark.parametrize(("method", "path"), OPERATIONS)
def test_made_up_requests_find_nothing_that_the_document_does_not_say(
    stack: Stack, described: dict[str, Any], method: str, path: str
):
    operation = schemathesis.openapi.from_dict(described)[path][method]
    wanted, unwanted = (operation.as_strategy(generation_mode=mode) for mode in schemathesis.GenerationMode)

    @settings(max_examples=12, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
    @given(st.one_of(wanted, unwanted))
    def ask(case: schemathesis.Case) -> None:
        response = case.call(base_url=stack.url, timeout=20)
        case.validate_response(response, checks=CHECKS)

    ask()


@pytest.mark.parametrize(
    ("path", "model", "body"),
    [
        ("/v1/chat/completions", "ChatCompletionChunk", {"messages": HELLO, "logprobs": True}),
        ("/v1/completions", "Completion", {"prompt": "x", "logprobs": 1}),
        ("/v1/responses", "ResponseEvent", {"input": "x"}),
    ],
)
def test_the_data_of_every_event_has_the_documented_shape(
    stack: Stack, described: dict[str, Any], path: str, model: str, body: dict[str, Any]
):
    schema = {"$ref": f"#/components/schemas/{model}", "components": described["components"]}
    validator = validator_for(schema)
    with stack.http.stream("POST", path, json={**body, "stream": True}) as answer:
        data = [line.removeprefix("data: ") for line in answer.iter_lines() if line.startswith("data: ")]
    events = [json.loads(each) for each in data if each != "[DONE]"]
    assert len(events) > 5
    for event in events:
        validator.validate(event)
