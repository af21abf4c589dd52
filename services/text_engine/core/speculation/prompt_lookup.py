"""Guesses how an answer goes on: as its text went on after an earlier occurrence of its last tokens.

Costs no model. Right where an answer repeats its prompt or itself: quotes, code, tables, corrected text (A. Saxena,
Prompt Lookup Decoding, 2023). Earlier occurrences are found as deflate finds its matches, by chains of positions that
share their last tokens: one dictionary entry and one list entry a token, a bounded number of looks a search.
"""

from __future__ import annotations

from typing import Final

MIN_MATCH: Final = 2  # tokens that an earlier occurrence must share
MAX_MATCH: Final = 6  # of longer ones the latest occurrence is as good as any
MAX_OCCURRENCES: Final = 12  # looked at in one search, the latest first
MAX_TOKENS_AT_ONCE: Final = 4096  # taken in by one step, which must not wait for the index of whole books
# How often a guess is right before anything is known, by the length of its match: low, so that a text which repeats
# nothing costs nothing, and higher for long matches, which are seldom chance.
PRIOR_HIT_RATES: Final = {2: 0.1, 3: 0.2, 4: 0.35, 5: 0.5, 6: 0.6}
NEW_OUTCOME_WEIGHT: Final = 0.2


class PromptLookup:
    """The index of one sequence, and how good its guesses at this sequence's answer have been.

    Every token of the answer is compared with what would have been guessed, whether anybody asked or not: the hit rates
    are known without a single draft being verified.

    num_known           tokens that the index holds so far
    token_ids           the sequence's own list, which only ever grows
    num_prompt_tokens   of them are not its answer, and count for no hit rate
    """

    def __init__(self, token_ids: list[int], num_prompt_tokens: int) -> None:
        self._token_ids = token_ids
        self._num_prompt_tokens = num_prompt_tokens
        self.num_known = 0
        # The position behind the latest occurrence of each pair of tokens; for each position, the one before it that
        # stands behind the same pair, 0 if there is none.
        self._latest: dict[int, int] = {}
        self._previous: list[int] = [0]
        self._hit_rates = dict(PRIOR_HIT_RATES)
        self._source, self._match_length = 0, 0

    @property
    def num_behind(self) -> int:
        """Tokens that the sequence has got since the last `catch_up`."""
        return len(self._token_ids) - self.num_known

    def catch_up(self, max_tokens: int = MAX_TOKENS_AT_ONCE) -> bool:
        """Take in what the sequence has got since the last call. False: that was too much for one call."""
        end = min(len(self._token_ids), self.num_known + max_tokens)
        for position in range(self.num_known, end):
            if position >= self._num_prompt_tokens:
                self._note_outcome(position)
            self._add(position)
            if position + 1 >= self._num_prompt_tokens:
                self._find_source(position + 1)
        self.num_known = end
        return end == len(self._token_ids)

    def propose(self, max_tokens: int) -> list[int]:
        """What followed the longest earlier occurrence of the last tokens; nothing if there is none.

        Where that runs into the end it goes on with itself, as deflate's copies do: "ababab" stays "ababab".
        """
        if not self._source:
            return []
        draft = self._token_ids[self._source : min(self._source + max_tokens, self.num_known)]
        period = len(draft)
        while len(draft) < max_tokens:
            draft.append(draft[-period])
        return draft

    def chances(self, num_tokens: int) -> list[float]:
        """For each of so many proposed tokens, the probability that it and all before it are right."""
        chances: list[float] = []
        chance = 1.0
        for length in range(self._match_length, self._match_length + num_tokens):
            chance *= self._hit_rates[min(length, MAX_MATCH)]
            chances.append(chance)
        return chances

    def _note_outcome(self, position: int) -> None:
        """Whether the token there is what would have been guessed."""
        if not self._source:
            return
        was_right = self._token_ids[self._source] == self._token_ids[position]
        rate = self._hit_rates[self._match_length]
        self._hit_rates[self._match_length] = rate + NEW_OUTCOME_WEIGHT * (was_right - rate)

    def _add(self, position: int) -> None:
        if position == 0:
            self._previous.append(0)
            return
        pair = self._token_ids[position - 1] << 32 | self._token_ids[position]
        self._previous.append(self._latest.get(pair, 0))
        self._latest[pair] = position + 1

    def _find_source(self, end: int) -> None:
        """The position behind the longest earlier occurrence of the tokens before `end`; of equals, the latest."""
        token_ids = self._token_ids
        self._source, self._match_length = 0, 0
        candidate = self._previous[end]
        for _ in range(MAX_OCCURRENCES):
            if not candidate:
                return
            length = MIN_MATCH
            longest = min(candidate, MAX_MATCH)
            while length < longest and token_ids[candidate - 1 - length] == token_ids[end - 1 - length]:
                length += 1
            if length > self._match_length:
                self._source, self._match_length = candidate, length
            if length == MAX_MATCH:
                return
            candidate = self._previous[candidate]
