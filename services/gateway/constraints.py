"""What an answer must look like, from everything that a request can say about it: formats, vLLM's extras, and tools."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import orjson

from services.gateway.base_schema import JsonObject
from services.gateway.json_schema import closed
from services.gateway.output_schema import NamedTool, ResponseFormat, StructuredOutputs, ToolFunction
from services.gateway.schema import ChatRequest, GenerationBody
from services.gateway.tool_calls.grammar import calls_grammar
from services.gateway.tool_calls.reader import ToolReader
from shared.errors import InvalidRequest
from shared.sampling import Constraint, SamplingParams
from shared.wire.engine import ToolFormat

_JSON_KINDS = frozenset({"json_object", "json_schema"})


def constraint_of(body: GenerationBody) -> Constraint | None:
    """The one constraint that the body asks for. Raises InvalidRequest naming the second, or one that says nothing."""
    asked = list(_constraints(body))
    if len(asked) > 1:
        first, second = asked[0].param, asked[1].param
        raise InvalidRequest(f"{first} and {second} both say what the answer looks like; send one", param=second)
    return asked[0] if asked else None


def _constraints(body: GenerationBody) -> Iterator[Constraint]:
    if body.response_format is not None:
        yield from _of_format(body.response_format)
    if body.structured_outputs is not None:
        yield from _of_outputs(body.structured_outputs)
    yield from _of_extras(body.guided_json, body.guided_regex, body.guided_choice, body.guided_grammar, "guided_")


def _of_format(given: ResponseFormat) -> Iterator[Constraint]:
    if given.json_schema is not None:
        lenient = given.json_schema.strict is False
        value = _schema_text(given.json_schema.schema_, lenient=lenient)
        yield Constraint(kind="json_schema", value=value, param="response_format.json_schema.schema")
    elif given.type == "json_object":
        yield Constraint(kind="json_object", param="response_format")


def _of_outputs(given: StructuredOutputs) -> Iterator[Constraint]:
    if given.json_object:
        yield Constraint(kind="json_object", param="structured_outputs.json_object")
    yield from _of_extras(given.json_, given.regex, given.choice, given.grammar, "structured_outputs.")


def _of_extras(
    schema: JsonObject | None, regex: str | None, choice: list[str] | None, grammar: str | None, prefix: str
) -> Iterator[Constraint]:
    """vLLM's four, the same in both spellings. An empty one would allow no answer; of schemas, `{}` allows any JSON."""
    for name, given in (("regex", regex), ("choice", choice), ("grammar", grammar)):
        if given is not None and not given:
            raise InvalidRequest(f"{prefix}{name} is empty: no answer could match it", param=f"{prefix}{name}")
    if schema is not None:
        yield Constraint(kind="json_schema", value=_schema_text(schema), param=f"{prefix}json")
    if regex:
        yield Constraint(kind="regex", value=regex, param=f"{prefix}regex")
    if choice:
        if not all(choice):
            param = f"{prefix}choice"
            raise InvalidRequest(f"{param} holds an empty text; each choice needs at least one character", param=param)
        yield Constraint(kind="choice", value=orjson.dumps(choice).decode(), param=f"{prefix}choice")
    if grammar:
        yield Constraint(kind="grammar", value=grammar, param=f"{prefix}grammar")


def _schema_text(schema: JsonObject, *, lenient: bool = False) -> str:
    """lenient   keywords that the grammar library does not know are passed over instead of refused"""
    extra: JsonObject = {"x-guidance": {"lenient": True}} if lenient else {}
    return orjson.dumps(closed(schema) | extra).decode()


# --- tools ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ToolPlan:
    """How the tools of one chat are offered and its calls read.

    functions    those that may be called; empty: none may
    is_forced    nothing but calls is allowed
    parallel     several calls in one answer are
    """

    form: ToolFormat
    functions: tuple[ToolFunction, ...] = ()
    is_forced: bool = False
    parallel: bool = True

    @classmethod
    def of(cls, body: ChatRequest, form: ToolFormat) -> ToolPlan:
        """Raises InvalidRequest if `tools` and `tool_choice` contradict each other."""
        names = [tool.function.name for tool in body.tools]
        if len(set(names)) < len(names):
            raise InvalidRequest("two tools have the same name; a call could not tell which it means", param="tools")
        choice = body.tool_choice
        wanted = choice.function.name if isinstance(choice, NamedTool) else None
        functions = tuple(tool.function for tool in body.tools if wanted in (None, tool.function.name))
        is_forced = wanted is not None or choice == "required"
        if is_forced and not functions:
            about = "there are no tools" if wanted is None else f"there is no tool of the name {wanted[:80]!r}"
            raise InvalidRequest(f"tool_choice demands a call, but {about}", param="tool_choice")
        return cls(form, () if choice == "none" else functions, is_forced, body.parallel_tool_calls)

    def reader(self, content: Constraint | None) -> ToolReader | None:
        """content   as given to `applied_to`"""
        if not self.functions:
            return None
        by_grammar = self.is_forced or content is not None
        return ToolReader(self.form, self.functions, by_grammar=by_grammar, parallel=self.parallel)

    def applied_to(self, sampling: SamplingParams, content: Constraint | None) -> SamplingParams:
        """What the model may say, given what its content must look like if there is any."""
        if not self.functions:
            return replace(sampling, constraint=content)
        if not self.is_forced:
            # The marks of calls may be special tokens.
            sampling = replace(sampling, skip_special_tokens=False)
        return replace(sampling, constraint=self._constraint(content))

    def _constraint(self, content: Constraint | None) -> Constraint | None:
        if content is not None and content.kind not in _JSON_KINDS:
            raise InvalidRequest(
                f"{content.param} leaves no room for calls; leave out tools, or send tool_choice 'none'",
                param=content.param,
            )
        if self.is_forced:
            return self._calls()
        if content is None:
            return None
        schema = orjson.loads(content.value) if content.value else {"type": "object"}
        return self._calls(or_answer=schema, param=content.param)

    def _calls(self, or_answer: JsonObject | None = None, param: str = "tools") -> Constraint:
        grammar = calls_grammar(self.functions, self.form, parallel=self.parallel, or_answer=or_answer)
        return Constraint(kind="grammar", value=grammar, param=param)
