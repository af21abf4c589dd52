"""A drafter for scheduler tests: it knows what the model will say, and makes one mistake in every draft."""

from __future__ import annotations

from collections import defaultdict

from services.text_engine.core.batch import Draft
from services.text_engine.core.sequence import Sequence
from tests.unit.test_scheduler import answer_alone


class Guesser:
    """num_right      leading tokens of each draft that are right; then comes a wrong one, and right ones again
    num_guesses    the longest draft
    """

    def __init__(self, num_right: int, num_guesses: int = 5) -> None:
        self.num_right = num_right
        self.num_guesses = num_guesses
        self._answers: dict[Sequence, list[int]] = {}
        self.num_drafted: dict[str, int] = defaultdict(int)

    def propose(
        self, sequences: list[Sequence], *, num_step_tokens: int, max_draft_tokens: int
    ) -> dict[Sequence, Draft]:
        drafts: dict[Sequence, Draft] = {}
        for sequence in sequences:
            if sequence not in self._answers:
                self._answers[sequence] = answer_alone(sequence)
            start = sequence.num_generated_tokens
            length = min(self.num_guesses, sequence.max_draft_tokens, max_draft_tokens)
            draft = self._answers[sequence][start : start + length]
            if self.num_right < len(draft):
                draft[self.num_right] += 1000  # no word of the model's
            if draft:
                drafts[sequence] = Draft(draft, "ngram")
                max_draft_tokens -= len(draft)
                self.num_drafted[sequence.request_id] += len(draft)
        return drafts
