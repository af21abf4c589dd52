"""One choice of one request: its tokens, its images, and how far the KV cache has come.

Few facts are stored, the rest is derived; whether a sequence prefills or decodes is a question nobody asks here.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from services.text_engine.core.speculation.draft_progress import DraftProgress
from services.text_engine.core.speculation.prompt_lookup import PromptLookup
from shared.sampling import SamplingParams
from shared.wire.images import Attention

PRIORITY_HEAD_START = 1000


def queue_order(arrival: int, priority: int) -> tuple[int, int]:
    """Sorts by who goes first: lower priority value, then earlier arrival.

    A level of priority is worth PRIORITY_HEAD_START arrivals and not more: whoever waits is overtaken by so many more
    urgent requests at most, however many of them come.
    """
    return (arrival + priority * PRIORITY_HEAD_START, arrival)


@dataclass(frozen=True, slots=True)
class PromptLogprob:
    """One prompt token given those before it: log-probability, rank (1: the likeliest); the best tokens, best first."""

    logprob: float
    rank: int
    top_token_ids: list[int]
    top_logprobs: list[float]


class SequenceStatus(Enum):
    WAITING = "waiting"  # holds no blocks: new, or preempted
    RUNNING = "running"  # holds blocks
    FINISHED = "finished"


@dataclass(frozen=True, slots=True)
class ImageSpan:
    """The positions `start : end` of the token stream are rows of one image's embedding, in order.

    An image may have several spans, with text of its own between them.

    first_row   the row of the embedding that stands at `start`
    grid        the image's; see shared.wire.images.ImageMetadata
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


class RowProcessor(Protocol):
    """Changes of one sequence's logits: carried here, made in runner/logits_processors.py and runner/token_bans.py."""

    @property
    def apply(self) -> Callable[..., None]:
        """(row of logits, token ids generated so far); in place"""
        ...


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
    adapter             number of the LoRA adapter that computes it; 0: the model itself
    adapter_key         digest of that adapter's name and content; empty: the model itself
    max_total_tokens    prompt and answer together may not grow beyond this
    num_cached_tokens   prompt tokens found in the prefix cache when first scheduled; None until then
    block_hashes        chain hashes of the leading full blocks, computed as far as somebody asked
    token_filter        None: every token may come next
    processors          None: no operator's class changes its logits
    bans                None: the request forbids no token
    token_counts        what its penalties look at; made when it is first sampled, if it has any
    prompt_logprobs     of tokens 1, 2 … of the prompt as far as they are computed, if they are wanted
    awaited_image       what kept it from starting when it was last tried
    lookup              guesses at its next tokens; made when somebody first asks
    draft_progress      how far a draft model has come in it; made alike
    choices             of its request, itself among them, in the order in which they were queued; empty: it is alone
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
    adapter: int = 0
    adapter_key: bytes = b""
    status: SequenceStatus = SequenceStatus.WAITING
    num_computed_tokens: int = 0
    num_cached_tokens: int | None = None
    num_preemptions: int = 0
    block_table: list[int] = field(default_factory=list)
    block_hashes: list[bytes] = field(default_factory=list)
    token_filter: TokenFilter | None = None
    processors: RowProcessor | None = None
    bans: RowProcessor | None = None
    token_counts: RowProcessor | None = None
    prompt_logprobs: list[PromptLogprob] = field(default_factory=list)
    awaited_image: ImageSpan | None = None
    lookup: PromptLookup | None = None
    draft_progress: DraftProgress | None = None
    choices: list[Sequence] = field(default_factory=list)

    def drop_helpers(self) -> None:
        """Its request is over: whoever still remembers the sequence keeps nothing large alive."""
        self.token_filter = self.processors = self.bans = self.token_counts = None
        self.lookup = self.draft_progress = None
        self.choices = []
        self.prompt_logprobs = []  # a new list: the old one may be on its way to the client

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
    def wants_prompt_logprobs(self) -> bool:
        """Of a request's choices the first is asked: they have one prompt."""
        return self.sampling.prompt_logprobs is not None and self.index == 0

    @property
    def max_cached_tokens(self) -> int:
        """Leading tokens that the prefix cache may spare it to compute.

        Never the last, or there would be no logits to sample from; nor those whose log-probabilities are yet to come.
        """
        num_before_last = len(self.token_ids) - 1
        if self.sampling.prompt_logprobs is None or not self.wants_prompt_logprobs:
            return num_before_last
        num_known = len(self.prompt_logprobs)
        return num_before_last if num_known == self.num_prompt_tokens - 1 else num_known

    @property
    def awaits_another_choice(self) -> bool:
        """Whether it has not begun, and a choice before it computes the prompt, or will: it waits rather than do the
        same. Not for ever, since that one stands before it in every queue."""
        if not self.choices or self.num_generated_tokens or self.to_fork_from() is not None:
            return False
        before = itertools.takewhile(lambda each: each is not self, self.choices)
        return any(each.status is not SequenceStatus.FINISHED and not each.num_generated_tokens for each in before)

    def to_fork_from(self) -> Sequence | None:
        """Another choice whose blocks hold all that this one's prompt needs but its last token; for one that has not
        begun."""
        if not self.choices or self.num_generated_tokens:
            return None
        num_needed = self.num_prompt_tokens - 1
        running = (each for each in self.choices if each.status is SequenceStatus.RUNNING and each is not self)
        return next((each for each in running if each.num_computed_tokens >= num_needed), None)

    @property
    def max_draft_tokens(self) -> int:
        """If all of so many guesses hold, the token after them is the last one allowed."""
        return self.max_total_tokens - self.num_tokens - 1

    @property
    def order(self) -> tuple[int, int]:
        return queue_order(self.arrival, self.priority)

    def has_images_from(self, start: int) -> bool:
        """Whether any image position is at `start` or beyond it. Decodes ask in every step: there is none for them."""
        return bool(self.images) and self.images[-1].end > start

    def images_between(self, start: int, end: int) -> list[ImageSpan]:
        """The spans that overlap positions `start : end`."""
        if not self.images:
            return []
        return [span for span in self.images if span.start < end and span.end > start]
