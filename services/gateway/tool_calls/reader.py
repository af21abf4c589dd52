"""The calls of one answer, event by event, as clients get them: with ids, numbers, and deltas of their arguments."""

from __future__ import annotations

import secrets
import string
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, Final

from services.gateway.output_schema import ToolFunction
from services.gateway.tool_calls.parser import ToolCallParser
from services.gateway.tool_calls.pieces import Arguments, CallEnd, CallPiece, CallStart, Piece
from shared.wire.engine import Tokens, ToolFormat

_ID_SIGNS: Final = string.ascii_letters + string.digits


@dataclass(frozen=True, slots=True)
class CallDelta:
    """What an event adds to a call.

    number      of the call in its choice
    id, name    with the first delta of a call and only there
    is_last     nothing will be added; is_whole: and nothing is missing
    """

    number: int
    id: str = ""
    name: str = ""
    arguments: str = ""
    is_last: bool = False
    is_whole: bool = False

    def to_chunk(self) -> dict[str, Any] | None:
        """An entry of a chat chunk's `tool_calls`; None if there is nothing to tell."""
        if self.name:
            function = {"name": self.name, "arguments": self.arguments}
            return {"index": self.number, "id": self.id, "type": "function", "function": function}
        return {"index": self.number, "function": {"arguments": self.arguments}} if self.arguments else None


@dataclass(slots=True)
class GrowingCall:
    """A call as far as its deltas go."""

    id: str
    name: str
    pieces: list[str] = field(default_factory=list)
    is_whole: bool = False

    def add(self, delta: CallDelta) -> None:
        self.pieces.append(delta.arguments)
        self.is_whole = self.is_whole or delta.is_whole

    @property
    def arguments(self) -> str:
        return "".join(self.pieces)

    def to_body(self) -> dict[str, Any]:
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


class ToolReader:
    """Takes the calls out of all choices of one answer.

    by_grammar   the answer is written under `calls_grammar`
    parallel     otherwise the first call of a choice is its only one
    """

    def __init__(
        self, form: ToolFormat, functions: Sequence[ToolFunction] = (), *, by_grammar: bool, parallel: bool
    ) -> None:
        self._form = form
        self._functions = functions
        self._by_grammar = by_grammar
        self._parallel = parallel
        self._choices: dict[int, _Choice] = {}

    def read(self, event: Tokens) -> list[tuple[Tokens, list[CallDelta]]]:
        """The event's text that is no call, and what it adds to calls after that text; several such where text follows
        calls. Tokens and log-probabilities are the first one's, the end is the last one's.
        """
        choice = self._choices.get(event.index)
        if choice is None:
            parser = ToolCallParser(self._form, self._functions, by_grammar=self._by_grammar)
            choice = self._choices[event.index] = _Choice(parser)
        parts = choice.read(event)
        calls = [delta for _, deltas in parts for delta in deltas]
        if not self._parallel and any(delta.number for delta in calls):
            parts = [(text, [delta for delta in deltas if not delta.number]) for text, deltas in parts]
        if len(parts) == 1:
            [(text, deltas)] = parts
            return [(event.model_copy(update={"text": text, "finish_reason": choice.end(event)}), deltas)]
        first = event.model_copy(update={"text": parts[0][0], "finish_reason": None, "stop_reason": None})
        events = [first, *(Tokens(index=event.index, text=text, token_ids=[]) for text, _ in parts[1:])]
        end = {"finish_reason": choice.end(event), "stop_reason": event.stop_reason}
        events[-1] = events[-1].model_copy(update=end)
        return list(zip(events, (deltas for _, deltas in parts), strict=True))


class _Choice:
    def __init__(self, parser: ToolCallParser) -> None:
        self._parser = parser
        self._num_calls = 0

    def read(self, event: Tokens) -> list[tuple[str, list[CallDelta]]]:
        pieces = self._parser.feed(event.text)
        if event.finish_reason is not None:
            pieces += self._parser.finish()
        parts: list[tuple[str, list[CallDelta]]] = [("", [])]
        for piece in _merged(pieces):
            if not isinstance(piece, str):
                parts[-1][1].append(self._delta(piece))
            elif parts[-1][1]:
                parts.append((piece, []))
            else:
                parts[-1] = (piece, [])
        return parts

    def end(self, event: Tokens) -> str | None:
        return "tool_calls" if event.finish_reason == "stop" and self._num_calls else event.finish_reason

    def _delta(self, piece: CallPiece) -> CallDelta:
        if isinstance(piece, CallStart):
            self._num_calls += 1
        number = self._num_calls - 1
        match piece:
            case CallStart(name=name, id=given):
                return CallDelta(number, id=given or _new_id(), name=name)
            case Arguments(text=text):
                return CallDelta(number, arguments=text)
            case CallEnd(is_whole=is_whole):
                return CallDelta(number, is_last=True, is_whole=is_whole)


def _merged(pieces: Iterable[Piece]) -> Iterator[Piece]:
    """Neighbours of the same kind in one: an event is one delta of text, or of a call's arguments."""
    for kind, group in groupby(pieces, type):
        if kind is str:
            yield "".join(str(text) for text in group)
        elif kind is Arguments:
            yield Arguments("".join(piece.text for piece in group if isinstance(piece, Arguments)))
        else:
            yield from group


def _new_id() -> str:
    """Nine letters and digits: what Mistral's templates demand of an id that comes back, and enough for everyone."""
    return "".join(secrets.choice(_ID_SIGNS) for _ in range(9))
