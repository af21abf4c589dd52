"""What every model of a request's body has in common."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, GetJsonSchemaHandler, JsonValue, model_validator
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticCustomError

MAX_DEPTH = 100  # of JSON that travels on as it is: parsers further on end at 128 levels
Int64 = Annotated[int, Field(ge=-(2**63), lt=2**63)]
JsonObject = dict[str, JsonValue]


class Body(BaseModel):
    # strict: "5", true and 1.5 are not whole numbers, whatever Python thinks.
    model_config = ConfigDict(extra="ignore", frozen=True, strict=True)

    @model_validator(mode="before")
    @classmethod
    def _null_is_absent(cls, body: object) -> object:
        """OpenAI lets every optional field be null."""
        return {name: value for name, value in body.items() if value is not None} if isinstance(body, dict) else body

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """The OpenAPI document says so as well."""
        schema = handler(core_schema)
        described = handler.resolve_ref_schema(schema)
        properties = described.get("properties", {})
        for name in properties.keys() - set(described.get("required", ())):
            if {"type": "null"} not in properties[name].get("anyOf", ()):
                properties[name] = {"anyOf": [properties[name], {"type": "null"}]}
        return schema


def shallow(value: object) -> object:
    """A validator: the value, unless it is nested deeper than any JSON that means something."""
    level, num_levels = [value], 0
    while level := [item for item in level if isinstance(item, dict | list)]:
        level = [child for item in level for child in (item.values() if isinstance(item, dict) else item)]
        num_levels += 1
        if num_levels > MAX_DEPTH:
            raise PydanticCustomError("depth", f"is nested more than {MAX_DEPTH} levels deep")
    return value
