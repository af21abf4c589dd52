"""Renders a conversation with the checkpoint's own chat template, in a sandbox, as transformers would."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import jinja2
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from shared.errors import InvalidRequest
from shared.log import get_logger
from shared.reasoning import REASONING_MARKS, ReasoningFormat
from shared.wire.engine import ToolFormat

log = get_logger(__name__)

# Published LLaVA-1.5 checkpoints that predate chat templates were trained on this dialogue format.
VICUNA = (
    "{% for message in messages %}"
    "{% if message['role'] == 'system' %}{{ message['content'] }} "
    "{% elif message['role'] == 'user' %}USER: {{ message['content'] }} "
    "{% else %}ASSISTANT: {{ message['content'] }}{{ eos_token }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}ASSISTANT:{% endif %}"
)
BUILT_IN_TEMPLATES = {"llava": VICUNA}
# What a template's own code raises where the client's variables or messages have other types than it counts on.
_OF_VALUES = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
# What a family's template alone has in it. The first that fits is it.
_TOOL_MARKS: Final[dict[ToolFormat, tuple[str, ...]]] = {
    "mistral": ("[TOOL_CALLS]",),
    "deepseek_v3": ("<｜tool▁calls▁begin｜>", "```json"),
    "deepseek_v31": ("<｜tool▁calls▁begin｜>",),
    "kimi_k2": ("<|tool_calls_section_begin|>",),
    "glm45": ("<tool_call>", "<arg_key>"),
    "qwen3_coder": ("<tool_call>", "<function=", "<parameter="),
}
_PYTHONIC_EXAMPLE: Final = re.compile(r"\[\w+\(\w+=\w")  # [func_name1(params_name1=params_value1, …
_PROBE = "probe-of-the-template"
_PROBE_TOOL = {"type": "function", "function": {"name": _PROBE, "description": "", "parameters": {"type": "object"}}}


class ChatTemplate:
    """One template and what it can take: content as a string, as a list of parts, or both; tools or not."""

    def __init__(self, source: str, *, bos_token: str | None, eos_token: str | None) -> None:
        self._variables = {"bos_token": bos_token or "", "eos_token": eos_token or ""}
        # `generation` blocks only mark text for training; they render as their content.
        source = re.sub(r"{%-?\s*(end)?generation\s*-?%}", "", source)
        self._template = _environment().from_string(source)
        self.takes_string = self._shows_content(_PROBE)
        self.takes_parts = self._shows_content([text_part(_PROBE)])
        hello = "hello" if self.takes_string else [text_part("hello")]
        self.takes_tools = _PROBE in self._probe(hello, [_PROBE_TOOL])
        self.takes_parsed_arguments = self._takes_parsed_arguments(hello)
        self.tool_format = _tool_format(source)
        self.reasoning_format = _reasoning_format(source)

    @classmethod
    def load(
        cls, folder: Path, *, model_type: str, bos_token: str | None, eos_token: str | None
    ) -> ChatTemplate | None:
        """The folder's template, else the built-in one of a known family, else None."""
        source = _read_template(folder)
        if source is None and model_type in BUILT_IN_TEMPLATES:
            log.info("the checkpoint has no chat template; using the built-in one", family=model_type)
            source = BUILT_IN_TEMPLATES[model_type]
        return None if source is None else cls(source, bos_token=bos_token, eos_token=eos_token)

    def render(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None = None,
        kwargs: Mapping[str, Any] = MappingProxyType({}),
    ) -> str:
        """kwargs: further variables. Raises InvalidRequest with the template's own words if it refuses the
        conversation, or naming a variable that is not the client's to set."""
        variables = {"messages": messages, "tools": tools, "add_generation_prompt": True, **self._variables}
        if taken := sorted(kwargs.keys() & variables.keys()):
            raise InvalidRequest(
                f"chat_template_kwargs cannot set {taken[0]}: other fields of the request do",
                param="chat_template_kwargs",
            )
        try:
            return self._template.render(**variables, **kwargs)
        except (jinja2.TemplateError, *_OF_VALUES) as error:
            raise InvalidRequest(f"the model's chat template refuses this: {error}", param="messages") from error

    def _shows_content(self, content: str | list[dict[str, Any]]) -> bool:
        rendered = self._probe(content, None)
        return _PROBE in rendered and "'type'" not in rendered

    def _takes_parsed_arguments(self, content: str | list[dict[str, Any]]) -> bool:
        """Whether calls of earlier turns carry their arguments as an object, as transformers has it, and not as JSON
        text, as the API has it: some of DeepSeek's templates put that together with what stands around it."""

        def shows(arguments: dict[str, Any] | str) -> bool:
            call = {"id": "call00000", "type": "function", "function": {"name": "f", "arguments": arguments}}
            return _PROBE in self._probe(content, None, {"role": "assistant", "content": "", "tool_calls": [call]})

        return shows({"a": _PROBE}) or not shows(f'{{"a": "{_PROBE}"}}')

    def _probe(
        self, content: str | list[dict[str, Any]], tools: list[dict[str, Any]] | None, *later: dict[str, Any]
    ) -> str:
        """What the template makes of it; nothing if it fails."""
        try:
            return self.render([{"role": "user", "content": content}, *later], tools)
        except (InvalidRequest, TypeError, AttributeError, KeyError):
            return ""


def text_part(text: str) -> dict[str, str]:
    """Templates look for a part's text under `text`; Pixtral's, under `content`."""
    return {"type": "text", "text": text, "content": text}


def _tool_format(source: str) -> ToolFormat:
    """How the model writes a call, told by the marks in its template; Hermes' way where there are none, which is also
    how tools are described to a template that takes none."""
    for form, marks in _TOOL_MARKS.items():
        if all(mark in source for mark in marks):
            return form
    if _PYTHONIC_EXAMPLE.search(source):
        return "pythonic"
    if "<tool_call>" not in source and ("<|python_tag|>" in source or '"parameters":' in source):
        return "llama3_json"
    return "hermes"


def _reasoning_format(source: str) -> ReasoningFormat | None:
    """How the model marks its reasoning: a template that handles reasoning at all handles the mark at its end."""
    return next((form for form, marks in REASONING_MARKS.items() if marks.closing in source), None)


def _environment() -> ImmutableSandboxedEnvironment:
    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def to_json(value: object, indent: int | None = None, **_options: object) -> str:
        return json.dumps(value, ensure_ascii=False, indent=indent)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def _read_template(folder: Path) -> str | None:
    """In the order of transformers: chat_template.jinja, chat_template.json, then the tokenizer's own."""
    jinja_file = folder / "chat_template.jinja"
    if jinja_file.is_file():
        return jinja_file.read_text()
    for name in ("chat_template.json", "processor_config.json", "tokenizer_config.json"):
        file = folder / name
        template = json.loads(file.read_text()).get("chat_template") if file.is_file() else None
        if isinstance(template, list):  # several named templates
            template = next((t["template"] for t in template if t["name"] == "default"), None)
        if isinstance(template, str):
            return template
    return None
