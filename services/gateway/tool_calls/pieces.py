"""What a model's text is taken apart into: text, and the pieces of calls, in the order in which they were written."""

from __future__ import annotations

import json
from collections.abc import Generator
from dataclasses import dataclass
from typing import TypeAlias, TypeVar


@dataclass(frozen=True, slots=True)
class CallStart:
    """A call has begun. id: the one that the model gave it, where its family does"""

    name: str
    id: str | None = None


@dataclass(frozen=True, slots=True)
class Arguments:
    """The next characters of its arguments, which all together are the text of a JSON object."""

    text: str


@dataclass(frozen=True, slots=True)
class CallEnd:
    """The call is over. is_whole: its arguments are complete, otherwise they stop where the call was cut or broke"""

    is_whole: bool = True


CallPiece: TypeAlias = CallStart | Arguments | CallEnd
Piece: TypeAlias = str | CallPiece
T = TypeVar("T")
# Code that reads text while it arrives: it gives out pieces, and None where it waits for more text.
Reading: TypeAlias = Generator[CallPiece | None, None, T]


class NotACall(Exception):
    """What follows is not how a call goes on. Whatever was read since the last piece was given out is text."""


def preceded(reading: Reading[None], *first: CallPiece) -> Reading[None]:
    """The same pieces after `first`: nothing is given out before `reading` is sure of itself."""
    waiting = first
    for piece in reading:
        if piece is not None:
            yield from waiting
            waiting = ()
        yield piece


def collected(reading: Reading[None], into: list[CallPiece]) -> Reading[None]:
    """Reads all of it without giving anything out."""
    for piece in reading:
        if piece is None:
            yield None
        else:
            into.append(piece)


def json_characters(text: str) -> str:
    """The characters of a JSON string that says `text`, without its quotation marks."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def member(key: str, *, is_first: bool) -> Arguments:
    """The name of an object's member and all that stands before its value."""
    return Arguments(f"{'{' if is_first else ', '}{json.dumps(key, ensure_ascii=False)}: ")


def end_of_object(*, is_empty: bool) -> Arguments:
    return Arguments("{}" if is_empty else "}")
