"""Bodies that travel between services, under one schema version.

Gateway -> vision encoder: raw image bytes; back: NDJSON `EncodeEvent`s. Gateway -> text engine: `GenerateRequest`;
back: NDJSON `GenerateEvent`s. Unknown fields are ignored, so that a newer service can talk to an older one.

SCHEMA_VERSION counts the changes that this does not cover: a field that must be understood, one that went away or means
something else, another event. Panels publish theirs; a gateway uses only those that speak its own.
"""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, PositiveInt, model_validator

from shared.reasoning import ReasoningFormat

SCHEMA_VERSION = 1

# Header names shared by all services.
REQUEST_ID_HEADER = "X-Request-Id"
IMAGE_KEY_HEADER = "X-Image-Key"
DEADLINE_HEADER = "X-Deadline-S"  # seconds the caller will still wait
DETAIL_HEADER = "X-Image-Detail"
ROOM_HEADER = "X-Room-In-S"  # seconds until the text engine would queue another such request; 0: at once

NDJSON = "application/x-ndjson"
EMBEDDINGS_REFUSED = (
    "image_embeds are not accepted here; send the picture itself, or have the operator start the vision encoders with "
    "DIPTYCH_ENCODER_ACCEPT_EMBEDDINGS=true"
)
SAFETENSORS = "application/x-safetensors"  # the body of `/v1/encode` where it is the embedding itself

Stage = Literal["fetch", "decode", "preprocess", "encode", "transfer", "queue", "prefill", "decode_tokens"]
# "tool_calls" is the gateway's, which finds the calls in the text.
FinishReason = Literal["stop", "length", "abort", "tool_calls"]
ToolFormat = Literal["hermes", "llama3_json", "mistral"]
Attention = Literal["causal", "bidirectional"]
Detail = Literal["low", "high"]  # how a picture is read: as cheaply as the model can, or as it does by default
RequestedDetail = Literal["low", "high", "auto"]


# Ten times what the largest admitted picture has. Whatever claims more is damaged, and would fill a prompt's memory.
MAX_IMAGE_TOKENS = 1 << 20


class WireModel(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)


class Spoken(WireModel):
    """The part of `EncoderInfo` and `ModelInfo` that every version has: whoever cannot read the rest can read this."""

    schema_version: int = SCHEMA_VERSION


class WireError(WireModel):
    """An error inside an event stream, where the HTTP status is already spent.

    retry_after_s   when the same request may be repeated; None: nobody knows, or the service is older than the field
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

    num_tokens: int = Field(gt=0, le=MAX_IMAGE_TOKENS)
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
    hidden_size   width of an embedding row: the text model's hidden size
    """

    schema_version: int = SCHEMA_VERSION
    model: str
    fingerprint: str
    low_detail_fingerprint: str | None = None
    reads_several_in_low_detail: bool = False
    accepts_embeddings: bool = False
    dtype: str
    hidden_size: int
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


# --- text engine ----------------------------------------------------------------------------------------------------


class TextPart(WireModel):
    type: Literal["text"] = "text"
    text: str


class ImagePart(WireModel):
    type: Literal["image"] = "image"
    image: ImageRef


ContentPart = Annotated[TextPart | ImagePart, Field(discriminator="type")]


class ChatMessage(WireModel):
    """One message with image references in place of images, parts in the client's order.

    reasoning_content   what the model thought before this answer of an earlier turn, for templates that show it
    """

    role: str
    content: list[ContentPart] = []
    reasoning_content: str | None = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None


class GenerateRequest(WireModel):
    """Exactly one of `messages` (rendered by the chat template) and `prompt` (text or token ids) is set.

    sampling   fields of shared.sampling.SamplingParams; absent ones take their defaults
    echo       whether to say the prompt's text with its acceptance
    priority   lower runs first, a level being worth 1,000 arrivals; equal priorities run in order of arrival
    template_kwargs   further variables of the chat template
    adapter    name of the LoRA adapter that answers; None: the model itself
    cuts_to_context   a `max_tokens` beyond the context is cut to what is left instead of refused: nobody asked for it
    """

    schema_version: int = SCHEMA_VERSION
    request_id: str
    messages: list[ChatMessage] | None = None
    prompt: str | list[int] | None = None
    tools: list[dict[str, Any]] | None = None
    template_kwargs: dict[str, Any] = {}
    sampling: dict[str, Any] = {}
    priority: int = 0
    cache_salt: str = ""
    adapter: str | None = None
    echo: bool = False
    cuts_to_context: bool = False


class AbortRequest(WireModel):
    request_id: str


class TokenLogprob(WireModel):
    """One token's log-probability; `bytes` is its UTF-8, so that split characters can be put together again."""

    token_id: int
    token: str
    logprob: float
    bytes: list[int]
    top: list[TokenLogprob] = []


