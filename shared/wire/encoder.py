"""What a vision encoder takes and answers.

`/v1/encode`: an image's bytes; back: NDJSON `EncodeEvent`s. `/v1/describe`: how images of some sizes would stand in a
prompt, without one. `/v1/info`: `EncoderInfo`.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from shared.wire.common import SCHEMA_VERSION, StageSpan, WireError, WireModel
from shared.wire.images import Detail, ImageMetadata, ImageRef, RequestedDetail

IMAGE_KEY_HEADER = "X-Image-Key"
IMAGE_NUMBER_HEADER = "X-Image-Number"  # which of its request's pictures this is: earlier ones are wanted sooner
DETAIL_HEADER = "X-Image-Detail"
SAFETENSORS = "application/x-safetensors"  # the body of `/v1/encode` where it is the embedding itself
EMBEDDINGS_REFUSED = (
    "image_embeds are not accepted here; send the picture itself, or have the operator start the vision encoders with "
    "DIPTYCH_ENCODER_ACCEPT_EMBEDDINGS=true"
)


class Admitted(WireModel):
    """First line of `/v1/encode`: the header was read, limits hold, the embedding will come."""

    event: Literal["admitted"] = "admitted"
    image: ImageRef


class Encoded(WireModel):
    """Second line: the embedding can be fetched (`stored`: also from Redis). Seconds per stage, and when each was."""

    event: Literal["encoded"] = "encoded"
    stored: bool
    timings: dict[str, float] = {}
    spans: list[StageSpan] = []


class EncodeFailedEvent(WireModel):
    event: Literal["failed"] = "failed"
    error: WireError


EncodeEvent = Annotated[Admitted | Encoded | EncodeFailedEvent, Field(discriminator="event")]


class ImageSize(WireModel):
    """Of an upright picture, in pixels, and how it is to be read."""

    width: int = Field(gt=0, lt=2**31, strict=True)
    height: int = Field(gt=0, lt=2**31, strict=True)
    detail: RequestedDetail = "auto"


class DescribeRequest(WireModel):
    images: list[ImageSize]


class DescribeResponse(WireModel):
    """How pictures of these sizes would stand in a prompt, in the order of the request."""

    images: list[ImageMetadata]


class EncoderInfo(WireModel):
    """What `/v1/info` of a vision encoder publishes.

    fingerprint   hex digest over weights, processor config, feature layer and strategy, background, dtype
    low_detail_fingerprint   the same for pictures read in low detail; None: the model has one way to read them
    reads_several_in_low_detail   what the detail "auto" means where a conversation has more than one picture
    accepts_embeddings   embeddings may be sent in place of pictures
    hidden_size   the text model's hidden size
    num_row_parts   as many such vectors side by side make an embedding row: more than one where several of the text
                    model's layers are given a picture
    """

    schema_version: int = SCHEMA_VERSION
    model: str
    fingerprint: str
    low_detail_fingerprint: str | None = None
    reads_several_in_low_detail: bool = False
    accepts_embeddings: bool = False
    dtype: str
    hidden_size: int
    num_row_parts: int = 1
    max_image_bytes: int
    max_image_pixels: int
    supported_formats: list[str]

    def detail_of(self, requested: RequestedDetail, num_images: int) -> Detail:
        """How one of a conversation's pictures is read."""
        is_low = requested == "low" or (requested == "auto" and num_images > 1 and self.reads_several_in_low_detail)
        return "low" if is_low and self.low_detail_fingerprint is not None else "high"

    def fingerprint_of(self, detail: Detail) -> str:
        """What the keys of pictures read so are made with."""
        return self.low_detail_fingerprint or self.fingerprint if detail == "low" else self.fingerprint
