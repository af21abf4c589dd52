"""What every contract has: its version, the base of its bodies, errors and times inside event streams.

SCHEMA_VERSION counts the changes that ignoring unknown fields does not cover: a field that must be understood, one that
went away or means something else, another event. Panels publish theirs; a gateway uses only those that speak its own.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict

SCHEMA_VERSION = 1
REQUEST_ID_HEADER = "X-Request-Id"
DEADLINE_HEADER = "X-Deadline-S"  # seconds the caller will still wait
NDJSON = "application/x-ndjson"
Stage = Literal["fetch", "decode", "preprocess", "encode", "transfer", "queue", "prefill", "decode_tokens"]


class WireModel(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)


class Spoken(WireModel):
    """The part of `EncoderInfo` and `ModelInfo` that every version has: what cannot read the rest can read this."""

    schema_version: int = SCHEMA_VERSION


class WireError(WireModel):
    """An error inside an event stream, where the HTTP status is already spent.

    retry_after_s   when the same request may be repeated; None: unknown, or the service is older than the field
    """

    status: int
    message: str
    type: str
    code: str
    param: str | None = None
    retry_after_s: float | None = None


class StageSpan(WireModel):
    """When a service worked on a stage, in seconds since the request reached it.

    image_key   of the picture that it was about; None: all that was asked
    source      of a transferred embedding: "redis" or "vision_encoder"
    """

    stage: str
    start_s: float
    duration_s: float
    image_key: str | None = None
    source: str | None = None
