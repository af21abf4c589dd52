"""Calls of tools in a model's text: read out of it piece by piece, and the grammar that makes a model write them.

Pure text in, text and calls out. However the text is cut into pieces, the calls and the text around them are the same.
A call is given out when it is complete, not before: what turns out not to be one is text, to the last character.
"""

from __future__ import annotations

import json
import re
import secrets
import string
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from pydantic import JsonValue

from services.gateway.base_schema import JsonObject
from services.gateway.json_schema import closed
from services.gateway.output_schema import ToolFunction
from shared.text import num_beginning
from shared.wire.engine import Tokens, ToolFormat

MAX_FALSE_OPENINGS = 16  # each is read to its end once more: a model that repeats one must not make that quadratic
MAX_FORCED_CALLS = 16  # a model that was never taught tools would go on for ever
_JSON_SIGN: Final = re.compile(r'["\\{}\[\]]')
_ID_SIGNS: Final = string.ascii_letters + string.digits
_JSON_STYLE: Final = {"whitespace_pattern": " "}


@dataclass(frozen=True, slots=True)
class ToolCall:
    """arguments   JSON text, as the API gives it to clients"""

    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class _Marks:
    """How a family of models writes calls: `opening`, JSON of a call or of a list of calls, `closing`.

    separator   between calls after one opening
    arguments   the name under which a call carries its arguments
    is_bare     an answer that begins with a call's JSON is a call, too: models often leave the opening out
    forced      what a grammar puts before the first, between two, and after the last call; the opening is left out
                where it is a special token, which a grammar of text cannot spell
    """

    opening: str
    forced: tuple[str, str, str]
    closing: str = ""
    separator: str = ""
    arguments: str = "arguments"
    is_bare: bool = False


_MARKS: Final[dict[ToolFormat, _Marks]] = {
    "hermes": _Marks(
        "<tool_call>",
        ("<tool_call>\n", "\n</tool_call>\n<tool_call>\n", "\n</tool_call>"),
        closing="</tool_call>",
    ),
    "llama3_json": _Marks("<|python_tag|>", ("", "; ", ""), separator=";", arguments="parameters", is_bare=True),
    "mistral": _Marks("[TOOL_CALLS]", ("[", ", ", "]")),
}


# --- reading --------------------------------------------------------------------------------------------------------


