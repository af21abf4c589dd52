"""One choice of one request: its tokens, its images, and how far the KV cache has come.

Few facts are stored, the rest is derived; whether a sequence prefills or decodes is a question nobody asks here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from shared.sampling import SamplingParams


class SequenceStatus(Enum):
    WAITING = "waiting"  # holds no blocks: new, or preempted
    RUNNING = "running"  # holds blocks
    FINISHED = "finished"


@dataclass(frozen=True, slots=True)
class ImageSpan:
    """The positions `start : end` of the token stream are the rows of one image's embedding, in order."""

    image_key: str
    start: int
    num_tokens: int

    @property
    def end(self) -> int:
        return self.start + self.num_tokens


@dataclass(slots=True, eq=False)
class Sequence:
    """Tokens of prompt and answer, of which the KV cache holds the first `num_computed_tokens`.

    arrival             grows with every added sequence; ties of priority are broken by it
    images              spans in ascending order, within the prompt
    max_total_tokens    prompt and answer together may not grow beyond this
    num_cached_tokens   prompt tokens found in the prefix cache when first scheduled; None until then
    block_hashes        chain hashes of the leading full blocks, computed as far as somebody asked
    """

    request_id: str
    token_ids: list[int]
    num_prompt_tokens: int
    sampling: SamplingParams
    max_total_tokens: int
    index: int = 0
    priority: int = 0
    arrival: int = 0
    images: tuple[ImageSpan, ...] = ()
    cache_salt: bytes = b""
    status: SequenceStatus = SequenceStatus.WAITING
    num_computed_tokens: int = 0
    num_cached_tokens: int | None = None
    num_preemptions: int = 0
    block_table: list[int] = field(default_factory=list)
    block_hashes: list[bytes] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_uncomputed_tokens(self) -> int:
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def num_generated_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def generated_token_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def order(self) -> tuple[int, int]:
        """Sorts by who goes first: lower priority value, then earlier arrival."""
        return (self.priority, self.arrival)

    def images_between(self, start: int, end: int) -> list[ImageSpan]:
        """The spans that overlap positions `start : end`."""
        return [span for span in self.images if span.start < end and span.end > start]
