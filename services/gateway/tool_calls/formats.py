"""How families of models write calls: one reader for each name that an engine may publish."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from services.gateway.output_schema import ToolFunction
from services.gateway.tool_calls.cursor import Cursor, Marks
from services.gateway.tool_calls.deepseek import DeepSeekCalls
from services.gateway.tool_calls.glm45 import GlmCalls
from services.gateway.tool_calls.grammar import FORCED_STYLES
from services.gateway.tool_calls.json_calls import JsonCalls
from services.gateway.tool_calls.kimi_k2 import KimiCalls
from services.gateway.tool_calls.mistral import MistralCalls
from services.gateway.tool_calls.pieces import Reading
from services.gateway.tool_calls.pythonic import PythonicCalls
from services.gateway.tool_calls.qwen3_coder import QwenCoderCalls
from services.gateway.tool_calls.untyped import ParameterTypes
from shared.wire.engine import ToolFormat


class CallFormat(Protocol):
    """openings     where one of these stands, calls may begin
    bare_signs   an answer that begins with one of these may be a call without an opening
    """

    @property
    def openings(self) -> Marks: ...

    @property
    def bare_signs(self) -> str: ...

    def read(self, cursor: Cursor) -> Reading[None]:
        """One or more calls, from the opening on. Raises NotACall as soon as it is none, before anything is given out
        or, in the middle of a call, after.
        """
        ...


def call_format(form: ToolFormat, functions: Sequence[ToolFunction] = (), *, by_grammar: bool = False) -> CallFormat:
    """functions    those that may be called
    by_grammar   the calls are written as `calls_grammar` has them
    """
    names = frozenset(function.name for function in functions)
    if by_grammar and form not in FORCED_STYLES:
        return JsonCalls(bare_names=names)
    match form:
        case "hermes":
            return JsonCalls("<tool_call>", closing="</tool_call>")
        case "llama3_json":
            return JsonCalls("<|python_tag|>", separator=";", bare_names=names)
        case "mistral":
            return MistralCalls()
        case "deepseek_v3" | "deepseek_v31":
            return DeepSeekCalls()
        case "kimi_k2":
            return KimiCalls()
        case "pythonic":
            return PythonicCalls(names)
    types = {function.name: ParameterTypes(function.parameters) for function in functions}
    return QwenCoderCalls(types) if form == "qwen3_coder" else GlmCalls(types)
