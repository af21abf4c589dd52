"""The OpenAPI document: made of the routes, the models that requests are checked with, and the error tree.

Bodies are read by hand, for their size limit and their strict JSON, so each route says with `operation` what it takes
and what it answers with.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.responses import Response
from starlette.routing import BaseRoute

from services.gateway import answer_schema as answers
from services.gateway.responses_schema import ResponsesRequest
from services.gateway.schema import ChatRequest, CompletionRequest, Refused, TokenizeBody
from shared.errors import all_errors
from shared.sampling import REAL_RANGES, WHOLE_RANGES

_BODIES: Final = (ChatRequest, CompletionRequest, ResponsesRequest, TokenizeBody)
_ANSWERS: Final = (
    answers.ChatCompletion,
    answers.ChatCompletionChunk,
    answers.Completion,
    answers.ErrorAnswer,
    answers.FileDeleted,
    answers.FileList,
    answers.File,
    answers.Health,
    answers.ModelList,
    answers.Model,
    answers.Readiness,
    answers.ResponseAnswer,
    answers.ResponseEvent,
    answers.TokenCount,
)
_REF: Final = "#/components/schemas/{model}"
_JSON: Final = "application/json"

READING_ERRORS: Final = (400, 401, 404, 429, 500, 503)
UPLOAD_ERRORS: Final = (400, 401, 413, 429, 500, 503)
GENERATION_ERRORS: Final = (400, 401, 404, 413, 429, 500, 502, 503, 504)


def operation(
    summary: str,
    *,
    answer: type[BaseModel] | str,
    stream: type[BaseModel] | None = None,
    body: type[BaseModel] | None = None,
    form: Mapping[str, Any] | None = None,
    query: type[BaseModel] | None = None,
    also: Mapping[int, type[BaseModel]] | None = None,
    errors: Iterable[int] = (),
) -> dict[str, Any]:
    """What FastAPI's decorators take, for a route that answers with `answer`.

    answer   a model, or the media type of an answer that is no JSON
    stream   the data of one event, if the request may ask for a stream
    also     other statuses whose answer is no error
    body     of JSON; form: the schema of a multipart form; query: a model whose fields are the query's parameters
    """
    content = {answer: {}} if isinstance(answer, str) else {_JSON: {"schema": _ref(answer)}}
    if stream is not None:
        content["text/event-stream"] = {"schema": _event(stream)}
    described: dict[str, Any] = {}
    if body is not None:
        described["requestBody"] = {"required": True, "content": {_JSON: {"schema": _ref(body)}}}
    if form is not None:
        described["requestBody"] = {"required": True, "content": {"multipart/form-data": {"schema": dict(form)}}}
    if query is not None:
        described["parameters"] = _parameters(query)
    responses = {200: {"description": "The answer.", "content": content}, **_errors(errors)}
    for status, model in (also or {}).items():
        responses[status] = {"description": "The answer.", "content": {_JSON: {"schema": _ref(model)}}}
    return {
        "summary": summary,
        "response_class": Response,  # says nothing of content, which is said here
        "responses": responses,
        "openapi_extra": described,
    }


def document(routes: Sequence[BaseRoute], version: str) -> dict[str, Any]:
    described = get_openapi(
        title="Diptych",
        version=version,
        description="Split serving of vision-language models behind an OpenAI-style API. docs/api.md has the examples.",
        routes=routes,
    )
    for operations in described["paths"].values():
        for each in operations.values():
            each["responses"].pop("422", None)  # FastAPI's own answer to a bad parameter; ours take any string
    models = [(model, "validation") for model in _BODIES] + [(model, "serialization") for model in _ANSWERS]
    _, schemas = models_json_schema(models, ref_template=_REF)  # type: ignore[arg-type]
    for body in _BODIES:
        _tell_ranges(schemas["$defs"][body.__name__]["properties"])
    described["components"] = {
        "schemas": {name: schema for name, schema in schemas["$defs"].items() if name != Refused.__name__},
        "securitySchemes": {"key": {"type": "http", "scheme": "bearer", "description": "needed if keys are set"}},
    }
    described["security"] = [{}, {"key": []}]
    return described


def _tell_ranges(properties: dict[str, Any]) -> None:
    """Ranges of sampling fields are checked by `SamplingParams`, so the models of the bodies do not know them."""
    ranges: dict[str, tuple[float, float | None]] = {**WHOLE_RANGES, **REAL_RANGES}
    for name in properties.keys() & ranges.keys():
        least, most = ranges[name]
        for choice in properties[name]["anyOf"]:
            if choice["type"] in ("integer", "number"):
                choice["minimum"] = least
                if most is not None:
                    choice["maximum"] = most


def _ref(model: type[BaseModel]) -> dict[str, Any]:
    return {"$ref": _REF.format(model=model.__name__)}


def _event(data: type[BaseModel]) -> dict[str, Any]:
    text = {"type": "string", "contentMediaType": _JSON, "contentSchema": _ref(data)}
    return {
        "type": "object",
        "description": "Each event of the stream.",
        "properties": {"event": {"type": "string"}, "data": text},
        "required": ["data"],
    }


def _parameters(query: type[BaseModel]) -> list[dict[str, Any]]:
    properties = query.model_json_schema()["properties"]
    return [{"name": name, "in": "query", "required": False, "schema": schema} for name, schema in properties.items()]


def _errors(statuses: Iterable[int]) -> dict[int, dict[str, Any]]:
    codes: dict[int, dict[str, None]] = defaultdict(dict)  # as an ordered set: a narrower error may share its code
    for error in all_errors():
        codes[error.status][error.code] = None
    content = {_JSON: {"schema": _ref(answers.ErrorAnswer)}}
    return {status: {"description": f"code: {', '.join(codes[status])}", "content": content} for status in statuses}
