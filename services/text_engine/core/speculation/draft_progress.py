"""How far a draft model has come in one sequence, and how good its guesses there have been. Carried by the sequence."""

from __future__ import annotations

from collections.abc import Sequence as AbstractSequence
from dataclasses import dataclass, field
from typing import Final

PRIOR_HIT_RATE: Final = 0.7  # how often a guess holds before anything is known: high enough to be tried
RETRY_AFTER_STEPS: Final = 1000  # without a guess: after so many the rate has come most of the way back to the prior


class HitRate:
    """The probability that a guess holds if all before it did, from the latest outcomes.

    It forgets bad news while nobody guesses, so that what was given up is tried again some time.
    """

    def __init__(self, value: float = PRIOR_HIT_RATE, *, outcome_weight: float) -> None:
        self.value = value
        self._outcome_weight = outcome_weight

    def note(self, held: bool) -> None:
        self.value += self._outcome_weight * (held - self.value)

    def forget_a_little(self) -> None:
        """A step has gone by without a guess."""
        self.value += max(0.0, PRIOR_HIT_RATE - self.value) / RETRY_AFTER_STEPS


@dataclass(slots=True)
class DraftProgress:
    """Of one sequence.

    num_computed     leading tokens whose keys and values the draft model's cache holds
    num_preemptions  the sequence's when that was so: one that was preempted since has other blocks
    guesses          the latest, at the positions behind `num_computed`; the cache holds all but the last
    num_noted        leading blocks that `DraftedBlocks` knows to be whole
    num_checked      leading tokens that were looked for in the draft model's vocabulary
    has_unknown      whether one of them is not there
    """

    hit_rate: HitRate
    num_computed: int = 0
    num_preemptions: int = 0
    guesses: list[int] = field(default_factory=list)
    num_noted: int = 0
    num_checked: int = 0
    has_unknown: bool = False

    def knows_tokens(self, token_ids: AbstractSequence[int], vocab_size: int) -> bool:
        """Whether the draft model has all of them. Each is looked at once: this is asked in every step."""
        if not self.has_unknown:
            self.has_unknown = max(token_ids[self.num_checked :], default=0) >= vocab_size
            self.num_checked = len(token_ids)
        return not self.has_unknown

    def settle(self, token_ids: AbstractSequence[int]) -> list[bool]:
        """Whether each of the latest guesses held, up to the first that did not; those that did are computed tokens.

        token_ids   the sequence's, of which some came after the guesses
        """
        came = token_ids[self.num_computed : self.num_computed + len(self.guesses)]
        outcomes: list[bool] = []
        for guess, token_id in zip(self.guesses, came, strict=False):
            outcomes.append(guess == token_id)
            if guess != token_id:
                break
        # The last token is left to compute: there is nothing to guess from without it.
        num_held = min(sum(outcomes), max(0, len(self.guesses) - 1), len(token_ids) - 1 - self.num_computed)
        self.num_computed += max(0, num_held)
        self.guesses = []
        return outcomes
