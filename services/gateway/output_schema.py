"""The fields of a body that say what its answer must look like: formats, vLLM's extras, tools."""

from __future__ import annotations

from typing import Annotated, Literal, Self

import orjson
from pydantic import BeforeValidator, ConfigDict, Discriminator, FailFast, Field, Tag, model_validator
from pydantic_core import PydanticCustomError

from services.gateway.base_schema import Body, JsonObject, shallow


def _schema(value: object) -> object:
    """As vLLM, which takes text as well."""
    if isinstance(value, str):
        try:
            value = orjson.loads(value)
        except orjson.JSONDecodeError as error:
            raise PydanticCustomError("schema", "is text, but not JSON: {reason}", {"reason": str(error)}) from None
    return shallow(value)


SchemaOrText = Annotated[JsonObject | None, BeforeValidator(_schema, json_schema_input_type=JsonObject | str | None)]


class JsonSchemaFormat(Body):
    schema_: Annotated[JsonObject, BeforeValidator(shallow)] = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None

    @model_validator(mode="after")
    def _has_its_schema(self) -> Self:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise PydanticCustomError("response_format", "json_schema is given if and only if type is 'json_schema'")
        return self


class StructuredOutputs(Body):
    """vLLM's: exactly one of these. An unknown field is refused: it may be a misspelt one of them."""

    model_config = ConfigDict(extra="forbid")

    json_: SchemaOrText = Field(default=None, alias="json")
    json_object: bool = False
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None

    @model_validator(mode="after")
    def _asks_for_something(self) -> Self:
        if not self.json_object and self.model_fields_set <= {"json_object"}:
            raise PydanticCustomError("structured_outputs", "give one of json, json_object, regex, choice and grammar")
        return self


class ToolFunction(Body):
    """What else a client says of a function is for the chat template, so it is kept."""

    model_config = ConfigDict(extra="allow")

    name: str = Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")
    parameters: JsonObject | None = None
    strict: bool = False


class Tool(Body):
    model_config = ConfigDict(extra="allow")

    type: Literal["function"]
    function: ToolFunction


class FunctionName(Body):
    name: str


class NamedTool(Body):
    type: Literal["function"]
    function: FunctionName


def _choice_tag(choice: object) -> str:
    return "<named>" if isinstance(choice, dict | NamedTool) else "<mode>"


ToolChoice = Annotated[
    Annotated[Literal["auto", "none", "required"], Tag("<mode>")] | Annotated[NamedTool, Tag("<named>")],
    Discriminator(_choice_tag),
]
Tools = Annotated[list[Tool], FailFast(), Field(max_length=128), BeforeValidator(shallow)]
