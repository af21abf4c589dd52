"""Bodies of the OpenAI-style API, as pydantic models; unknown fields are ignored, known ones are checked.

Shapes and types are checked here, ranges of sampling fields by `SamplingParams`. A field that asks for a feature this
server does not have is refused by name: an answer that silently ignores it would be a wrong answer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict
from typing import Annotated, Any, Final, Literal, Self

from pydantic import AliasChoices, BeforeValidator, Discriminator, FailFast, Field, JsonValue, Tag, model_validator
from pydantic.json_schema import SkipJsonSchema
from pydantic_core import PydanticCustomError

from services.gateway.base_schema import Body, Int64, JsonObject, shallow
from services.gateway.chosen_ids import MAX_UUID_CHARS
from services.gateway.cut_urls import Url
from services.gateway.field_names import named_as_given
from services.gateway.output_schema import ResponseFormat, SchemaOrText, StructuredOutputs, Tool, ToolChoice, Tools
from shared.errors import InvalidRequest, UnsupportedFeature
from shared.sampling import SamplingParams
from shared.wire.encoder import ImageSize
from shared.wire.images import RequestedDetail

MAX_SIZES = 1024
MAX_MESSAGES = 10_000  # in a conversation: more than any context holds, and each costs a tenth of a millisecond
Role = Literal["system", "developer", "user", "assistant", "tool"]
_TOKEN_ID = re.compile(r"-?[0-9]{1,18}", re.ASCII)


class Refused(Body):
    """Something of a type that is not supported: known only to be refused by name, and not in the document."""

    type: str


# --- messages -------------------------------------------------------------------------------------------------------


class ImageUrl(Body):
    """Exactly one of `url` and `file_id`; a file's id may also stand in the place of its URL."""

    url: Url | None = None
    file_id: str | None = Field(default=None, pattern="^file-")
    detail: RequestedDetail = "auto"

    @model_validator(mode="after")
    def _names_one_image(self) -> Self:
        if (self.url is None) == (self.file_id is None):
            raise PydanticCustomError("image_url", "give either url or file_id")
        return self

    @property
    def source(self) -> str:
        return self.url or self.file_id or ""


def _url_is_object(value: object) -> object:
    return {"url": value} if isinstance(value, str) else value


class TextContent(Body):
    type: Literal["text"]
    text: str


class ImageContent(Body):
    """A picture, its name, or both: with both it is kept under the name, which then stands for it."""

    type: Literal["image_url"]
    image_url: Annotated[
        ImageUrl | None, BeforeValidator(_url_is_object, json_schema_input_type=str | ImageUrl | None)
    ] = None
    uuid: str | None = Field(default=None, min_length=1, max_length=MAX_UUID_CHARS)

    @model_validator(mode="after")
    def _has_a_picture(self) -> Self:
        if self.image_url is None and self.uuid is None:
            raise PydanticCustomError("image_url", "give image_url, or the uuid of a picture that was sent before")
        return self


class EmbeddingContent(Body):
    """The picture's embedding in its place: a safetensors file in base64."""

    type: Literal["image_embeds"]
    image_embeds: str


class RefusalContent(Body):
    type: Literal["refusal"]
    refusal: str


def _part_tag(part: object) -> str | None:
    """Tags are in angle brackets so that `clean_location` can drop them from the path of an error."""
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(kind, str):
        return None
    tags = {"text": "<text>", "image_url": "<image>", "image_embeds": "<embeds>", "refusal": "<refusal>"}
    return tags.get(kind, "<other>")


Part = Annotated[
    Annotated[TextContent, Tag("<text>")]
    | Annotated[ImageContent, Tag("<image>")]
    | Annotated[EmbeddingContent, Tag("<embeds>")]
    | Annotated[RefusalContent, Tag("<refusal>")]
    | Annotated[SkipJsonSchema[Refused], Tag("<other>")],
    Discriminator(
        _part_tag,
        custom_error_type="content_part",
        custom_error_message="a content part is an object with a type: 'text' or 'image_url'",
    ),
]


def text_is_one_part(content: object) -> object:
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not isinstance(content, list):
        raise PydanticCustomError("content", "content is a string or a list of parts")
    return content


class Message(Body):
    """`content` is always a list of parts here: a string is the same as one text part, null as none."""

    role: Role
    content: Annotated[
        list[Part], FailFast(), BeforeValidator(text_is_one_part, json_schema_input_type=str | list[Part])
    ] = []
    name: str | None = None
    reasoning_content: Annotated[str | None, Field(validation_alias=AliasChoices("reasoning_content", "reasoning"))] = (
        None
    )
    tool_calls: Annotated[list[JsonObject] | None, BeforeValidator(shallow)] = None
    tool_call_id: str | None = None


