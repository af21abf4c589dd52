"""Reads a JSON body within the size limit and turns it into one of the schema's models."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from typing import Any, TypeVar

import orjson
from fastapi import Request
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails
from starlette.requests import ClientDisconnect

from services.gateway.schema import clean_location, refuse_unsupported
from shared.errors import InvalidRequest, PayloadTooLarge, RequestAborted
from shared.http_errors import from_validation_errors

Model = TypeVar("Model", bound=BaseModel)


async def read_json(request: Request, model: type[Model], max_bytes: int, *, if_empty: Model | None = None) -> Model:
    """Raises InvalidRequest, UnsupportedFeature, PayloadTooLarge; RequestAborted if the client leaves meanwhile.

    if_empty   what is meant where nothing is sent; None: something has to be
    """
    content_type = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    # Browsers send other types across origins without asking; JSON they must ask for first.
    if content_type != "application/json" and not content_type.endswith("+json"):
        raise InvalidRequest(f"the content type is {content_type[:60]!r}; send application/json")
    body = bytearray()
    async for chunk in limited_stream(request, max_bytes):
        body += chunk
    if not body and if_empty is not None:
        return if_empty
    return parse(bytes(body), model)


def parse(raw: bytes, model: type[Model]) -> Model:
    try:
        # orjson refuses what JSON does not have: NaN, Infinity, lone surrogates, nesting without end.
        body = orjson.loads(raw)
    except json.JSONDecodeError as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}") from None
    if not isinstance(body, dict):
        raise InvalidRequest("the body must be a JSON object")
    refuse_unsupported(body)
    return validate(body, model)


def validate(body: dict[str, Any], model: type[Model]) -> Model:
    try:
        return model.model_validate(body)
    except ValidationError as error:
        raise from_validation_errors([_readable(details) for details in error.errors()]) from None


async def limited_stream(request: Request, max_bytes: int) -> AsyncGenerator[bytes]:
    """The body piece by piece. Raises PayloadTooLarge as soon as it is known, RequestAborted if the client leaves.

    The HTTP server throws away what is left of such a body, piece by piece: the client can finish sending and then
    finds the answer instead of a broken connection.
    """
    too_large = PayloadTooLarge(f"the body is too large; at most {max_bytes} bytes")
    declared = request.headers.get("content-length", "")
    if declared.isascii() and declared.isdigit() and int(declared) > max_bytes:
        raise too_large
    num_bytes = 0
    try:
        async for chunk in request.stream():
            num_bytes += len(chunk)
            if num_bytes > max_bytes:
                raise too_large
            yield chunk
    except ClientDisconnect as error:
        raise RequestAborted("the client went away while sending the body") from error


def _readable(details: ErrorDetails) -> ErrorDetails:
    """Without the names of our classes, with the path as the client wrote it."""
    if details["type"] in ("model_type", "model_attributes_type", "dict_type"):
        details["msg"] = "must be a JSON object"
    elif details["type"] == "missing":
        details["msg"] = "this field is required"
    details["loc"] = clean_location(details["loc"])
    return details
