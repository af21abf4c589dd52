"""What one step computes: for each scheduled sequence, how many of its next tokens. And what came of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from services.text_engine.core.block_copy import BlockCopy
from services.text_engine.core.sequence import Sequence

DraftMethod = Literal["ngram", "draft_model"]  # vLLM's names


class Draft(NamedTuple):
    """A guess at a sequence's next tokens, and who made it."""

    token_ids: list[int]
    method: DraftMethod


class ScheduledSequence(NamedTuple):  # made for every row of every step: a frozen dataclass takes thrice as long
    """Tokens `start : end` of one sequence run through the model in this step.

    draft_token_ids   the last of them, which the sequence does not have yet: guesses, to be verified
    draft_method      who made them, if there are any
    """

    sequence: Sequence
    start: int
    num_new_tokens: int
    draft_token_ids: tuple[int, ...] = ()
    draft_method: DraftMethod = "ngram"

    @property
    def end(self) -> int:
        return self.start + self.num_new_tokens

    @property
    def samples(self) -> bool:
        """Whether the step reaches the sequence's last token, so that the next one can be sampled."""
        return self.end == self.sequence.num_tokens + len(self.draft_token_ids)

    @property
    def num_sampling_rows(self) -> int:
        """Positions, the last ones, whose logits are wanted: after the last token and after each draft token."""
        return 1 + len(self.draft_token_ids) if self.samples else 0

    @property
    def token_ids(self) -> list[int]:
        return [*self.sequence.token_ids[self.start : self.end], *self.draft_token_ids]

    @property
    def scored_positions(self) -> range:
        """Positions whose logits give the next prompt token's log-probability, where it is wanted and not known."""
        sequence = self.sequence
        if sequence.sampling.prompt_logprobs is None or not sequence.wants_prompt_logprobs:
            return range(0)
        first = max(self.start, len(sequence.prompt_logprobs))
        return range(first, max(first, min(self.end, sequence.num_prompt_tokens - 1)))


@dataclass(slots=True)
class Batch:
    """One ragged batch; decode rows and prefill chunks are the same thing with different lengths.

    copies   of blocks, one after another, that come before it
    """

    scheduled: list[ScheduledSequence] = field(default_factory=list)
    copies: list[BlockCopy] = field(default_factory=list)

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
    """What the runner answers for one sampling sequence; `error` instead of a token if its logits were not finite.

    accepted   what it sampled before this token: the leading draft tokens, those that held
    """

    token_id: int
    logprobs: Logprobs | None = None
    error: str | None = None
    accepted: tuple[SampledToken, ...] = ()
