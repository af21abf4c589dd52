"""Other names of the ways in which models write calls of tools and reasoning: those under which vLLM and SGLang know
them where ours differ. Names with a hyphen and with an underscore are the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from shared.reasoning import ReasoningFormat
from shared.wire.engine import ToolFormat

_TOOLS: Final[Mapping[str, ToolFormat]] = {
    "qwen": "hermes",
    "qwen25": "hermes",
    "llama3": "llama3_json",
    "llama4_json": "llama3_json",
    "llama4_pythonic": "pythonic",
    "qwen3_xml": "qwen3_coder",
    "deepseekv3": "deepseek_v3",
    "deepseekv31": "deepseek_v31",
    "glm47": "glm45",
}
_REASONING: Final[Mapping[str, ReasoningFormat]] = dict.fromkeys(
    ("deepseek_r1", "deepseek_v3", "qwen3", "qwen3_thinking", "glm45", "kimi_k2"), "think"
)


def tool_call_parser(name: object) -> object:
    """The name that we use; any other value as it is."""
    return _ours(name, _TOOLS)


def reasoning_parser(name: object) -> object:
    """The name that we use; any other value as it is."""
    return _ours(name, _REASONING)


def _ours(name: object, names: Mapping[str, str]) -> object:
    if not isinstance(name, str):
        return name
    usual = name.replace("-", "_")
    return names.get(usual, usual)
