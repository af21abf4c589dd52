"""A request while the engine has it: its choices, and when each of its stages was over. Decides nothing."""

from __future__ import annotations

from dataclasses import dataclass

from services.text_engine.adapters import Adapter
from services.text_engine.core.sequence import Sequence
from services.text_engine.detokenizer import Detokenizer
from services.text_engine.engine_io import EngineRequest, RequestFinished


@dataclass(slots=True)
class ChoiceState:
    """One of a request's answers.

    last_token   when it came, in time.monotonic() seconds
    """

    sequence: Sequence
    detokenizer: Detokenizer
    finished: bool = False
    has_begun: bool = False
    last_token: float | None = None

    def needs_image(self, image_key: str) -> bool:
        """Whether rows of this image are still to be computed."""
        computed = self.sequence.num_computed_tokens
        spans = self.sequence.images_between(computed, self.sequence.num_tokens)
        return not self.finished and any(span.image_key == image_key for span in spans)


@dataclass(slots=True)
class RequestState:
    """A request's choices and clock. Times are time.monotonic() seconds."""

    request: EngineRequest
    choices: list[ChoiceState]
    added: float
    adapter: Adapter | None = None
    images_ready: float | None = None
    first_scheduled: float | None = None
    first_token: float | None = None
    last_token: float = 0.0

    def finished(self) -> RequestFinished:
        """To be called when all choices are done."""
        assert self.first_scheduled is not None
        assert self.first_token is not None
        sequences = [choice.sequence for choice in self.choices]
        return RequestFinished(
            request_id=self.request.request_id,
            num_prompt_tokens=len(self.request.token_ids),
            num_image_tokens=self.request.num_image_tokens,
            num_cached_tokens=sequences[0].num_cached_tokens or 0,
            num_generated_tokens=sum(sequence.num_generated_tokens for sequence in sequences),
            num_preemptions=sum(sequence.num_preemptions for sequence in sequences),
            timings={
                "queue": self.first_scheduled - self.added,
                "transfer": (self.images_ready or self.added) - self.added,
                "prefill": self.first_token - self.first_scheduled,
                "decode_tokens": self.last_token - self.first_token,
            },
            added_at=self.added,
        )
