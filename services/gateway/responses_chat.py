"""The chat that a response means: one story serves both APIs. Errors about it are told in the client's words."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

from pydantic import JsonValue

from services.gateway.base_schema import JsonObject
from services.gateway.body import validate
from services.gateway.field_names import renamed
from services.gateway.responses_schema import (
    FunctionCall,
    FunctionCallOutput,
    FunctionTool,
    InputImage,
    InputMessage,
    InputText,
    Reasoning,
    ResponsesRequest,
)
from services.gateway.schema import ChatRequest, RefusalContent, Refused, SamplingBody
from shared.errors import DiptychError, InvalidRequest, UnsupportedFeature

Part = InputText | InputImage | RefusalContent | Refused


def to_chat(body: ResponsesRequest) -> tuple[ChatRequest, list[str]]:
    """The same question as a chat, and for each of its messages the part of the request that it came from."""
    messages, paths = _messages(body)
    generation = body.model_dump(include=set(SamplingBody.model_fields), exclude_unset=True, by_alias=True)
    chat: dict[str, Any] = {
        **generation,
        "messages": messages,
        "max_completion_tokens": body.max_output_tokens,
        "logprobs": body.wants_logprobs,
        "top_logprobs": body.top_logprobs if body.wants_logprobs else None,
        "response_format": _response_format(body.text.format),
        "tools": [_tool(tool, index) for index, tool in enumerate(body.tools)],
        "tool_choice": body.tool_choice if isinstance(body.tool_choice, str) else body.tool_choice.to_chat(),
        "parallel_tool_calls": body.parallel_tool_calls,
        "reasoning_effort": body.reasoning.effort,
        "chat_template_kwargs": body.chat_template_kwargs,
    }
    with with_client_paths(paths):
        return validate({name: value for name, value in chat.items() if value is not None}, ChatRequest), paths


def _messages(body: ResponsesRequest) -> tuple[list[dict[str, Any]], list[str]]:
    messages: list[dict[str, Any]] = []
    paths: list[str] = []
    if body.instructions:
        messages.append({"role": "system", "content": body.instructions})
        paths.append("instructions")
    for index, item in enumerate(body.input):
        path = f"input[{index}]"
        last = messages[-1] if messages and messages[-1]["role"] == "assistant" else None
        # In a chat what the model thought, said and called in one turn are one message.
        match item:
            case Reasoning(text=text):
                messages.append({"role": "assistant", "reasoning_content": text})
                paths.append(path)
            case FunctionCall() if last is not None:
                last["tool_calls"] = [*last.get("tool_calls", []), item.to_chat()]
            case FunctionCall():
                messages.append({"role": "assistant", "tool_calls": [item.to_chat()]})
                paths.append(path)
            case InputMessage(role="assistant") if last is not None and last.keys() == {"role", "reasoning_content"}:
                last |= _message(item, path)
                paths[-1] = path
            case _:
                messages.append(_message(item, path))
                paths.append(path)
    return messages, paths


def _message(item: InputMessage | FunctionCallOutput | Refused, path: str) -> dict[str, Any]:
    match item:
        case InputMessage(role=role, content=content):
            return {"role": role, "content": _content(content, f"{path}.content")}
        case FunctionCallOutput(call_id=call_id, output=output):
            return {"role": "tool", "tool_call_id": call_id, "content": _content(output, f"{path}.output")}
        case Refused(type=kind):
            raise UnsupportedFeature(
                f"{path}: items of type {kind[:40]!r} are not supported; "
                "use 'message', 'reasoning', 'function_call' or 'function_call_output'",
                param=f"{path}.type",
            )


def _content(parts: Sequence[Part], path: str) -> list[JsonValue]:
    return [_part(part, f"{path}[{index}]") for index, part in enumerate(parts)]


def _part(part: Part, path: str) -> JsonObject:
    match part:
        case InputText(text=text):
            return {"type": "text", "text": text}
        case RefusalContent(refusal=refusal):
            return {"type": "refusal", "refusal": refusal}
        case InputImage(image_url=url, file_id=file_id, uuid=uuid):
            if (url is None) == (file_id is None) and (url is not None or uuid is None):
                raise InvalidRequest(f"{path}: give either image_url or file_id", param=path)
            return part.to_chat()
        case Refused(type=kind):
            raise UnsupportedFeature(
                f"{path}: parts of type {kind[:40]!r} are not supported; use 'input_text' or 'input_image'",
                param=f"{path}.type",
            )


def _tool(tool: FunctionTool | Refused, index: int) -> JsonObject:
    if isinstance(tool, Refused):
        raise UnsupportedFeature(
            f"tools[{index}]: tools of type {tool.type[:40]!r} are not supported; use 'function'",
            param=f"tools[{index}].type",
        )
    return tool.to_chat()


def _response_format(given: JsonObject | None) -> JsonObject | None:
    """The chat API wraps what a JSON schema is made of into an object of its own."""
    if given is None or given.get("type") != "json_schema":
        return given
    return {"type": "json_schema", "json_schema": {name: value for name, value in given.items() if name != "type"}}


# --- errors -----------------------------------------------------------------------------------------------------------


@contextmanager
def with_client_paths(paths: list[str]) -> Iterator[None]:
    """Errors about the chat that a response became, as errors about what the client sent.

    paths   for every message of the chat, the part of the request that it came from
    """
    try:
        yield
    except DiptychError as error:
        told = renamed(error, _PATH, lambda found: _renamed(found, paths))
        if told.param == "messages":
            told = type(told)(told.message, param="input", retry_after_s=told.retry_after_s)
        if told is error:
            raise
        raise told from error


# Paths of a chat, longest first -> where the client wrote it. `messages` alone is no more than a word.
_FIELDS: Final = {
    "response_format.json_schema": "text.format",
    "response_format": "text.format",
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning.effort",
}
_MESSAGE: Final = r"messages\[(?P<index>\d+)\]"
_FUNCTION: Final = r"(?P<owner>tools\[\d+\]|tool_choice)\.function"
_FIELD: Final = rf"(?P<field>{'|'.join(map(re.escape, _FIELDS))})"
_PATH: Final = re.compile(rf"(?:{_MESSAGE}|{_FUNCTION}|{_FIELD})(?!\w)")


def _renamed(found: re.Match[str], paths: list[str]) -> str:
    if found["field"]:
        return _FIELDS[found["field"]]
    if found["owner"]:
        return found["owner"]
    index = int(found["index"])
    return paths[index] if index < len(paths) else found.group()
