"""Reads a JSON body within the size limit and turns it into one of the schema's models.

A large body is read on another thread. That alone is no help while one call of a library holds the interpreter's lock,
and parsing is such a call: so pictures are taken out first, and what is left may only hold so many values.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Any, Final, TypeVar

import orjson
from fastapi import Request
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails
from starlette.requests import ClientDisconnect

from services.gateway.cut_urls import cut_out, put_back
from services.gateway.schema import clean_location, refuse_unsupported
from shared.errors import InvalidRequest, PayloadTooLarge, RequestAborted
from shared.http_errors import from_validation_errors

Model = TypeVar("Model", bound=BaseModel)
INLINE_BYTES: Final = 2**18  # of a body; parsing more, if it is dense, would hold up an event loop for milliseconds
# More than fills any context, and parsed within a tenth of a second. Those within texts count too: nothing is known of
# the body yet, and a text with so many is as hopeless.
MAX_BRACKETS: Final = 250_000  # that begin an object or a list
MAX_COMMAS: Final = 2_000_000


async def read_json(request: Request, model: type[Model], max_bytes: int, *, if_empty: Model | None = None) -> Model:
    """Raises InvalidRequest, UnsupportedFeature, PayloadTooLarge; RequestAborted if the client leaves meanwhile.

    if_empty   what is meant where nothing is sent; None: something has to be
    """
    content_type = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    # Browsers send other types across origins without asking; JSON they must ask for first.
    if content_type != "application/json" and not content_type.endswith("+json"):
        raise InvalidRequest(f"the content type is {content_type[:60]!r}; send application/json")
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("identity", ""):
        raise InvalidRequest(f"the content encoding is {encoding[:60]!r}; send the body as it is")
    body = bytearray()
    async for chunk in limited_stream(request, max_bytes):
        body += chunk
    if not body and if_empty is not None:
        return if_empty
    if len(body) <= INLINE_BYTES:
        return parse(body, model)
    return await asyncio.to_thread(parse_large, body, model)


def parse_large(raw: bytearray, model: type[Model]) -> Model:
    """`parse`, for a body that is not changed afterwards: its large pictures stay in it."""
    rest, cut = cut_out(raw)
    _check_density(rest)
    body = _loaded(rest)
    try:
        put_back(body, cut)
    except orjson.JSONDecodeError as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}") from None
    refuse_unsupported(body)
    return validate(body, model)


def _check_density(raw: bytes) -> None:
    """Raises PayloadTooLarge for a body of more values than can mean anything."""
    num_brackets, num_commas = raw.count(b"{") + raw.count(b"["), raw.count(b",")
    if num_brackets > MAX_BRACKETS:
        raise PayloadTooLarge(f"the body has {num_brackets} opening brackets; at most {MAX_BRACKETS}")
    if num_commas > MAX_COMMAS:
        raise PayloadTooLarge(f"the body has {num_commas} commas; at most {MAX_COMMAS}")


def parse(raw: bytes | bytearray, model: type[Model]) -> Model:
    body = _loaded(raw)
    refuse_unsupported(body)
    return validate(body, model)


def _loaded(raw: bytes | bytearray) -> dict[str, Any]:
    try:
        # orjson refuses what JSON does not have: NaN, Infinity, lone surrogates, nesting without end.
        body = orjson.loads(raw)
    except json.JSONDecodeError as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}") from None
    if not isinstance(body, dict):
        raise InvalidRequest("the body must be a JSON object")
    return body


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
