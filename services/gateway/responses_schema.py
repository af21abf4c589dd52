"""The body of `/v1/responses`, as pydantic models.

Nothing is stored between requests, so whatever builds on an earlier response is refused by name, never ignored.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal

from pydantic import (
    BeforeValidator,
    ConfigDict,
    Discriminator,
    FailFast,
    Field,
    JsonValue,
    Tag,
    model_validator,
)
from pydantic.json_schema import SkipJsonSchema

from services.gateway.base_schema import Body, Int64, JsonObject
from services.gateway.chosen_ids import MAX_UUID_CHARS
from services.gateway.cut_urls import Url
from services.gateway.schema import (
    ReasoningEffort,
    RefusalContent,
    Refused,
    SamplingBody,
    TemplateKwargs,
    refuse_unsupported,
    text_is_one_part,
)
from shared.wire.images import RequestedDetail

LOGPROBS: Final = "message.output_text.logprobs"

# Field -> the values that ask for nothing that is not here.
_NOT_HERE: Final[dict[str, tuple[JsonValue, ...]]] = {
    "background": (False,),
    "conversation": (),
    "max_tokens": (),
    "n": (1,),
    "previous_response_id": (),
    "prompt": (),
    "prompt_logprobs": (),
    "response_format": ({"type": "text"},),
    "store": (False,),
    "truncation": ("disabled",),
}


# --- input ------------------------------------------------------------------------------------------------------------


class InputText(Body):
    type: Literal["input_text", "output_text", "text"]
    text: str


class InputImage(Body):
    """`image_url` or `file_id`, both the chat's `image_url`, and `uuid`, which may stand alone."""

    type: Literal["input_image"]
    image_url: Url | None = None
    file_id: str | None = None
    detail: RequestedDetail = "auto"
    uuid: str | None = Field(default=None, min_length=1, max_length=MAX_UUID_CHARS)

    def to_chat(self) -> JsonObject:
        has_picture = self.image_url is not None or self.file_id is not None
        image: JsonObject = {"url": self.image_url, "file_id": self.file_id, "detail": self.detail}
        return {"type": "image_url", "image_url": image if has_picture else None, "uuid": self.uuid}


def _part_tag(part: object) -> str | None:
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(kind, str):
        return None
    return {
        "input_text": "<text>",
        "output_text": "<text>",
        "text": "<text>",
        "input_image": "<image>",
        "refusal": "<refusal>",
    }.get(kind, "<other>")


InputPart = Annotated[
    Annotated[InputText, Tag("<text>")]
    | Annotated[InputImage, Tag("<image>")]
    | Annotated[RefusalContent, Tag("<refusal>")]
    | Annotated[SkipJsonSchema[Refused], Tag("<other>")],
    Discriminator(
        _part_tag,
        custom_error_type="content_part",
        custom_error_message="a content part is an object with a type: 'input_text' or 'input_image'",
    ),
]
InputParts = Annotated[
    list[InputPart], FailFast(), BeforeValidator(text_is_one_part, json_schema_input_type=str | list[InputPart])
]


class InputMessage(Body):
    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: InputParts


