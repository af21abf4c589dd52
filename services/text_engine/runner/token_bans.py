"""Tokens that a request itself forbids: `allowed_token_ids` and `bad_words`.

What a grammar allows is the grammar's (`grammar`), what operators' classes change is theirs (`logits_processors`).
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import Final

import torch

from services.text_engine.tokenizer import Tokenizer
from shared.errors import InvalidRequest
from shared.sampling import SamplingParams

MAX_REMEMBERED: Final = 64
NOTHING_LEFT: Final = "no token is left to choose: allowed_token_ids, bad_words and the rest forbid them all"


class TokenBans:
    """Satisfies core.sequence.RowProcessor; keeps no state of a sequence.

    allowed   ids that may come at all; empty: all
    words     token sequences whose last token may not follow the others
    """

    def __init__(self, allowed: Iterable[int], words: Iterable[tuple[int, ...]], vocab_size: int) -> None:
        ids = list(allowed)
        self._banned: torch.Tensor | None = None
        if ids:
            self._banned = torch.ones(vocab_size, dtype=torch.bool)
            self._banned[ids] = False
        self._words = tuple(words)

    def apply(self, row: torch.Tensor, generated: list[int]) -> None:
        """row [vocab], changed in place; generated: the answer's token ids so far."""
        if self._banned is not None:
            row.masked_fill_(self._banned.to(row.device), float("-inf"))
        for *before, last in self._words:
            if not before or generated[-len(before) :] == before:
                row[last] = float("-inf")


class BanCompiler:
    """Makes bans and remembers the latest: words are read in the thread that checks a request, and only looked up in
    the engine's, for each of its choices. Any thread may ask."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._made = lru_cache(maxsize=MAX_REMEMBERED)(self._make)

    def for_request(self, sampling: SamplingParams) -> TokenBans | None:
        """None if it forbids nothing. Raises InvalidRequest for a word without tokens."""
        if not sampling.allowed_token_ids and not sampling.bad_words:
            return None
        return self._made(tuple(sampling.allowed_token_ids), tuple(sampling.bad_words))

    def _make(self, allowed: tuple[int, ...], bad_words: tuple[str, ...]) -> TokenBans:
        words = [tokens for word in bad_words for tokens in _spellings(word, self._tokenizer)]
        return TokenBans(allowed, words, self._vocab_size)


def _spellings(word: str, tokenizer: Tokenizer) -> set[tuple[int, ...]]:
    """As it is, and as it begins behind a space; both as vLLM has it."""
    texts = (word, f" {word.lstrip()}")
    spellings = {tuple(tokenizer.encode_literal(text)) for text in texts} - {()}
    if not spellings:
        raise InvalidRequest(f"bad_words holds {word!r}, which has no tokens", param="bad_words")
    return spellings