class PromptToken(WireModel):
    """One token of a prompt, given those before it.

    logprob, rank   None for the first token, which nothing stands before, and for positions of images; rank 1 is the
                    likeliest token
    """

    token_id: int
    token: str
    bytes: list[int]
    logprob: float | None = None
    rank: int | None = None
    top: list[TokenLogprob] = []


class Started(WireModel):
    """First line of `/v1/generate`: the request was accepted and tokenized.

    prompt_text         if it was asked for by `echo`
    is_reasoning_open   the prompt has opened the model's reasoning, so that the answer only closes it
    """

    event: Literal["started"] = "started"
    num_prompt_tokens: int
    num_image_tokens: int
    prompt_text: str | None = None
    is_reasoning_open: bool = False


class Tokens(WireModel):
    """New text of one choice. `finish_reason` is set on the last event of that choice and only there.

    stop_reason   the stop string or stop token id that ended the choice, None for end-of-sequence and length
    prompt_tokens   the prompt's next ones, if their log-probabilities were asked for: a portion an event, before choice
                    0's first text
    """

    event: Literal["tokens"] = "tokens"
    index: int = 0
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprob] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    prompt_tokens: list[PromptToken] | None = None


class Finished(WireModel):
    """Last line of a good stream: what was used, and seconds per stage (queue, transfer, prefill, decode_tokens).

    spans               when each stage was, `tokenize` included; `transfer` once per picture
    embedding_sources   image key -> "prefix_cache", "text_engine", "redis" or "vision_encoder"
    """

    event: Literal["finished"] = "finished"
    num_prompt_tokens: int
    num_image_tokens: int
    num_cached_tokens: int
    num_generated_tokens: int
    timings: dict[str, float] = {}
    spans: list[StageSpan] = []
    embedding_sources: dict[str, str] = {}


class Failed(WireModel):
    """Last line of a bad stream."""

    event: Literal["error"] = "error"
    error: WireError


GenerateEvent = Annotated[Started | Tokens | Finished | Failed, Field(discriminator="event")]


class CacheState(WireModel):
    """The KV cache of one text engine.

    state       "falling asleep": running answers are finished first; "asleep": its memory is given back
    num_shared  blocks that several sequences hold
    num_image_blocks   published ones with image positions in them
    num_queried_tokens, num_hit_tokens   of prompts looked up in the prefix cache since the start, and found there
    num_host_slots, num_host_blocks, num_host_hits   room for evicted blocks in host memory, how many are there, and how
                many have come back
    num_idle_embedding_bytes   of images' embeddings kept although no request needs them now
    """

    state: Literal["awake", "falling asleep", "asleep"]
    prefix_caching: bool
    size_bytes: int
    block_size: int
    num_blocks: int
    num_free: int
    num_cached: int
    num_referenced: int
    num_shared: int
    num_image_blocks: int
    num_evictions: int
    num_queried_tokens: int
    num_hit_tokens: int
    hit_ratio: float
    num_host_slots: int = 0
    num_host_blocks: int = 0
    num_host_hits: int = 0
    num_idle_embedding_bytes: int


class SleepRequest(WireModel):
    """mode        wait: running answers are finished first; abort: they end with an error
    timeout_s   the longest wait; when it is over the engine stays awake
    """

    mode: Literal["wait", "abort"] = "wait"
    timeout_s: float = Field(default=60.0, gt=0, le=3600)


class LoadAdapterRequest(WireModel):
    """vLLM's names. lora_path: below the engine's lora_folder; load_inplace: one of this name may be replaced"""

    lora_name: str = Field(min_length=1, max_length=200, pattern=r"^[^\x00-\x1f\x7f]+$")
    lora_path: str = Field(min_length=1, max_length=1000)
    load_inplace: bool = False


class UnloadAdapterRequest(WireModel):
    lora_name: str = Field(min_length=1, max_length=200)


class TokenizeRequest(WireModel):
    messages: list[ChatMessage] | None = None
    prompt: str | None = None
    tools: list[dict[str, Any]] | None = None
    template_kwargs: dict[str, Any] = {}


class TokenizeResponse(WireModel):
    count: int
    max_model_len: int
    tokens: list[int]


class AdapterInfo(WireModel):
    """A LoRA adapter that requests can name. root: the name of its folder; rank: its largest"""

    name: str
    root: str
    rank: int
    created: int


class ModelInfo(WireModel):
    """What `/v1/model` of a text engine publishes.

    implementation     whose code runs the model; transformers' is slower
    tool_format        how the model writes a call of a tool
    reasoning_format   how it marks its reasoning; None: it marks none
    adapters           LoRA adapters, each with its own name beside `id`
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
    implementation: Literal["native", "transformers"] = "native"
    tool_format: ToolFormat = "hermes"
    reasoning_format: ReasoningFormat | None = None
    created: int
    adapters: list[AdapterInfo] = []

    def serves(self, name: str) -> bool:
        """Whether requests may give this name."""
        return name == self.id or any(adapter.name == name for adapter in self.adapters)
