"""Calls of tools as models write them: what each family's published chat template shows of an earlier turn."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shared.wire.engine import ToolFormat


@dataclass(frozen=True)
class Call:
    name: str
    arguments: dict[str, Any]


def written(form: ToolFormat, calls: Sequence[Call]) -> str:
    return WRITERS[form](calls)


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def _object(call: Call, key: str = "arguments") -> str:
    return f'{{"name": "{call.name}", "{key}": {_json(call.arguments)}}}'


def _hermes(calls: Sequence[Call]) -> str:
    return "\n".join(f"<tool_call>\n{_object(call)}\n</tool_call>" for call in calls)


def _llama3_json(calls: Sequence[Call]) -> str:
    return "; ".join(_object(call, "parameters") for call in calls)


def _mistral(calls: Sequence[Call]) -> str:
    return "".join(f"[TOOL_CALLS]{call.name}[ARGS]{_json(call.arguments)}" for call in calls)


def _bare(value: object) -> str:
    return value if isinstance(value, str) else _json(value)


def _qwen3_coder(calls: Sequence[Call]) -> str:
    def parameters(call: Call) -> str:
        return "".join(f"<parameter={key}>\n{_bare(value)}\n</parameter>\n" for key, value in call.arguments.items())

    return "\n".join(f"<tool_call>\n<function={c.name}>\n{parameters(c)}</function>\n</tool_call>" for c in calls)


def _glm45(calls: Sequence[Call]) -> str:
    def pairs(call: Call) -> str:
        return "".join(
            f"<arg_key>{key}</arg_key>\n<arg_value>{_bare(value)}</arg_value>\n"
            for key, value in call.arguments.items()
        )

    return "\n".join(f"<tool_call>{call.name}\n{pairs(call)}</tool_call>" for call in calls)


def _pythonic(calls: Sequence[Call]) -> str:
    def one(call: Call) -> str:
        return f"{call.name}({', '.join(f'{key}={value!r}' for key, value in call.arguments.items())})"

    return f"[{', '.join(map(one, calls))}]"


def _deepseek_v3(calls: Sequence[Call]) -> str:
    each = (
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{call.name}\n```json\n{_json(call.arguments)}\n```<｜tool▁call▁end｜>"
        for call in calls
    )
    return "<｜tool▁calls▁begin｜>" + "\n".join(each) + "<｜tool▁calls▁end｜>"


def _deepseek_v31(calls: Sequence[Call]) -> str:
    each = (f"<｜tool▁call▁begin｜>{c.name}<｜tool▁sep｜>{_json(c.arguments)}<｜tool▁call▁end｜>" for c in calls)
    return "<｜tool▁calls▁begin｜>" + "".join(each) + "<｜tool▁calls▁end｜>"


def _kimi_k2(calls: Sequence[Call]) -> str:
    each = (
        f"<|tool_call_begin|>functions.{call.name}:{number}<|tool_call_argument_begin|>{_json(call.arguments)}"
        "<|tool_call_end|>"
        for number, call in enumerate(calls)
    )
    return "<|tool_calls_section_begin|>" + "".join(each) + "<|tool_calls_section_end|>"


WRITERS: Mapping[ToolFormat, Callable[[Sequence[Call]], str]] = {
    "hermes": _hermes,
    "llama3_json": _llama3_json,
    "mistral": _mistral,
    "qwen3_coder": _qwen3_coder,
    "pythonic": _pythonic,
    "deepseek_v3": _deepseek_v3,
    "deepseek_v31": _deepseek_v31,
    "glm45": _glm45,
    "kimi_k2": _kimi_k2,
}
