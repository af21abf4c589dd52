"""Reads one answer: text and the pieces of calls, each as soon as it is certain.

However the text is cut into pieces, the same comes out. Nothing is ever taken back: what turns out not to be a call
before its arguments have begun is text, to the last character; a call that breaks later stops where it broke.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from typing import Final

from services.gateway.output_schema import ToolFunction
from services.gateway.tool_calls.cursor import Cursor, Marks
from services.gateway.tool_calls.formats import call_format
from services.gateway.tool_calls.pieces import CallEnd, NotACall, Piece
from shared.wire.engine import ToolFormat

MAX_FALSE_OPENINGS: Final = 16  # each is read once more: a model that repeats one must not make that quadratic
_NO_MARKS: Final = Marks()


class ToolCallParser:
    """White space next to a call is no content, all other text is. After a few openings of nothing, all is text.

    functions    those that may be called: their schemas give types to arguments that are written without
    by_grammar   the answer was written under `calls_grammar`
    """

    def __init__(self, form: ToolFormat, functions: Sequence[ToolFunction] = (), *, by_grammar: bool = False) -> None:
        self._cursor = Cursor()
        self._format = call_format(form, functions, by_grammar=by_grammar)
        self._num_false_openings = 0
        self._space = _SpaceAroundCalls()
        self._pieces = self._read()

    def feed(self, text: str) -> list[Piece]:
        """What is certain now: text and the pieces of calls, in order."""
        self._cursor.feed(text)
        return list(self._certain())

    def finish(self) -> list[Piece]:
        """What was held back; the answer is over."""
        self._cursor.is_over = True
        return [*self._certain(), *self._space.rest()]

    @property
    def num_held(self) -> int:
        """Characters that are looked at again when more text comes."""
        return self._cursor.num_left

    def _certain(self) -> Iterator[Piece]:
        for piece in self._pieces:
            if piece is None:
                return
            yield from self._space.passed(piece)

    # --- what the model wrote -----------------------------------------------------------------------------------------

    def _read(self) -> Generator[Piece | None, None, None]:
        cursor = self._cursor
        yield (yield from cursor.space())
        sign = yield from cursor.peek()
        if sign and sign in self._format.bare_signs:
            yield from self._read_calls()
        while (yield from cursor.peek()):
            text = yield from cursor.text_before(self._openings)
            cursor.settle()
            if text:
                yield text
            else:
                yield from self._read_calls()

    @property
    def _openings(self) -> Marks:
        return self._format.openings if self._num_false_openings < MAX_FALSE_OPENINGS else _NO_MARKS

    def _read_calls(self) -> Generator[Piece | None, None, None]:
        """From an opening, or from the sign with which an answer without one begins."""
        cursor = self._cursor
        cursor.settle()
        is_open = has_called = False
        try:
            for piece in self._format.read(cursor):
                if piece is not None:
                    cursor.settle()
                    is_open, has_called = not isinstance(piece, CallEnd), True
                yield piece
        except NotACall:
            cursor.rewind()
            if is_open:
                yield CallEnd(is_whole=False)
                return
            self._num_false_openings += 1
            if not has_called:
                yield (yield from cursor.accept_one(*self._format.openings.marks))


class _SpaceAroundCalls:
    """Holds white space back, at the beginning and after a call, until it shows whether text or a call follows."""

    def __init__(self) -> None:
        self._held: list[str] | None = []
        self._has_called = False

    def passed(self, piece: Piece) -> Iterator[Piece]:
        if not isinstance(piece, str):
            self._has_called = True
            self._held = []
            yield piece
        elif self._held is None:
            yield piece
        elif piece.isspace():
            self._held.append(piece)
        elif piece:
            yield "".join([*self._held, piece])
            self._held = None

    def rest(self) -> list[Piece]:
        """At the end of the answer. White space after a call is none of it."""
        return ["".join(self._held)] if self._held and not self._has_called else []
