"""Bodies that travel between services, under one schema version.

Gateway -> vision encoder: raw image bytes; back: NDJSON `EncodeEvent`s. Gateway -> text engine: `GenerateRequest`;
back: NDJSON `GenerateEvent`s. Unknown fields are ignored, so that a newer service can talk to an older one.
"""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, PositiveInt, model_validator

SCHEMA_VERSION = 1

# Header names shared by all services.
REQUEST_ID_HEADER = "X-Request-Id"
IMAGE_KEY_HEADER = "X-Image-Key"
DEADLINE_HEADER = "X-Deadline-S"  # seconds the caller will still wait

NDJSON = "application/x-ndjson"

Stage = Literal["fetch", "decode", "preprocess", "encode", "transfer", "queue", "prefill", "decode_tokens"]
# "tool_calls" is the gateway's, which finds the calls in the text.
FinishReason = Literal["stop", "length", "abort", "tool_calls"]
ToolFormat = Literal["hermes", "llama3_json", "mistral"]
Attention = Literal["causal", "bidirectional"]


class WireModel(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)


class WireError(WireModel):
    """An error inside an event stream, where the HTTP status is already spent."""

    status: int
    message: str
    type: str
    code: str
    param: str | None = None


# --- vision encoder -------------------------------------------------------------------------------------------------


class ImageMetadata(WireModel):
    """How one image stands in a prompt. The encoder announces it, so that a text engine knows no vision family.

    num_tokens      rows of the embedding
    width, height   of the upright picture
    layout          what takes the place of the image's mark, in order: a number is that many positions, filled by the
                    next rows of the embedding; a string is text, special tokens' spellings counting, between them.
                    Empty: the rows alone
    grid            (frames, lines, columns) whose cells the rows are, for rotary positions in three dimensions; None:
                    the rows are counted like text
    attention       "bidirectional": each row of a run sees the whole run
    """

    num_tokens: PositiveInt
    width: PositiveInt
    height: PositiveInt
    layout: tuple[str | PositiveInt, ...] = ()
    grid: tuple[PositiveInt, PositiveInt, PositiveInt] | None = None
    attention: Attention = "causal"

    @model_validator(mode="after")
    def _adds_up(self) -> Self:
        num_laid_out = sum(piece for piece in self.pieces if isinstance(piece, int))
        if num_laid_out != self.num_tokens:
            raise ValueError(f"the layout has room for {num_laid_out} rows; num_tokens is {self.num_tokens}")
        if self.grid is not None and math.prod(self.grid) != self.num_tokens:
            raise ValueError(f"a grid of {self.grid} has not {self.num_tokens} cells")
        return self

    @property
    def pieces(self) -> tuple[str | int, ...]:
        return self.layout or (self.num_tokens,)


class ImageRef(ImageMetadata):
    """Stands for one image from here on: where its embedding is, and how it stands in the prompt.

    encoder_url   base URL of the encoder that admitted the image and can serve `GET /v1/embeddings/{image_key}`;
                  None if the embedding was found in the cache and no encoder was asked
    """

    image_key: str = Field(pattern=r"^[0-9a-f]{64}$")
    encoder_url: str | None = None

    @classmethod
    def of(cls, metadata: ImageMetadata, *, image_key: str, encoder_url: str | None = None) -> Self:
        return cls(image_key=image_key, encoder_url=encoder_url, **metadata.model_dump())


class Admitted(WireModel):
    """First line of `/v1/encode`: the header was read, limits hold, the embedding will come."""

    event: Literal["admitted"] = "admitted"
    image: ImageRef


class Encoded(WireModel):
    """Second line: the embedding can be fetched (`stored`: also from Redis). Seconds per stage."""

    event: Literal["encoded"] = "encoded"
    stored: bool
    timings: dict[str, float] = {}


class EncodeFailedEvent(WireModel):
    event: Literal["failed"] = "failed"
    error: WireError


EncodeEvent = Annotated[Admitted | Encoded | EncodeFailedEvent, Field(discriminator="event")]


