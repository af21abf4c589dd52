"""Guesses by a second, smaller model: for which answers it is asked, and for how many tokens.

It has a cache of its own with the target's block numbers and block tables, so nobody allocates for it; what it has not
computed of a sequence it takes in before it guesses (drafted_blocks.py). Its guesses are its likeliest tokens, and are
verified as all others are: what it says decides how fast an answer comes, and never which.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as AbstractSequence
from typing import Final, NamedTuple, Protocol

from services.text_engine.core.batch import Draft
from services.text_engine.core.sequence import Sequence
from services.text_engine.core.speculation.draft_choice import (
    CAUTION,
    Guess,
    UndraftedStep,
    choose,
    choose_drafts,
    could_pay,
)
from services.text_engine.core.speculation.draft_progress import DraftProgress, HitRate
from services.text_engine.core.speculation.drafted_blocks import DraftedBlocks
from services.text_engine.core.speculation.prompt_lookup_drafter import PromptLookupDrafter
from services.text_engine.core.speculation.step_costs import StepCosts

MAX_CATCH_UP_TOKENS: Final = 256  # that the draft model takes in beside one step: a long prompt is several steps' work
PAYBACK_TOKENS: Final = 64  # that an answer may have at least before what its row is behind has to have paid
SEQUENCE_OUTCOME_WEIGHT: Final = 0.1
ALL_OUTCOME_WEIGHT: Final = 0.05  # in the rate that sequences begin with


class DraftRow(NamedTuple):
    """Tokens `start : end` of a sequence, which the draft model has not computed, and how many guesses follow them.

    num_guesses   0: it only catches up, and `end` may lie before the sequence's end
    """

    sequence: Sequence
    start: int
    end: int
    num_guesses: int


class DraftModel(Protocol):
    """max_model_len   positions that it has
    vocab_size      ids that it knows
    """

    max_model_len: int
    vocab_size: int

    def guess(self, rows: list[DraftRow]) -> list[list[int]] | None:
        """For each row its guesses; its blocks have room for all but the last. None: it has failed, for good."""
        ...


class Candidate(NamedTuple):
    """A sequence for which the draft model could be asked.

    max_guesses   that it may have
    catch_up_s    what it costs to take in the tokens before, spread over those that are yet to come
    """

    sequence: Sequence
    progress: DraftProgress
    max_guesses: int
    catch_up_s: float

    @property
    def hit_rate(self) -> float:
        return self.progress.hit_rate.value

    @property
    def num_behind(self) -> int:
        return self.sequence.num_tokens - self.progress.num_computed


class DraftModelDrafter:
    """Drafts by a model, or out of a sequence's own text where that is likelier to hold. Satisfies the scheduler's
    `Drafter`.

    costs      of the draft model's steps; the target's are the look-up's
    grow       (sequence, num_tokens): give its blocks room for so many tokens; False: there is none
    hit_rate   of all guesses lately: what a sequence begins with
    """

    def __init__(
        self,
        lookup: PromptLookupDrafter,
        model: DraftModel,
        costs: StepCosts,
        grow: Callable[[Sequence, int], bool],
        *,
        block_size: int,
    ) -> None:
        self.lookup = lookup
        self.costs = costs
        self.hit_rate = HitRate(outcome_weight=ALL_OUTCOME_WEIGHT)
        self._model: DraftModel | None = model
        self._grow = grow
        self._blocks = DraftedBlocks(block_size)

    def propose(
        self, sequences: AbstractSequence[Sequence], *, num_step_tokens: int, max_draft_tokens: int
    ) -> dict[Sequence, Draft]:
        """See `Drafter.propose`."""
        step = UndraftedStep(len(sequences), num_step_tokens, max_draft_tokens)
        if not could_pay(self.lookup.costs, step):
            return {}
        guesses = self.lookup.guesses(sequences)
        candidates = self._candidates(sequences, guesses)
        num_asked, length = plan_drafting(candidates, guesses, self.lookup.costs, self.costs, step)
        for candidate in candidates[num_asked:]:
            candidate.progress.hit_rate.forget_a_little()
        if num_asked:
            guesses |= self._guess(candidates[:num_asked], length)
        else:
            self.hit_rate.forget_a_little()
        return choose_drafts(guesses, self.lookup.costs, step)

    def _candidates(self, sequences: AbstractSequence[Sequence], guesses: Mapping[Sequence, Guess]) -> list[Candidate]:
        """Those for which the model's guesses are likelier to hold than one out of the text, the best first."""
        if self._model is None:
            return []
        candidates = []
        for sequence in sequences:
            if sequence.images:
                continue  # the draft model knows text only
            max_guesses = min(
                self.lookup.num_speculative_tokens,
                sequence.max_draft_tokens,
                self._model.max_model_len - sequence.num_tokens,
            )
            if max_guesses <= 0:
                continue
            candidate = self._candidate(sequence, max_guesses)
            if sequence in guesses and guesses[sequence].chances[0] >= candidate.hit_rate:
                continue
            if candidate.progress.knows_tokens(sequence.token_ids, self._model.vocab_size):
                candidates.append(candidate)
        return sorted(candidates, key=lambda candidate: -candidate.hit_rate)

    def _candidate(self, sequence: Sequence, max_guesses: int) -> Candidate:
        """With what the model's cache holds of the sequence, now that the latest guesses were verified."""
        progress = sequence.draft_progress
        if progress is None:
            rate = HitRate(self.hit_rate.value, outcome_weight=SEQUENCE_OUTCOME_WEIGHT)
            progress = sequence.draft_progress = DraftProgress(rate)
        for held in progress.settle(sequence.token_ids):
            progress.hit_rate.note(held)
            self.hit_rate.note(held)
        self._blocks.look(sequence, progress)
        num_behind = sequence.num_tokens - progress.num_computed
        # One token, the last, is always new, and a second one where all guesses held.
        catch_up_s = self.costs.seconds(num_behind) if num_behind > 2 else 0.0
        return Candidate(sequence, progress, max_guesses, catch_up_s / min(PAYBACK_TOKENS, sequence.max_draft_tokens))

    def _guess(self, asked: list[Candidate], length: int) -> dict[Sequence, Guess]:
        """Let the model take in what it does not know yet, whoever is least behind first, and guess where it does."""
        assert self._model is not None
        rows: list[DraftRow] = []
        num_left = MAX_CATCH_UP_TOKENS
        for candidate in sorted(asked, key=lambda candidate: candidate.num_behind):
            row = self._row(candidate, num_left, length)
            if row.start < row.end:
                rows.append(row)
                num_left -= row.end - row.start
        answers = self._model.guess(rows)
        if answers is None:
            self._model = None
            return {}
        guesses: dict[Sequence, Guess] = {}
        for row, token_ids in zip(rows, answers, strict=True):
            progress = row.sequence.draft_progress
            assert progress is not None
            progress.num_computed, progress.guesses = row.end, token_ids
            self._blocks.note_written(row.sequence, progress, row.start)
            if token_ids:
                chances = [progress.hit_rate.value**number for number in range(1, len(token_ids) + 1)]
                guesses[row.sequence] = Guess(token_ids, chances, "draft_model")
        return guesses

    def _row(self, candidate: Candidate, max_tokens: int, length: int) -> DraftRow:
        sequence, start = candidate.sequence, candidate.progress.num_computed
        end = min(sequence.num_tokens, start + max_tokens)
        num_guesses = min(length, candidate.max_guesses) if end == sequence.num_tokens else 0
        # What the step does not use of the blocks it gives back, as after guesses that did not hold.
        if num_guesses and not self._grow(sequence, end + num_guesses - 1):
            num_guesses = 0
        return DraftRow(sequence, start, end, num_guesses)


