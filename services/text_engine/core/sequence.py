"""One choice of one request: its tokens, its images, and how far the KV cache has come.

Few facts are stored, the rest is derived; whether a sequence prefills or decodes is a question nobody asks here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from shared.sampling import SamplingParams
from shared.wire import Attention

PRIORITY_HEAD_START = 1000


class SequenceStatus(Enum):
    WAITING = "waiting"  # holds no blocks: new, or preempted
    RUNNING = "running"  # holds blocks
    FINISHED = "finished"


@dataclass(frozen=True, slots=True)
class ImageSpan:
    """The positions `start : end` of the token stream are rows of one image's embedding, in order.

    An image may have several spans, with text of its own between them.

    first_row   the row of the embedding that stands at `start`
    grid        the image's; see shared.wire.ImageMetadata
    attention   "bidirectional": each position sees the whole span
    """

    image_key: str
    start: int
    num_tokens: int
    first_row: int = 0
    grid: tuple[int, int, int] | None = None
    attention: Attention = "causal"

    @property
    def end(self) -> int:
        return self.start + self.num_tokens

    def rows(self, start: int, end: int) -> slice:
        """The embedding's rows at positions `start : end`, which lie in this span."""
        return slice(self.first_row + start - self.start, self.first_row + end - self.start)


class TokenFilter(Protocol):
    """Which tokens may come next in one sequence. Used by the sampler, carried by the sequence: it lives as long.

    Its state follows the tokens, not the KV cache: preemption does not concern it.
    """

    @property
    def problem(self) -> str | None:
        """Why no token can come next, if so."""
        ...

    def allowed(self) -> NDArray[np.bool_]:
        """[vocab]"""
        ...

    def accept(self, token_id: int) -> None:
        """The next token of the sequence."""
        ...


@dataclass(slots=True, eq=False)
class Sequence:
    """Tokens of prompt and answer, of which the KV cache holds the first `num_computed_tokens`.

    arrival             grows by one with every added sequence
    images              spans in ascending order, within the prompt
    max_total_tokens    prompt and answer together may not grow beyond this
    num_cached_tokens   prompt tokens found in the prefix cache when first scheduled; None until then
    block_hashes        chain hashes of the leading full blocks, computed as far as somebody asked
    token_filter        None: every token may come next
    awaited_image       what kept it from starting when it was last tried
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
    token_filter: TokenFilter | None = None
    awaited_image: ImageSpan | None = None

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
        """Sorts by who goes first: lower priority value, then earlier arrival.

        A level of priority is worth PRIORITY_HEAD_START arrivals and not more: whoever waits is overtaken by so many
        more urgent requests at most, however many of them come.
        """
        return (self.arrival + self.priority * PRIORITY_HEAD_START, self.arrival)

    def has_images_from(self, start: int) -> bool:
        """Whether any image position is at `start` or beyond it. Decodes ask in every step: there is none for them."""
        return bool(self.images) and self.images[-1].end > start

    def images_between(self, start: int, end: int) -> list[ImageSpan]:
        """The spans that overlap positions `start : end`."""
        if not self.images:
            return []
        return [span for span in self.images if span.start < end and span.end > start]
