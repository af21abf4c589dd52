"""What goes into the engine and what comes out of it: a tokenized request, and what is told of it step by step."""

from __future__ import annotations

from dataclasses import dataclass

from services.text_engine.core.batch import Logprobs
from services.text_engine.core.sequence import ImageSpan, PromptLogprob
from services.text_engine.core.stopping import Finish
from shared.errors import DiptychError
from shared.reasoning import ReasoningStart
from shared.sampling import SamplingParams
from shared.wire.images import ImageRef


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRequest:
    """One request, tokenized; `sampling.n` choices will be generated from it.

    reasoning   how the answer begins if the model marks its reasoning; a constraint holds for what comes after it
    adapter     name of the LoRA adapter that computes it; None: the model itself
    only_echoes the answer, one token, is for nobody: the prompt may fill the whole context
    """

    request_id: str
    token_ids: list[int]
    sampling: SamplingParams
    reasoning: ReasoningStart | None = None
    images: tuple[ImageSpan, ...] = ()
    image_refs: tuple[ImageRef, ...] = ()
    priority: int = 0
    cache_salt: str = ""
    adapter: str | None = None
    only_echoes: bool = False

    @property
    def num_needed_tokens(self) -> int:
        """Of the context, at least: with an answer of one token, if anybody is to have it."""
        return len(self.token_ids) + (not self.only_echoes)

    @property
    def num_image_tokens(self) -> int:
        return sum(span.num_tokens for span in self.images)


@dataclass(frozen=True, slots=True)
class TokenOutput:
    """New text of one choice. `finish` is set on its last output.

    prompt_logprobs   on the first output of choice 0, if they were asked for: of the prompt's tokens but the first
    waited_s          since the choice's token before this one; for its first since the request was added
    """

    request_id: str
    index: int
    text: str
    token_ids: list[int]
    logprobs: list[tuple[int, Logprobs]]
    finish: Finish | None
    prompt_logprobs: list[PromptLogprob] | None = None
    waited_s: float = 0.0
    is_first: bool = False


@dataclass(frozen=True, slots=True)
class RequestFinished:
    """All choices are done.

    timings    seconds: queue (until first scheduled), transfer (until the last embedding was here), prefill (from first
               scheduled to first token), decode_tokens; transfer overlaps with the other two
    added_at   when the engine took the request on, in time.monotonic() seconds
    """

    request_id: str
    num_prompt_tokens: int
    num_image_tokens: int
    num_cached_tokens: int
    num_generated_tokens: int
    num_preemptions: int
    timings: dict[str, float]
    added_at: float


@dataclass(frozen=True, slots=True)
class RequestFailed:
    request_id: str
    error: DiptychError


EngineOutput = TokenOutput | RequestFinished | RequestFailed
