"""Bodies that travel between services, under one schema version.

Gateway -> vision encoder: raw image bytes; back: NDJSON `EncodeEvent`s. Gateway -> text engine: `GenerateRequest`;
back: NDJSON `GenerateEvent`s. Unknown fields are ignored, so that a newer service can talk to an older one.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

SCHEMA_VERSION = 1

# Header names shared by all services.
REQUEST_ID_HEADER = "X-Request-Id"
IMAGE_KEY_HEADER = "X-Image-Key"
DEADLINE_HEADER = "X-Deadline-S"  # seconds the caller will still wait

NDJSON = "application/x-ndjson"

Stage = Literal["fetch", "decode", "preprocess", "encode", "transfer", "queue", "prefill", "decode_tokens"]
FinishReason = Literal["stop", "length", "abort"]


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


class ImageRef(WireModel):
    """Stands for one image from here on: where its embedding is, and how many positions it takes in the prompt.

    encoder_url   base URL of the encoder that admitted the image and can serve `GET /v1/embeddings/{image_key}`;
                  None if the embedding was found in the cache and no encoder was asked
    """

    image_key: str = Field(pattern=r"^[0-9a-f]{64}$")
    num_tokens: int = Field(gt=0)
    width: int = Field(gt=0)
    height: int = Field(gt=0)
    encoder_url: str | None = None


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
    priority   lower runs first; equal priorities run in order of arrival
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
    """What `/v1/model` of a text engine publishes."""

    schema_version: int = SCHEMA_VERSION
    id: str
    max_model_len: int
    vocab_size: int
    hidden_size: int
    dtype: str
    num_kv_blocks: int
    block_size: int
    supports_images: bool
    created: int
