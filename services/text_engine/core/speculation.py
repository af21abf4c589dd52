"""Which guesses at coming tokens a step verifies: those with which it makes more tokens a second than without.

A draft of k tokens makes a decode row 1 + k tokens long. How many of them hold is what the row's logits say; see
runner/acceptance.py. Here is decided, from how good a sequence's guesses have been and from what a longer step costs on
this machine, how many are worth it: none where weights are read for many rows anyway and arithmetic is what takes time.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as AbstractSequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from services.text_engine.core.batch import Draft, DraftMethod
from services.text_engine.core.prompt_lookup import MAX_TOKENS_AT_ONCE, PromptLookup
from services.text_engine.core.sequence import Sequence

# More rows than this take no guesses: their steps are longer than those of one row that were measured, by what
# attention reads for each. With 32 rows guessing made 23 % fewer tokens a second on two cores; with 8, as many or more.
MAX_GUESSING_ROWS: Final = 8
CAUTION: Final = 0.9  # what an expected token counts beside a certain one: costs and chances are estimates


class StepCosts:
    """Seconds that a step of so many tokens takes, measured for some numbers of tokens.

    In between and beyond the last the cost grows along straight lines; it never falls.
    """

    def __init__(self, measured: Iterable[tuple[int, float]]) -> None:
        """measured   (number of tokens, seconds), at least one of them; more tokens take no less"""
        self._num_tokens: list[int] = []
        self._seconds: list[float] = []
        for num_tokens, seconds in sorted(measured):
            self._num_tokens.append(num_tokens)
            self._seconds.append(max(seconds, self._seconds[-1] if self._seconds else 0.0))

    def __str__(self) -> str:
        pairs = zip(self._num_tokens, self._seconds, strict=True)
        return ", ".join(f"{num_tokens}: {1000 * seconds:.3g} ms" for num_tokens, seconds in pairs)

    def seconds(self, num_tokens: int) -> float:
        known, seconds = self._num_tokens, self._seconds
        if num_tokens <= known[0]:
            return seconds[0]
        if len(known) == 1:  # nothing is known of longer steps: as if each token cost as much as the first ones
            return seconds[0] * num_tokens / known[0]
        right = min(bisect.bisect_left(known, num_tokens), len(known) - 1)
        left = right - 1
        slope = (seconds[right] - seconds[left]) / (known[right] - known[left])
        return seconds[left] + slope * (num_tokens - known[left])


class StepRoom(NamedTuple):
    """A step before it is decided what it verifies.

    num_decodes       tokens that it makes without drafts, one for each row that decodes
    num_tokens        that it computes without drafts
    max_draft_tokens  that it has room for, of all drafts together
    """

    num_decodes: int
    num_tokens: int
    max_draft_tokens: int


class Guess(NamedTuple):
    """Tokens that a sequence may go on with.

    chances   for each of them, the probability that it and all before it hold; so they never rise
    """

    token_ids: list[int]
    chances: list[float]
    method: DraftMethod


class Choice(NamedTuple):
    """How much of each of some drafts a step verifies.

    num_expected   tokens that it then makes
    num_tokens     that it computes
    tokens_per_s   the rate
    """

    lengths: list[int]
    num_expected: float
    num_tokens: int
    tokens_per_s: float


@dataclass(slots=True)
class DraftCounts:
    """What was verified of one method's drafts: how many, their tokens, those that held, and those at each position."""

    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_accepted_per_position: list[int] = field(default_factory=list)

    def note(self, num_draft_tokens: int, num_accepted: int) -> None:
        self.num_drafts += 1
        self.num_draft_tokens += num_draft_tokens
        self.num_accepted_tokens += num_accepted
        missing = num_accepted - len(self.num_accepted_per_position)
        self.num_accepted_per_position += [0] * missing
        for position in range(num_accepted):
            self.num_accepted_per_position[position] += 1


