"""What one step computes: for each scheduled sequence, how many of its next tokens. And what came of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from services.text_engine.core.sequence import Sequence


class ScheduledSequence(NamedTuple):  # made for every row of every step: a frozen dataclass takes thrice as long
    """Tokens `start : end` of one sequence run through the model in this step."""

    sequence: Sequence
    start: int
    num_new_tokens: int

    @property
    def end(self) -> int:
        return self.start + self.num_new_tokens

    @property
    def samples(self) -> bool:
        """Whether the step reaches the sequence's last token, so that the next one can be sampled."""
        return self.end == self.sequence.num_tokens


@dataclass(slots=True)
class Batch:
    """One ragged batch; decode rows and prefill chunks are the same thing with different lengths."""

    scheduled: list[ScheduledSequence] = field(default_factory=list)

    @property
    def is_empty(self) -> bool:
        return not self.scheduled

    @property
    def num_tokens(self) -> int:
        return sum(item.num_new_tokens for item in self.scheduled)

    @property
    def sampling(self) -> list[ScheduledSequence]:
        return [item for item in self.scheduled if item.samples]


@dataclass(frozen=True, slots=True)
class Logprobs:
    """The chosen token's log-probability and the best tokens', best first."""

    logprob: float
    top_token_ids: list[int]
    top_logprobs: list[float]


@dataclass(frozen=True, slots=True)
class SampledToken:
    """What the runner answers for one sampling row; `error` instead of a token if its logits were not finite."""

    token_id: int
    logprobs: Logprobs | None = None
    error: str | None = None
