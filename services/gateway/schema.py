"""Bodies of the OpenAI-style API, as pydantic models; unknown fields are ignored, known ones are checked.

Shapes and types are checked here, ranges of sampling fields by `SamplingParams`. A field that asks for a feature this
server does not have is refused by name: an answer that silently ignores it would be a wrong answer.
"""

from __future__ import annotations

import re
from dataclasses import fields
from typing import Annotated, Any, Final, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    FailFast,
    Field,
    JsonValue,
    Tag,
    model_validator,
)
from pydantic_core import PydanticCustomError

from shared.errors import InvalidRequest, UnsupportedFeature
from shared.sampling import SamplingParams

Int64 = Annotated[int, Field(ge=-(2**63), lt=2**63)]
JsonObject = dict[str, JsonValue]
Role = Literal["system", "developer", "user", "assistant", "tool"]
_TOKEN_ID = re.compile(r"-?[0-9]{1,18}", re.ASCII)


class Body(BaseModel):
    # strict: "5", true and 1.5 are not whole numbers, whatever Python thinks.
    model_config = ConfigDict(extra="ignore", frozen=True, strict=True)

    @model_validator(mode="before")
    @classmethod
    def _null_is_absent(cls, body: object) -> object:
        """OpenAI lets every optional field be null."""
        return {name: value for name, value in body.items() if value is not None} if isinstance(body, dict) else body


# --- messages -------------------------------------------------------------------------------------------------------


class ImageUrl(Body):
    url: str
    detail: Literal["low", "high", "auto"] = "auto"  # accepted for compatibility: the model has one resolution


def _url_is_object(value: object) -> object:
    return {"url": value} if isinstance(value, str) else value


class TextContent(Body):
    text: str


class ImageContent(Body):
    image_url: Annotated[ImageUrl, BeforeValidator(_url_is_object)]


class RefusalContent(Body):
    refusal: str


class OtherContent(Body):
    type: str


def _part_tag(part: object) -> str | None:
    """Tags are in angle brackets so that `clean_location` can drop them from the path of an error."""
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(kind, str):
        return None
    return {"text": "<text>", "image_url": "<image>", "refusal": "<refusal>"}.get(kind, "<other>")


Part = Annotated[
    Annotated[TextContent, Tag("<text>")]
    | Annotated[ImageContent, Tag("<image>")]
    | Annotated[RefusalContent, Tag("<refusal>")]
    | Annotated[OtherContent, Tag("<other>")],
    Discriminator(
        _part_tag,
        custom_error_type="content_part",
        custom_error_message="a content part is an object with a type: 'text' or 'image_url'",
    ),
]


def _text_is_one_part(content: object) -> object:
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not isinstance(content, list):
        raise PydanticCustomError("content", "content is a string or a list of parts")
    return content


class Message(Body):
    """`content` is always a list of parts here: a string is the same as one text part, null as none."""

    role: Role
    content: Annotated[list[Part], FailFast(), BeforeValidator(_text_is_one_part)] = []
    name: str | None = None
    tool_calls: list[JsonObject] | None = None
    tool_call_id: str | None = None


# A list ends at its first bad entry: nobody reads a million complaints, and they cost as many allocations.
Messages = Annotated[list[Message], Field(min_length=1), FailFast()]


# --- requests -------------------------------------------------------------------------------------------------------


class StreamOptions(Body):
    include_usage: bool = False


def _stop_is_list(value: object) -> object:
    return [value] if isinstance(value, str) else value


class GenerationBody(Body):
    """What chat and text completions have in common: how to sample, when to stop, how to answer."""

    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    priority: int = Field(default=0, ge=-(2**31), lt=2**31)
    cache_salt: str = ""

    n: Int64 = 1
    max_tokens: Int64 | None = None
    min_tokens: Int64 = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: Int64 = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[str, float] = {}
    stop: Annotated[list[str], FailFast(), BeforeValidator(_stop_is_list)] = []
    stop_token_ids: Annotated[list[Int64], FailFast()] = []
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    seed: Int64 | None = None

    def _sampling(self, *, max_tokens: int | None, logprobs: int | None) -> SamplingParams:
        """Raises InvalidRequest naming the field that is out of range."""
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
            include_stop_str_in_output=self.include_stop_str_in_output,
            ignore_eos=self.ignore_eos,
            seed=self.seed,
            logprobs=logprobs,
        )


class ChatRequest(GenerationBody):
    messages: Messages
    max_completion_tokens: Int64 | None = Field(default=None, ge=1)
    logprobs: bool = False
    top_logprobs: int | None = None
    tools: list[JsonObject] | None = None
    tool_choice: Literal["auto", "none"] = "auto"

    def sampling(self) -> SamplingParams:
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidRequest("top_logprobs needs logprobs to be true", param="top_logprobs")
        return self._sampling(
            max_tokens=self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens,
            logprobs=(self.top_logprobs or 0) if self.logprobs else None,
        )


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
    prompt: Annotated[list[Prompt], BeforeValidator(_prompts)]
    max_tokens: Int64 | None = 16  # OpenAI's default for this endpoint
    logprobs: int | None = None

    def sampling(self) -> SamplingParams:
        return self._sampling(max_tokens=self.max_tokens, logprobs=self.logprobs)


class TokenizeBody(Body):
    """Exactly one of `prompt` and `messages`."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages = []
    tools: list[JsonObject] | None = None


# --- between the body and the engine --------------------------------------------------------------------------------

# Field -> the values that ask for nothing. Any other value asks for what is not there yet.
_NOT_YET: Final[dict[str, tuple[JsonValue, ...]]] = {
    "audio": (),
    "best_of": (1,),
    "chat_template": ("",),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "add_generation_prompt": (True,),
    "echo": (False,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "grammar": ("",),
    "guided_choice": ([],),
    "guided_grammar": ("",),
    "guided_json": ("",),
    "guided_regex": ("",),
    "modalities": (["text"],),
    "prompt_logprobs": (),
    "response_format": ({"type": "text"},),
    "structured_outputs": ({},),
    "suffix": ("",),
    "tool_choice": ("auto", "none"),
    "use_beam_search": (False,),
    "web_search_options": (),
}


def refuse_unsupported(body: dict[str, Any]) -> None:
    """Raises UnsupportedFeature naming the first field that asks for a feature that is not there."""
    for name in body.keys() & _NOT_YET.keys():
        value = body[name]
        if value is not None and value not in _NOT_YET[name]:
            allowed = " or ".join(repr(choice) for choice in _NOT_YET[name]) or "null"
            raise UnsupportedFeature(
                f"{name} is not supported with this value; leave it out or send {allowed}", param=name
            )


def wire_sampling(params: SamplingParams) -> dict[str, Any]:
    """The fields that differ from their defaults: what `GenerateRequest.sampling` carries."""
    default = SamplingParams()
    changed = {field.name: getattr(params, field.name) for field in fields(params)}
    return {name: value for name, value in changed.items() if value != getattr(default, name)}


def clean_location(location: tuple[int | str, ...]) -> tuple[int | str, ...]:
    """Without the tags of unions: the path as the client wrote it."""
    return tuple(step for step in location if not (isinstance(step, str) and step.startswith("<")))


def _token_id(key: str) -> int:
    if not _TOKEN_ID.fullmatch(key):
        raise InvalidRequest(f"logit_bias has the key {key[:40]!r}; keys are token ids in decimal", param="logit_bias")
    return int(key)