class PromptLookupDrafter:
    """Drafts out of each sequence's own text. Satisfies the scheduler's `Drafter`.

    num_speculative_tokens  the longest draft
    never_sampled           ids that stand for input only: whatever follows one of them is no guess
    """

    def __init__(self, costs: StepCosts, *, num_speculative_tokens: int, never_sampled: AbstractSet[int]) -> None:
        self.costs = costs
        self.num_speculative_tokens = num_speculative_tokens
        self._never_sampled = never_sampled

    def propose(
        self, sequences: AbstractSequence[Sequence], *, num_step_tokens: int, max_draft_tokens: int
    ) -> dict[Sequence, Draft]:
        """See `Drafter.propose`."""
        room = StepRoom(len(sequences), num_step_tokens, max_draft_tokens)
        return choose_drafts(self.guesses(sequences), self.costs, room) if could_pay(self.costs, room) else {}

    def guesses(self, sequences: AbstractSequence[Sequence]) -> dict[Sequence, Guess]:
        """As much as may be, for those whose text has an earlier occurrence of their last tokens."""
        found = {sequence: self._guess(sequence, lookup) for sequence, lookup in self._caught_up(sequences)}
        return {sequence: guess for sequence, guess in found.items() if guess.token_ids}

    def _caught_up(self, sequences: AbstractSequence[Sequence]) -> list[tuple[Sequence, PromptLookup]]:
        """Those whose index holds all of their tokens, after this step's share of the work on them. Whoever is least
        behind comes first: nobody goes without guesses because a long prompt is being read."""
        lookups = []
        for sequence in sequences:
            if sequence.max_draft_tokens > 0:
                sequence.lookup = sequence.lookup or PromptLookup(sequence.token_ids, sequence.num_prompt_tokens)
                lookups.append((sequence, sequence.lookup))
        lookups.sort(key=lambda pair: pair[1].num_behind)
        num_left = MAX_TOKENS_AT_ONCE
        caught_up = []
        for sequence, lookup in lookups:
            num_behind = lookup.num_behind
            if lookup.catch_up(num_left):
                caught_up.append((sequence, lookup))
            num_left -= min(num_left, num_behind)
        return caught_up

    def _guess(self, sequence: Sequence, lookup: PromptLookup) -> Guess:
        draft = lookup.propose(min(self.num_speculative_tokens, sequence.max_draft_tokens))
        end = next((i for i, token_id in enumerate(draft) if token_id in self._never_sampled), len(draft))
        return Guess(draft[:end], lookup.chances(end), "ngram")


def could_pay(costs: StepCosts, room: StepRoom) -> bool:
    """Whether one more token, sure to hold, would make more tokens a second of a step; never for many rows."""
    if not 0 < room.num_decodes <= MAX_GUESSING_ROWS:
        return False
    without = room.num_decodes / costs.seconds(room.num_tokens)
    return (room.num_decodes + CAUTION) / costs.seconds(room.num_tokens + 1) > without


def choose_drafts(guesses: Mapping[Sequence, Guess], costs: StepCosts, room: StepRoom) -> dict[Sequence, Draft]:
    """Of each guess as much as is worth verifying."""
    choice = choose([guess.chances for guess in guesses.values()], costs, room)
    return {
        sequence: Draft(guess.token_ids[:length], guess.method)
        for (sequence, guess), length in zip(guesses.items(), choice.lengths, strict=True)
        if length
    }


def choose(chances: AbstractSequence[AbstractSequence[float]], costs: StepCosts, room: StepRoom) -> Choice:
    """How much of each draft makes the most tokens a second of a step; 0 of all if that is without any.

    chances   of each draft's tokens; see `Guess`
    """
    # The likeliest token first. The sort is stable and chances never rise: a draft's tokens stay in their order.
    candidates = sorted(
        ((chance, i) for i, draft_chances in enumerate(chances) for chance in draft_chances),
        key=lambda candidate: -candidate[0],
    )[: room.max_draft_tokens]
    expected = float(room.num_decodes)
    best = Choice([], expected, room.num_tokens, expected / costs.seconds(room.num_tokens))
    for num_tokens, (chance, _) in enumerate(candidates, start=room.num_tokens + 1):
        expected += CAUTION * chance
        rate = expected / costs.seconds(num_tokens)
        if rate > best.tokens_per_s:
            best = Choice([], expected, num_tokens, rate)
    lengths = [0] * len(chances)
    for _, i in candidates[: best.num_tokens - room.num_tokens]:
        lengths[i] += 1
    return best._replace(lengths=lengths)
