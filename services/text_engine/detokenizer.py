"""Tokens to text, one at a time: whole UTF-8 characters only, and nothing that may still become a stop string.

The text released over time is the same whatever the tokens' boundaries, so streamed and whole answers are equal.
"""

from __future__ import annotations

import codecs

from services.text_engine.tokenizer import Tokenizer
from shared.text import num_beginning


class Detokenizer:
    """The text of one growing answer.

    stop           the earliest *ending* match ends the text just before it (or after it, if `include_stop`)
    skip_special   special tokens add nothing; otherwise their spelling
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        stop: tuple[str, ...] = (),
        include_stop: bool = False,
        skip_special: bool = True,
    ) -> None:
        self._bytes_of = tokenizer.token_bytes if skip_special else tokenizer.spelled_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._strip_space = tokenizer.strips_leading_space
        self._stop = stop
        self._include_stop = include_stop
        self._held = ""  # decoded, but possibly the beginning of a stop string
        self.matched_stop: str | None = None

    def append(self, token_id: int, *, search_stop: bool = True) -> str:
        """Take one token in and give back the text that is safe to release now.

        After a stop string was found (`matched_stop` is set) nothing more may be appended.
        """
        text = self._decoder.decode(self._bytes_of(token_id))
        if self._strip_space and text:
            text = text.removeprefix(" ")
            self._strip_space = False
        if not self._stop:
            return text
        self._held += text
        if search_stop and (found := self._find_stop()) is not None:
            released, self._held = self._held[:found], ""
            return released
        keep = max(num_beginning(self._held, stop) for stop in self._stop) if search_stop else 0
        split = len(self._held) - keep
        released, self._held = self._held[:split], self._held[split:]
        return released

    def finish(self) -> str:
        """The answer ended for another reason: release what was held. An unfinished character is dropped."""
        released, self._held = self._held, ""
        return released

    def _find_stop(self) -> int | None:
        """Where the text ends, if a stop string is complete."""
        ends = []
        for stop in self._stop:
            start = self._held.find(stop)
            if start >= 0:
                ends.append((start + len(stop), start, stop))
        if not ends:
            return None
        end, start, self.matched_stop = min(ends)
        return end if self._include_stop else start