class FunctionCall(Body):
    """A call that the model made in an earlier turn."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str

    def to_chat(self) -> JsonObject:
        return {
            "id": self.call_id,
            "type": "function",
            "function": {"name": self.name, "arguments": self.arguments},
        }


class FunctionCallOutput(Body):
    type: Literal["function_call_output"]
    call_id: str
    output: InputParts


class ReasoningText(Body):
    text: str


class Reasoning(Body):
    """What the model thought in an earlier turn; of its text and its summary the text counts."""

    type: Literal["reasoning"]
    content: Annotated[list[ReasoningText], FailFast()] = Field(default=[])
    summary: Annotated[list[ReasoningText], FailFast()] = Field(default=[])

    @property
    def text(self) -> str:
        return "\n".join(part.text for part in self.content or self.summary)


def _item_tag(item: object) -> str | None:
    """An item without a type is a message."""
    if not isinstance(item, dict):
        return None
    kind = "message" if item.get("type") is None else item["type"]
    if not isinstance(kind, str):
        return None
    return {
        "message": "<message>",
        "function_call": "<call>",
        "function_call_output": "<output>",
        "reasoning": "<reasoning>",
    }.get(kind, "<other>")


InputItem = Annotated[
    Annotated[InputMessage, Tag("<message>")]
    | Annotated[FunctionCall, Tag("<call>")]
    | Annotated[FunctionCallOutput, Tag("<output>")]
    | Annotated[Reasoning, Tag("<reasoning>")]
    | Annotated[SkipJsonSchema[Refused], Tag("<other>")],
    Discriminator(
        _item_tag, custom_error_type="input_item", custom_error_message="an input item is an object with a type"
    ),
]


def _text_is_one_message(value: object) -> object:
    return [{"role": "user", "content": value}] if isinstance(value, str) else value


# --- tools ------------------------------------------------------------------------------------------------------------


class FunctionTool(Body):
    """Flat here, where the chat has an object `function`."""

    model_config = ConfigDict(extra="allow")

    type: Literal["function"]
    name: str

    def to_chat(self) -> JsonObject:
        return {"type": "function", "function": self.model_dump(exclude={"type"}, exclude_unset=True)}


class FunctionChoice(Body):
    type: Literal["function"]
    name: str

    def to_chat(self) -> JsonObject:
        return {"type": "function", "function": {"name": self.name}}


def _tool_tag(tool: object) -> str | None:
    kind = tool.get("type") if isinstance(tool, dict) else None
    if not isinstance(kind, str):
        return None
    return "<function>" if kind == "function" else "<other>"


ResponseTool = Annotated[
    Annotated[FunctionTool, Tag("<function>")] | Annotated[SkipJsonSchema[Refused], Tag("<other>")],
    Discriminator(_tool_tag, custom_error_type="tool", custom_error_message="a tool is an object with a type"),
]
ResponseToolChoice = Annotated[
    Annotated[Literal["auto", "none", "required"], Tag("<mode>")] | Annotated[FunctionChoice, Tag("<named>")],
    Discriminator(lambda choice: "<named>" if isinstance(choice, dict | FunctionChoice) else "<mode>"),
]


# --- the request ------------------------------------------------------------------------------------------------------


class TextOptions(Body):
    format: JsonObject | None = None


class ReasoningOptions(Body):
    effort: ReasoningEffort | None = None


class ResponsesRequest(SamplingBody):
    """`input` is always a list of items here: a string is the same as one message of the user."""

    input: Annotated[
        list[InputItem],
        Field(min_length=1),
        FailFast(),
        BeforeValidator(_text_is_one_message, json_schema_input_type=str | list[InputItem]),
    ]
    instructions: str | None = None
    max_output_tokens: Int64 | None = Field(default=None, ge=1)
    top_logprobs: int | None = None
    include: list[str] = Field(default=[])
    text: TextOptions = TextOptions()
    tools: Annotated[list[ResponseTool], FailFast()] = Field(default=[])
    tool_choice: ResponseToolChoice = "auto"
    parallel_tool_calls: bool = True
    reasoning: ReasoningOptions = ReasoningOptions()
    chat_template_kwargs: TemplateKwargs = Field(default={})
    metadata: dict[str, str] = Field(default={})

    @model_validator(mode="before")
    @classmethod
    def _refuse_what_is_not_here(cls, body: object) -> object:
        if isinstance(body, dict):
            refuse_unsupported(body, _NOT_HERE)
        return body

    @property
    def echoed_tools(self) -> list[JsonObject]:
        """As the client sent them: a response repeats what it was asked with."""
        return [tool.model_dump(exclude_unset=True) for tool in self.tools]

    @property
    def echoed_tool_choice(self) -> JsonObject | str:
        return self.tool_choice if isinstance(self.tool_choice, str) else self.tool_choice.model_dump()

    @property
    def wants_logprobs(self) -> bool:
        return LOGPROBS in self.include
