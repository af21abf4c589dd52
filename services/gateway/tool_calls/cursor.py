"""Text that arrives piece by piece, and the few steps in which calls are read out of it.

Every step that is a generator waits for as much text as it takes to be sure, so a format's code reads as if the text
were there. What has been read leaves the window at once: a long answer costs no more per character than a short one.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cached_property
from typing import Final

from services.gateway.tool_calls.pieces import NotACall, Reading
from shared.text import num_beginning

MAX_NAME_CHARS: Final = 128
_SPACE: Final = re.compile(r"\s*")
# Wider than what the API lets clients name: models invent names, and clients shall see which.
_NAME: Final = re.compile(rf"[\w.:/-]{{0,{MAX_NAME_CHARS}}}")


class Marks:
    """Texts of which one ends what stands before it."""

    def __init__(self, *marks: str) -> None:
        self.marks = marks

    @cached_property
    def pattern(self) -> re.Pattern[str]:
        return re.compile("|".join(map(re.escape, self.marks)) or "(?!)")

    @cached_property
    def longest(self) -> int:
        return max(map(len, self.marks), default=0)

    def num_beginning(self, text: str) -> int:
        """Length of the longest end of `text` that may yet become one of them."""
        return max((num_beginning(text, mark) for mark in self.marks), default=0)


class Cursor:
    """A place in a growing text.

    is_over   nothing will follow, so nothing is waited for any more
    """

    def __init__(self) -> None:
        self._window = ""
        self._position = 0
        self._taken: list[str] = []  # since the last `settle`
        self.is_over = False

    def feed(self, text: str) -> None:
        self._window = self._window[self._position :] + text
        self._position = 0

    @property
    def num_left(self) -> int:
        """Characters that are there and not read yet."""
        return len(self._window) - self._position

    # --- going back ---------------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """There is no way back to what was read until here."""
        self._taken.clear()

    def rewind(self, place: int = 0) -> None:
        """To a `place`, or to where everything was settled."""
        text = "".join(self._taken[place:])
        if len(text) > self._position:  # some of it came with an earlier piece
            self._window = text + self._window[self._position :]
            self._position = len(text)
        self._position -= len(text)
        del self._taken[place:]

    @property
    def place(self) -> int:
        return len(self._taken)

    # --- reading ------------------------------------------------------------------------------------------------------

    def take(self, num_chars: int) -> str:
        text = self._window[self._position : self._position + num_chars]
        self._position += len(text)
        self._taken.append(text)
        return text

    def take_match(self, pattern: re.Pattern[str]) -> str:
        """What matches here, if it is there already."""
        found = pattern.match(self._window, self._position)
        return self.take(len(found.group())) if found else ""

    def take_as(self, read: Callable[[str, int], tuple[str, int]]) -> str:
        """Takes what `read` makes of the text from a position on; it says how far that reaches."""
        written, end = read(self._window, self._position)
        self.take(end - self._position)
        return written

    def peek(self) -> Reading[str]:
        """The next character; none if the text is over."""
        while not self.num_left and not self.is_over:
            yield None
        return self._window[self._position : self._position + 1]

    def accept(self, mark: str) -> Reading[bool]:
        """Takes `mark` if it stands here."""
        while self.num_left < len(mark) and not self.is_over and mark.startswith(self._window[self._position :]):
            yield None
        if not self._window.startswith(mark, self._position):
            return False
        self.take(len(mark))
        return True

    def accept_one(self, *marks: str) -> Reading[str]:
        """Takes the first of `marks` that stands here and says which; empty if none does."""
        for mark in marks:
            if (yield from self.accept(mark)):
                return mark
        return ""

    def expect(self, mark: str) -> Reading[None]:
        if not (yield from self.accept(mark)):
            raise NotACall

    def run(self, signs: re.Pattern[str], max_chars: int) -> Reading[str]:
        """All that `signs` match here, up to what they do not. They must match any beginning of what they match."""
        while True:
            found = signs.match(self._window, self._position)
            num_chars = len(found.group()) if found else 0
            if num_chars < self.num_left or num_chars >= max_chars or self.is_over:
                return self.take(num_chars)
            yield None

    def name(self) -> Reading[str]:
        """A function's name, up to what cannot be part of one."""
        name = yield from self.run(_NAME, MAX_NAME_CHARS)
        if not name:
            raise NotACall
        return name

    def space(self) -> Reading[str]:
        """All white space from here."""
        pieces = []
        while True:
            pieces.append(self.take_match(_SPACE))
            if self.num_left or self.is_over:
                return "".join(pieces)
            yield None

    def text_before(self, marks: Marks) -> Reading[str]:
        """Some text, if there is any before one of `marks` or the end; to be asked again until there is none."""
        while True:
            found = marks.pattern.search(self._window, self._position)
            if found:
                end = found.start()
            else:
                tail = self._window[max(self._position, len(self._window) - marks.longest) :]
                end = len(self._window) - (0 if self.is_over else marks.num_beginning(tail))
            if end > self._position or found or self.is_over:
                return self.take(end - self._position)
            yield None

    def closings(self, *marks: str) -> Reading[None]:
        """Takes these marks, and white space before each, as long as there are any, and settles them."""
        while True:
            place = self.place
            yield from self.space()
            if not (yield from self.accept_one(*marks)):
                self.rewind(place)
                return
            self.settle()
