"""Reasoning in a model's text, taken out piece by piece. What counts as such is told by the engine, never guessed.

However the text is cut into pieces, reasoning and content are the same, and no part of a mark is ever given out.
"""

from __future__ import annotations

from functools import partial

from shared.reasoning import REASONING_MARKS, ReasoningFormat
from shared.text import num_beginning
from shared.wire.engine import Tokens


class ReasoningParser:
    """Reads one answer. `is_open`: the prompt has opened the reasoning, so that only its end is marked.

    Reasoning stands at the beginning or nowhere; one that is never closed is all there is. Line feeds next to a mark
    belong to neither side.
    """

    def __init__(self, form: ReasoningFormat, *, is_open: bool) -> None:
        self._marks = REASONING_MARKS[form]
        self._held = ""
        self._is_at_start = True
        self._drops_line_feeds = False
        self.has_begun = is_open
        self.is_over = False

    def feed(self, text: str) -> tuple[str, str]:
        """What is certain now: reasoning and content."""
        self._held += text
        return self._decide(is_last=False)

    def finish(self) -> tuple[str, str]:
        """What was held back; the answer is over."""
        return self._decide(is_last=True)

    def _decide(self, *, is_last: bool) -> tuple[str, str]:
        if self._is_at_start:
            self._read_opening(is_last=is_last)
        if self._is_at_start:
            return "", ""
        reasoning = "" if self.is_over else self._read_reasoning(is_last=is_last)
        return reasoning, self._read_content() if self.is_over else ""

    def _read_opening(self, *, is_last: bool) -> None:
        """A model may write the mark although the prompt has it already."""
        opening = self._marks.opening
        text = self._held.lstrip()
        if opening.startswith(text) and text != opening and not is_last:
            return
        self._is_at_start = False
        if text.startswith(opening):
            self.has_begun = True
            self._held = text.removeprefix(opening)
        self.is_over = not self.has_begun
        self._drops_line_feeds = self.has_begun

    def _read_reasoning(self, *, is_last: bool) -> str:
        closing = self._marks.closing
        text, mark, after = self._held.partition(closing)
        if mark:
            self.is_over = True
            reasoning, self._held = self._without_line_feeds(text.rstrip("\n")), after
            self._drops_line_feeds = True
            return reasoning
        end = len(text) if is_last else len(text) - num_beginning(text, closing)
        end = len(text[:end].rstrip("\n"))
        self._held = "" if is_last else text[end:]
        return self._without_line_feeds(text[:end])

    def _read_content(self) -> str:
        text, self._held = self._held, ""
        return self._without_line_feeds(text)

    def _without_line_feeds(self, text: str) -> str:
        if self._drops_line_feeds:
            text = text.lstrip("\n")
            self._drops_line_feeds = not text
        return text


class ReasoningReader:
    """Takes the reasoning out of all choices of one answer, event by event.

    num_tokens   of reasoning so far, marks included
    """

    def __init__(self, form: ReasoningFormat, *, is_open: bool) -> None:
        self._new_parser = partial(ReasoningParser, form, is_open=is_open)
        self._parsers: dict[int, ReasoningParser] = {}
        self._num_undecided: dict[int, int] = {}
        self.num_tokens = 0

    def read(self, event: Tokens) -> tuple[Tokens, str]:
        """The event with the text that is content, and the reasoning that came with it."""
        parser = self._parsers.setdefault(event.index, self._new_parser())
        was_over = parser.is_over
        reasoning, content = parser.feed(event.text)
        if event.finish_reason is not None:
            last_reasoning, last_content = parser.finish()
            reasoning, content = reasoning + last_reasoning, content + last_content
        if not was_over:
            self._count(event, has_begun=parser.has_begun)
        return (event if content == event.text else event.model_copy(update={"text": content})), reasoning

    def _count(self, event: Tokens, *, has_begun: bool) -> None:
        num_undecided = self._num_undecided.pop(event.index, 0) + len(event.token_ids)
        if has_begun:
            self.num_tokens += num_undecided
        else:
            self._num_undecided[event.index] = num_undecided
