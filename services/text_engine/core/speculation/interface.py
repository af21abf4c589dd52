"""What the scheduler knows of speculation: a drafter proposes drafts, and what became of them is counted."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from services.text_engine.core.batch import Draft
from services.text_engine.core.sequence import Sequence


class Drafter(Protocol):
    """Guesses at coming tokens, which a step verifies beside its other tokens."""

    def propose(
        self, sequences: list[Sequence], *, num_step_tokens: int, max_draft_tokens: int
    ) -> dict[Sequence, Draft]:
        """What some sequences that decode in this step may go on with: each at most its own `max_draft_tokens`, all
        together at most those given here. The step computes `num_step_tokens` without them."""
        ...


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