class ToolCallParser:
    """Reads one answer. `forced`: it was written under `calls_grammar`, so it begins with a call.

    White space next to a call is no content; all other text is. After a few openings that opened nothing, all is text.
    """

    def __init__(self, form: ToolFormat, *, forced: bool = False) -> None:
        self._marks = _MARKS[form]
        self._held = ""  # what is not decided yet; begins with the call's opening while there is a `_call`
        self._call: _JsonValue | None = None
        self._follows_call = False
        self._space: str | None = ""  # white space at the beginning or after a call, until text or a call follows
        self._may_be_bare = forced or self._marks.is_bare
        self._num_calls = 0
        self._num_false_openings = 0

    def feed(self, text: str) -> list[str | ToolCall]:
        """What is certain now: text and calls, in order."""
        self._held += text
        return list(self._decide(is_over=False))

    def finish(self) -> list[str | ToolCall]:
        """What was held back; the answer is over."""
        decided = list(self._decide(is_over=True))
        if self._space and not self._num_calls:
            decided.append(self._space)
        return decided

    def _decide(self, *, is_over: bool) -> Iterator[str | ToolCall]:
        while self._held:
            before = len(self._held), self._call, self._follows_call
            if self._call is not None:
                yield from self._read_call(self._call, is_over=is_over)
            elif self._follows_call:
                self._read_mark_after_call(is_over=is_over)
            else:
                yield from self._read_text(is_over=is_over)
            if before == (len(self._held), self._call, self._follows_call):
                return

    def _read_text(self, *, is_over: bool) -> Iterator[str]:
        """Up to the next opening, or to what may become one."""
        if self._may_be_bare and (text := self._held.lstrip()):
            self._may_be_bare = False
            if text[0] in "{[":
                self._space = (self._space or "") + self._held.removesuffix(text)
                self._held = text
                self._call = _JsonValue(0)
                return
        opening = self._marks.opening
        end = self._held.find(opening) if self._num_false_openings < MAX_FALSE_OPENINGS else len(self._held)
        if end == len(self._held):
            text, self._held = self._held, ""
            yield from self._give(text)
            return
        if end >= 0:
            self._call = _JsonValue(len(opening))
        else:
            end = len(self._held) - (0 if is_over else num_beginning(self._held, opening))
        text, self._held = self._held[:end], self._held[end:]
        yield from self._give(text)

    def _read_call(self, call: _JsonValue, *, is_over: bool) -> Iterator[str | ToolCall]:
        end = call.end(self._held)
        if end is None and not is_over:
            return
        self._call = None
        calls = [] if end is None else self._calls_in(self._held[call.start : end])
        if not calls:  # what opened it is text, and what follows may open another
            self._num_false_openings += 1
            text, self._held = self._held[: call.start], self._held[call.start :]
            yield from self._give(text)
            return
        self._held = self._held[end:]
        self._num_calls += len(calls)
        self._follows_call = True
        self._space = ""
        yield from calls

    def _read_mark_after_call(self, *, is_over: bool) -> None:
        closing, separator = self._marks.closing, self._marks.separator
        text = self._held.lstrip()
        if (closing or separator).startswith(text) and (closing or separator) != text and not is_over:
            return
        self._follows_call = False
        if closing and text.startswith(closing):
            self._held = text.removeprefix(closing)
        elif separator and text.startswith(separator):
            self._held = text
            self._call = _JsonValue(len(separator))

    def _give(self, text: str) -> Iterator[str]:
        if self._space is not None:
            text = self._space + text
            self._space = None if text.strip() else text
        if text and self._space is None:
            yield text

    def _calls_in(self, text: str) -> list[ToolCall]:
        """The calls that this JSON is, or none at all."""
        try:
            value = json.loads(text, parse_constant=_refuse_constant)
            return [self._call_of(item) for item in (value if isinstance(value, list) else [value])]
        except (ValueError, TypeError, KeyError, RecursionError):
            return []

    def _call_of(self, value: Any) -> ToolCall:
        """Raises TypeError, KeyError or ValueError if it is none."""
        # Bare JSON may be an answer: only what carries arguments is a call.
        key = self._marks.arguments
        name, arguments = value["name"], value[key] if self._marks.is_bare else value.get(key, {})
        if not isinstance(name, str) or not name or not isinstance(arguments, dict):
            raise TypeError
        written = json.dumps(arguments, ensure_ascii=False)
        f"{name}{written}".encode()  # half of a surrogate pair cannot be sent to anyone
        return ToolCall(name, written)


class _JsonValue:
    """Finds where the JSON object or list ends that begins at `start` of a growing text; reads each character once."""

    def __init__(self, start: int) -> None:
        self.start = start
        self._position = start
        self._depth = 0
        self._is_in_string = False

    def end(self, text: str) -> int | None:
        """The index after it, None if it is not complete yet; `start` if something else begins there."""
        if not self._depth:
            rest = text[self._position :].lstrip()
            if not rest:
                return None
            if rest[0] not in "{[":
                return self.start
        while sign := _JSON_SIGN.search(text, self._position):
            self._position = sign.end()
            if self._read(sign.group()):
                return self._position
        self._position = max(self._position, len(text))
        return None

    def _read(self, sign: str) -> bool:
        """Whether the value ends with this sign."""
        if self._is_in_string:
            if sign == "\\":
                self._position += 1  # whatever is escaped, it is no sign
            self._is_in_string = sign != '"'
        elif sign == '"':
            self._is_in_string = True
        elif sign != "\\":
            self._depth += 1 if sign in "{[" else -1
        return self._depth == 0


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


