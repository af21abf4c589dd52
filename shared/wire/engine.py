"""What a text engine takes from gateways and answers.

`/v1/generate`: a `GenerateRequest`; back: NDJSON `GenerateEvent`s. `/v1/abort` ends one early; `/v1/tokenize` counts
tokens. `/v1/model`: `ModelInfo`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, get_args

from pydantic import Field, field_validator

from shared.reasoning import ReasoningFormat
from shared.wire.common import SCHEMA_VERSION, StageSpan, WireError, WireModel
from shared.wire.images import ImageRef

QUEUE_OPENS_HEADER = "X-Room-In-S"  # seconds until the engine would queue another such request; 0: at once
# "tool_calls" is the gateway's, which finds the calls in the text.
FinishReason = Literal["stop", "length", "abort", "tool_calls"]
# Under vLLM's names.
ToolFormat = Literal[
    "hermes",
    "llama3_json",
    "mistral",
    "qwen3_coder",
    "pythonic",
    "deepseek_v3",
    "deepseek_v31",
    "glm45",
    "kimi_k2",
]


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
    only_echoes   the answer, one token, is for nobody: the prompt may fill the whole context
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
    only_echoes: bool = False
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

    @field_validator("tool_format", mode="before")
    @classmethod
    def _known_format(cls, name: object) -> object:
        """A newer engine's format that is not known here yet is the usual one: its calls remain text."""
        return name if name in get_args(ToolFormat) else "hermes"

    @field_validator("reasoning_format", mode="before")
    @classmethod
    def _known_reasoning(cls, name: object) -> object:
        return name if name in get_args(ReasoningFormat) else None

    def serves(self, name: str) -> bool:
        """Whether requests may give this name."""
        return name == self.id or any(adapter.name == name for adapter in self.adapters)
