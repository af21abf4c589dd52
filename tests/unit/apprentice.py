"""A draft model for scheduler tests: a KvRunner's model with keys of its own, in slots of the same blocks.

It says what the scheduler's model will say, unless a key that it reads is wrong: then it complains.
"""

from __future__ import annotations

from services.text_engine.core.sequence import Sequence
from services.text_engine.core.speculation.draft_model import DraftModelDrafter, DraftRow
from services.text_engine.core.speculation.prompt_lookup_drafter import PromptLookupDrafter
from services.text_engine.core.speculation.step_costs import StepCosts
from tests.unit.test_scheduler import Driver, content, next_word

FREE = StepCosts([(1, 1.0), (256, 1.0)])
CHEAP = StepCosts([(1, 0.05), (256, 0.05)])


class Apprentice:
    """num_right     leading guesses of each row that are right
    vocab_size    larger ids are unknown to it
    num_computed  tokens that it took in so far, guesses not among them
    calls         rows of each call
    """

    def __init__(self, num_right: int = 99, *, max_model_len: int = 10_000, vocab_size: int = 1 << 32) -> None:
        self.max_model_len = max_model_len
        self.vocab_size = vocab_size
        self.num_right = num_right
        self.num_computed = 0
        self.calls: list[list[DraftRow]] = []
        self.is_broken = False
        self._block_size = 0
        self._keys: dict[int, int] = {}

    def joins(self, driver: Driver, costs: StepCosts = FREE, draft_costs: StepCosts = CHEAP) -> DraftModelDrafter:
        """Guess for the driver's scheduler from now on."""
        self._block_size = driver.blocks.block_size
        lookup = PromptLookupDrafter(costs, num_speculative_tokens=4, never_sampled=frozenset())
        drafter = DraftModelDrafter(lookup, self, draft_costs, driver.blocks.grow, block_size=self._block_size)
        driver.scheduler.drafter = drafter
        return drafter

    def guess(self, rows: list[DraftRow]) -> list[list[int]] | None:
        if self.is_broken:
            return None
        assert len({row.sequence for row in rows}) == len(rows)
        self.calls.append(rows)
        return [self._guess(row) for row in rows]

    def _guess(self, row: DraftRow) -> list[int]:
        sequence = row.sequence
        assert not sequence.images
        assert row.start < row.end <= sequence.num_tokens
        self.num_computed += row.end - row.start
        for position in range(row.start, row.end):
            self._write(sequence, position, content(sequence, position))
        self._check(sequence, row.end)
        guesses: list[int] = []
        for number in range(row.num_guesses):
            end = row.end + number
            if number:
                self._write(sequence, end - 1, (0, guesses[-1]))
            word = next_word([self._keys[self._slot(sequence, position)] for position in range(end)])
            guesses.append(word if number < self.num_right else word + 1000)
        return guesses

    def _write(self, sequence: Sequence, position: int, what: tuple[int, int]) -> None:
        key = self._keys[self._slot(sequence, position - 1)] if position else 0
        self._keys[self._slot(sequence, position)] = hash((key, what))

    def _check(self, sequence: Sequence, end: int) -> None:
        key = 0
        for position in range(end):
            key = hash((key, content(sequence, position)))
            assert self._keys[self._slot(sequence, position)] == key, f"what it knows of {position} is wrong"

    def _slot(self, sequence: Sequence, position: int) -> int:
        block = sequence.block_table[position // self._block_size]
        return block * self._block_size + position % self._block_size