def plan_drafting(
    candidates: list[Candidate],
    guesses: Mapping[Sequence, Guess],
    costs: StepCosts,
    draft_costs: StepCosts,
    step: UndraftedStep,
) -> tuple[int, int]:
    """How many of the candidates to ask the model for, and for how many tokens each, so that drafting and verifying
    make the most tokens a second together; nobody if that is without the model.

    candidates   the best first
    guesses      out of the text, candidates' among them, which are used where the model is not
    """
    if not candidates:
        return 0, 0
    may_be_asked = {candidate.sequence for candidate in candidates}
    best = choose([guess.chances for guess in guesses.values()], costs, step).tokens_per_s
    others = choose([guess.chances for s, guess in guesses.items() if s not in may_be_asked], costs, step)
    num_left = step.max_draft_tokens - (others.num_tokens - step.num_tokens)
    num_asked, length = 0, 0
    for num_rows in range(1, len(candidates) + 1):
        rows = candidates[:num_rows]
        chances = [1.0] * num_rows
        num_expected, num_tokens = others.num_expected, others.num_tokens
        drafting_s = sum(row.catch_up_s for row in rows)
        for number in range(1, min(max(row.max_guesses for row in rows), num_left // num_rows) + 1):
            for i, row in enumerate(rows):
                chances[i] *= row.hit_rate if number <= row.max_guesses else 0.0
            num_expected += CAUTION * sum(chances)
            num_tokens += num_rows
            drafting_s += draft_costs.seconds(num_rows)
            rate = num_expected / (costs.seconds(num_tokens) + drafting_s)
            if rate > best:
                best, num_asked, length = rate, num_rows, number
    return num_asked, length
