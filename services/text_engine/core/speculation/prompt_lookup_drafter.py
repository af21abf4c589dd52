"""Drafts out of the text that is there: for each sequence what its own look-up finds, within a bound on work a step."""

from __future__ import annotations

from collections.abc import Sequence as AbstractSequence
from collections.abc import Set as AbstractSet

from services.text_engine.core.batch import Draft
from services.text_engine.core.sequence import Sequence
from services.text_engine.core.speculation.draft_choice import Guess, UndraftedStep, choose_drafts, could_pay
from services.text_engine.core.speculation.prompt_lookup import MAX_TOKENS_AT_ONCE, PromptLookup
from services.text_engine.core.speculation.step_costs import StepCosts


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
        step = UndraftedStep(len(sequences), num_step_tokens, max_draft_tokens)
        return choose_drafts(self.guesses(sequences), self.costs, step) if could_pay(self.costs, step) else {}

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