# A list ends at its first bad entry: nobody reads a million complaints, and they cost as many allocations.
Messages = Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES), FailFast()]


# --- reasoning ------------------------------------------------------------------------------------------------------

ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
TemplateKwargs = Annotated[JsonObject, BeforeValidator(shallow)]


def template_kwargs(given: JsonObject, effort: ReasoningEffort | None) -> JsonObject:
    """Variables of the chat template. Templates that know efforts call them so; others can only be told not to think,
    under one of two names. What the client says itself counts more."""
    if effort is None:
        return given
    silent: JsonObject = {"enable_thinking": False, "thinking": False} if effort == "none" else {}
    return {"reasoning_effort": effort, **silent, **given}


# --- requests -------------------------------------------------------------------------------------------------------


class StreamOptions(Body):
    include_usage: bool = False
    continuous_usage_stats: bool = False  # vLLM's: with include_usage, usage so far in every chunk


def _stop_is_list(value: object) -> object:
    return [value] if isinstance(value, str) else value


class SamplingBody(Body):
    """What all requests for answers have in common: how to sample, when to stop, what to allow."""

    model: str | None = None
    stream: bool = False
    priority: int = Field(default=0, ge=-(2**31), lt=2**31)
    cache_salt: str = ""

    min_tokens: Int64 = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: Int64 = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[str, float] = {}
    stop: Annotated[list[str], FailFast(), BeforeValidator(_stop_is_list, json_schema_input_type=str | list[str])] = []
    stop_token_ids: Annotated[list[Int64], FailFast()] = []
    allowed_token_ids: Annotated[list[Int64], FailFast()] = []
    bad_words: Annotated[list[str], FailFast()] = []
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    seed: Int64 | None = None
    vllm_xargs: Annotated[JsonObject, BeforeValidator(shallow)] = {}

    structured_outputs: StructuredOutputs | None = None
    guided_json: SchemaOrText = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None


class GenerationBody(SamplingBody):
    """What chat and text completions have beyond it; the Responses API refuses these fields, or has others for them."""

    stream_options: StreamOptions = StreamOptions()
    n: Int64 = 1
    max_tokens: Int64 | None = None
    prompt_logprobs: Int64 | None = None
    response_format: ResponseFormat | None = None

    def _sampling(self, *, max_tokens: int | None, logprobs: int | None, prompt_logprobs: int | None) -> SamplingParams:
        """Raises InvalidRequest naming the field that is out of range."""
        if self.stream and prompt_logprobs is not None:
            raise InvalidRequest("a prompt's log-probabilities cannot be streamed; set stream to false", param="stream")
        return SamplingParams(
            n=self.n,
            max_tokens=max_tokens,
            min_tokens=self.min_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            repetition_penalty=self.repetition_penalty,
            logit_bias={_token_id(key): bias for key, bias in self.logit_bias.items()},
            stop=tuple(self.stop),
            stop_token_ids=tuple(self.stop_token_ids),
            allowed_token_ids=tuple(self.allowed_token_ids),
            bad_words=tuple(self.bad_words),
            include_stop_str_in_output=self.include_stop_str_in_output,
            ignore_eos=self.ignore_eos,
            skip_special_tokens=self.skip_special_tokens,
            seed=self.seed,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            extra_args=self.vllm_xargs,
        )


class ChatRequest(GenerationBody):
    messages: Messages
    max_completion_tokens: Int64 | None = Field(default=None, ge=1)
    logprobs: bool = False
    top_logprobs: int | None = None
    tools: Tools = []
    tool_choice: ToolChoice = "auto"
    parallel_tool_calls: bool = True
    reasoning_effort: ReasoningEffort | None = None
    chat_template_kwargs: TemplateKwargs = {}

    def sampling(self) -> SamplingParams:
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidRequest("top_logprobs needs logprobs to be true", param="top_logprobs")
        with named_as_given(self.names_given):
            return self._sampling(
                max_tokens=self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens,
                logprobs=(self.top_logprobs or 0) if self.logprobs else None,
                prompt_logprobs=self.prompt_logprobs,
            )

    @property
    def names_given(self) -> dict[str, str]:
        """Fields of SamplingParams -> the request's names for them, where they are others."""
        names = {"logprobs": "top_logprobs"}
        return names if self.max_completion_tokens is None else {**names, "max_tokens": "max_completion_tokens"}


Prompt = str | list[int]