@dataclass(frozen=True, slots=True)
class NumberedCall:
    """A call as one answer's clients know it."""

    id: str
    number: int
    call: ToolCall

    def to_body(self) -> dict[str, Any]:
        function = {"name": self.call.name, "arguments": self.call.arguments}
        return {"id": self.id, "type": "function", "function": function}


class ToolReader:
    """Takes the calls out of all choices of one answer, event by event.

    parallel   otherwise the first call of a choice is its only one
    """

    def __init__(self, form: ToolFormat, *, forced: bool, parallel: bool) -> None:
        self._new_parser = partial(ToolCallParser, form, forced=forced)
        self._parsers: dict[int, ToolCallParser] = {}
        self._num_calls: Counter[int] = Counter()
        self._parallel = parallel

    def read(self, event: Tokens) -> tuple[Tokens, list[NumberedCall]]:
        """The event with the text that is no call, and the calls that are complete with it."""
        parser = self._parsers.setdefault(event.index, self._new_parser())
        pieces = parser.feed(event.text)
        if event.finish_reason is not None:
            pieces += parser.finish()
        calls = [self._numbered(event.index, piece) for piece in pieces if isinstance(piece, ToolCall)]
        text = "".join(piece for piece in pieces if isinstance(piece, str))
        has_called = event.finish_reason == "stop" and self._num_calls[event.index]
        reason = "tool_calls" if has_called else event.finish_reason
        read = event.model_copy(update={"text": text, "finish_reason": reason})
        return read, [call for call in calls if self._parallel or call.number == 0]

    def _numbered(self, choice: int, call: ToolCall) -> NumberedCall:
        number = self._num_calls[choice]
        self._num_calls[choice] += 1
        return NumberedCall(_new_id(), number, call)


def _new_id() -> str:
    """Nine letters and digits: what Mistral's templates demand of an id that comes back, and enough for everyone."""
    return "".join(secrets.choice(_ID_SIGNS) for _ in range(9))


# --- writing --------------------------------------------------------------------------------------------------------


def calls_grammar(
    functions: Sequence[ToolFunction], form: ToolFormat, *, parallel: bool, or_answer: JsonObject | None = None
) -> str:
    """A Lark grammar of answers that are nothing but calls, with arguments as the tools' schemas want them.

    parallel    several calls are allowed, one otherwise
    or_answer   a JSON schema: an answer may be such JSON instead
    """
    marks = _MARKS[form]
    first, between, last = (json.dumps(text) if text else "" for text in marks.forced)
    more = f" ({between} call){{0,{MAX_FORCED_CALLS - 1}}}" if parallel else ""
    rules = [
        "start: calls" + ("" if or_answer is None else " | answer"),
        f"calls: {first} call{more} {last}",
        "call: " + " | ".join(f"call_{i}" for i in range(len(functions))),
    ]
    for i, function in enumerate(functions):
        opening = json.dumps(f'{{"name": "{function.name}", "{marks.arguments}": ')
        rules += [f'call_{i}: {opening} arguments_{i} "}}"', f"arguments_{i}: %json {_arguments_schema(function)}"]
    if or_answer is not None:
        rules.append(f"answer: %json {_styled(or_answer)}")
    return "\n".join(rules)


def _arguments_schema(function: ToolFunction) -> str:
    """A document of its own, so that its references stay true. Without `strict` the schema is followed as far as the
    grammar library knows it."""
    schema = function.parameters or {"type": "object", "properties": {}, "additionalProperties": False}
    return _styled(closed(schema), lenient=not function.strict)


def _styled(schema: JsonObject, **style: JsonValue) -> str:
    given = schema.get("x-guidance")
    merged = {**_JSON_STYLE, **style, **(given if isinstance(given, dict) else {})}
    return json.dumps({**schema, "x-guidance": merged}, ensure_ascii=False)
