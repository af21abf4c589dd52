"""The shapes of answers, for the OpenAPI document and for the tests that hold answers against it.

Answers are put together as plain JSON, where a token costs microseconds; these models are never built while serving.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict


class Answer(BaseModel):
    # Fields may be added: clients must not choke on one that they do not know.
    model_config = ConfigDict(extra="allow")


class ErrorDetails(Answer):
    message: str
    type: str
    param: str | None
    code: str


class ErrorAnswer(Answer):
    error: ErrorDetails


# --- chat and text completions ----------------------------------------------------------------------------------------


class PromptTokensDetails(Answer):
    cached_tokens: int
    image_tokens: int


class OutputTokensDetails(Answer):
    reasoning_tokens: int


class TimelineSpan(Answer):
    """One stage's time. `where`: "gateway" or a replica; `image`: the picture's number; `source`: of an embedding."""

    stage: str
    start_ms: float
    duration_ms: float
    where: str
    image: int | None = None
    source: Literal["redis", "vision_encoder"] | None = None


class TimelineImage(Answer):
    num_tokens: int
    admitted_by: Literal["gateway", "redis", "vision_encoder", "shared"] | None
    embedding_from: Literal["prefix_cache", "text_engine", "redis", "vision_encoder"] | None


class Timeline(Answer):
    """What ran when, counted from the request's arrival at the gateway."""

    spans: list[TimelineSpan]
    images: list[TimelineImage]
    first_token_ms: float | None
    total_ms: float


class Usage(Answer):
    """timings   seconds per stage"""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: OutputTokensDetails
    timings: dict[str, float]
    timeline: Timeline


class TopLogprob(Answer):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Answer):
    content: list[TokenLogprob]


class CalledFunction(Answer):
    name: str
    arguments: str


class ToolCall(Answer):
    id: str
    type: Literal["function"]
    function: CalledFunction


class ChatMessage(Answer):
    role: Literal["assistant"]
    content: str | None
    refusal: str | None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[ToolCall] | None = None


FinishReason = Literal["stop", "length", "tool_calls"]


class PromptLogprob(Answer):
    """Under the id of a token that could stand there: the prompt's own, or one of the best."""

    logprob: float
    rank: int
    decoded_token: str


class ChatChoice(Answer):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason


class ChatCompletion(Answer):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: list[dict[str, PromptLogprob] | None] | None = None


class ChatDelta(Answer):
    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class ChatChunkChoice(Answer):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason | None


class ChatCompletionChunk(Answer):
    """The data of one event; the last event's is `[DONE]`."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | None = None


class CompletionLogprobs(Answer):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(Answer):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None
    prompt_logprobs: list[dict[str, PromptLogprob] | None] | None = None


class Completion(Answer):
    """Whole, or the data of one event of a stream; the last event's is `[DONE]`."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None


# --- responses --------------------------------------------------------------------------------------------------------


class OutputText(Answer):
    type: Literal["output_text"]
    text: str
    annotations: list[Any]
    logprobs: list[TokenLogprob]


class OutputMessage(Answer):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    status: Literal["in_progress", "completed", "incomplete"]
    content: list[OutputText]


class ReasoningText(Answer):
    type: Literal["reasoning_text"]
    text: str


class OutputReasoning(Answer):
    id: str
    type: Literal["reasoning"]
    status: Literal["in_progress", "completed", "incomplete"]
    summary: list[Any]
    content: list[ReasoningText]


class OutputFunctionCall(Answer):
    id: str
    type: Literal["function_call"]
    status: Literal["in_progress", "completed", "incomplete"]
    call_id: str
    name: str
    arguments: str


class InputTokensDetails(PromptTokensDetails):
    cache_write_tokens: int


class ResponseUsage(Answer):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int
    timings: dict[str, float]
    timeline: Timeline


class ResponseAnswer(Answer):
    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    error: dict[str, Any] | None
    incomplete_details: dict[str, Any] | None
    model: str
    output: list[OutputReasoning | OutputMessage | OutputFunctionCall]
    usage: ResponseUsage | None
    store: Literal[False]


class ResponseEvent(Answer):
    """The data of one event, named by its type; the last event carries the whole response."""

    type: str
    sequence_number: int


# --- models, files, tokens, state -------------------------------------------------------------------------------------


class Model(Answer):
    """root: where its weights are from; parent: of a LoRA adapter, the model that it adapts"""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: str | None
    max_model_len: int
    supports_images: bool


class ModelList(Answer):
    object: Literal["list"]
    data: list[Model]


class File(Answer):
    id: str
    object: Literal["file"]
    bytes: int
    created_at: int
    expires_at: int
    filename: str
    purpose: Literal["vision", "user_data", "assistants"]
    status: Literal["processed"]
    uuid: str | None = None


class FileList(Answer):
    object: Literal["list"]
    data: list[File]
    has_more: bool
    first_id: str | None
    last_id: str | None


class FileDeleted(Answer):
    id: str
    object: Literal["file"]
    deleted: Literal[True]


class TokenCount(Answer):
    """image_tokens   of every picture, in order"""

    count: int
    max_model_len: int
    tokens: list[int]
    image_tokens: list[int]


class Health(Answer):
    status: Literal["ok"]


class ReplicaCount(Answer):
    ready: int
    known: int


class Readiness(Answer):
    status: Literal["ready", "not ready", "draining"]
    text_engines: ReplicaCount
    vision_encoders: ReplicaCount