def _prompts(value: object) -> list[Prompt]:
    """One prompt or several, as text or as token ids, always as a list of prompts."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and value:
        if _is_token_ids(value):
            return [value]
        if all(isinstance(prompt, str) or _is_token_ids(prompt) for prompt in value):
            return value
    raise PydanticCustomError("prompt", "prompt is a string, a list of token ids, or a list of either, and never empty")


def _is_token_ids(value: object) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(token, int) and not isinstance(token, bool) and 0 <= token < 2**31 for token in value)
    )


class CompletionRequest(GenerationBody):
    prompt: Annotated[list[Prompt], BeforeValidator(_prompts, json_schema_input_type=Prompt | list[Prompt])]
    max_tokens: Int64 | None = 16  # OpenAI's default for this endpoint
    logprobs: int | None = None
    echo: bool = False

    @property
    def only_echoes(self) -> bool:
        """The prompt is to be scored and nothing said; engines always say something, so one token is asked for."""
        return self.echo and self.max_tokens == 0

    def sampling(self) -> SamplingParams:
        wanted = [self.prompt_logprobs, self.logprobs if self.echo else None]
        return self._sampling(
            max_tokens=1 if self.only_echoes else self.max_tokens,
            logprobs=self.logprobs,
            prompt_logprobs=max((count for count in wanted if count is not None), default=None),
        )

    @property
    def names_given(self) -> dict[str, str]:
        """As for a chat: what is echoed is scored because of `logprobs`, if that asks for more."""
        num_asked = -1 if self.prompt_logprobs is None else self.prompt_logprobs
        is_by_logprobs = self.echo and self.logprobs is not None and self.logprobs > num_asked
        return {"prompt_logprobs": "logprobs"} if is_by_logprobs else {}


class TokenizeBody(Body):
    """Either `prompt`, or `messages`, or `images`, or both of the latter.

    images   pictures of which only the size is known; they are counted as the last parts of the last question
    """

    model: str | None = None
    prompt: str | None = None
    messages: Messages = []
    images: Annotated[list[ImageSize], FailFast(), Field(max_length=MAX_SIZES)] = []
    tools: Tools = []
    reasoning_effort: ReasoningEffort | None = None
    chat_template_kwargs: TemplateKwargs = {}


# --- between the body and the engine --------------------------------------------------------------------------------

# Field -> the values that ask for nothing. Any other value asks for what is not there yet, and would change the answer.
# What changes no answer is ignored like an unknown field: book-keeping (user, metadata, store, service_tier,
# safety_identifier, prompt_cache_key) and hints (verbosity, prediction).
_NOT_YET: Final[dict[str, tuple[JsonValue, ...]]] = {
    "audio": (),
    "best_of": (1,),
    "chat_template": ("",),
    "continue_final_message": (False,),
    "mm_processor_kwargs": ({},),
    "truncate_prompt_tokens": (),
    "add_generation_prompt": (True,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "grammar": ("",),
    "modalities": (["text"],),
    "suffix": ("",),
    "use_beam_search": (False,),
    "web_search_options": (),
}


def refuse_unsupported(body: dict[str, Any], harmless: Mapping[str, tuple[JsonValue, ...]] = _NOT_YET) -> None:
    """Raises UnsupportedFeature naming the first field of `harmless` that asks for a feature that is not there."""
    for name in body.keys() & harmless.keys():
        value = body[name]
        if value is not None and value not in harmless[name]:
            allowed = " or ".join(json.dumps(choice) for choice in harmless[name]) or "null"
            raise UnsupportedFeature(
                f"{name} is not supported with this value; leave it out or send {allowed}", param=name
            )


_DEFAULT_SAMPLING: Final = asdict(SamplingParams())


def wire_sampling(params: SamplingParams) -> dict[str, Any]:
    """The fields that differ from their defaults: what `GenerateRequest.sampling` carries."""
    given = {name: getattr(params, name) for name in _DEFAULT_SAMPLING}
    changed = {name: value for name, value in given.items() if value != _DEFAULT_SAMPLING[name]}
    return changed if params.constraint is None else {**changed, "constraint": asdict(params.constraint)}


def wire_tools(tools: list[Tool]) -> list[JsonObject] | None:
    """As the client wrote them."""
    return [tool.model_dump(exclude_unset=True) for tool in tools] or None


def clean_location(location: tuple[int | str, ...]) -> tuple[int | str, ...]:
    """Without the tags of unions: the path as the client wrote it."""
    return tuple(step for step in location if not (isinstance(step, str) and step.startswith("<")))


def _token_id(key: str) -> int:
    if not _TOKEN_ID.fullmatch(key):
        raise InvalidRequest(f"logit_bias has the key {key[:40]!r}; keys are token ids in decimal", param="logit_bias")
    return int(key)