class ImageSize(WireModel):
    """Of an upright picture, in pixels."""

    width: int = Field(gt=0, lt=2**31, strict=True)
    height: int = Field(gt=0, lt=2**31, strict=True)


class DescribeRequest(WireModel):
    images: list[ImageSize]


class DescribeResponse(WireModel):
    """How pictures of these sizes would stand in a prompt, in the order of the request."""

    images: list[ImageMetadata]


class EncoderInfo(WireModel):
    """What `/v1/info` of a vision encoder publishes.

    fingerprint   hex digest over weights, processor config, feature layer and strategy, background, dtype
    hidden_size   width of an embedding row: the text model's hidden size
    """

    schema_version: int = SCHEMA_VERSION
    model: str
    fingerprint: str
    dtype: str
    hidden_size: int
    max_image_bytes: int
    max_image_pixels: int
    supported_formats: list[str]


# --- text engine ----------------------------------------------------------------------------------------------------


class TextPart(WireModel):
    type: Literal["text"] = "text"
    text: str


class ImagePart(WireModel):
    type: Literal["image"] = "image"
    image: ImageRef


ContentPart = Annotated[TextPart | ImagePart, Field(discriminator="type")]


class ChatMessage(WireModel):
    """One message with image references in place of images, parts in the client's order."""

    role: str
    content: list[ContentPart] = []
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None


class GenerateRequest(WireModel):
    """Exactly one of `messages` (rendered by the chat template) and `prompt` (text or token ids) is set.

    sampling   fields of shared.sampling.SamplingParams; absent ones take their defaults
    priority   lower runs first, a level being worth 1,000 arrivals; equal priorities run in order of arrival
    """

    schema_version: int = SCHEMA_VERSION
    request_id: str
    messages: list[ChatMessage] | None = None
    prompt: str | list[int] | None = None
    tools: list[dict[str, Any]] | None = None
    sampling: dict[str, Any] = {}
    priority: int = 0
    cache_salt: str = ""


class AbortRequest(WireModel):
    request_id: str


class TokenLogprob(WireModel):
    """One token's log-probability; `bytes` is its UTF-8, so that split characters can be put together again."""

    token_id: int
    token: str
    logprob: float
    bytes: list[int]
    top: list[TokenLogprob] = []


class Started(WireModel):
    """First line of `/v1/generate`: the request was accepted and tokenized."""

    event: Literal["started"] = "started"
    num_prompt_tokens: int
    num_image_tokens: int


class Tokens(WireModel):
    """New text of one choice. `finish_reason` is set on the last event of that choice and only there.

    stop_reason   the stop string or stop token id that ended the choice, None for end-of-sequence and length
    """

    event: Literal["tokens"] = "tokens"
    index: int = 0
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprob] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None


class Finished(WireModel):
    """Last line of a good stream: what was used, and seconds per stage (queue, transfer, prefill, decode_tokens)."""

    event: Literal["finished"] = "finished"
    num_prompt_tokens: int
    num_image_tokens: int
    num_cached_tokens: int
    num_generated_tokens: int
    timings: dict[str, float] = {}


class Failed(WireModel):
    """Last line of a bad stream."""

    event: Literal["error"] = "error"
    error: WireError


GenerateEvent = Annotated[Started | Tokens | Finished | Failed, Field(discriminator="event")]


class TokenizeRequest(WireModel):
    messages: list[ChatMessage] | None = None
    prompt: str | None = None
    tools: list[dict[str, Any]] | None = None


class TokenizeResponse(WireModel):
    count: int
    max_model_len: int
    tokens: list[int]


class ModelInfo(WireModel):
    """What `/v1/model` of a text engine publishes.

    tool_format   how the model writes a call of a tool
    """

    schema_version: int = SCHEMA_VERSION
    id: str
    max_model_len: int
    vocab_size: int
    hidden_size: int
    dtype: str
    num_kv_blocks: int
    block_size: int
    supports_images: bool
    tool_format: ToolFormat = "hermes"
    created: int
