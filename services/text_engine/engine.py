"""The engine: requests in, text events out, one step at a time. Synchronous, single-threaded, no HTTP.

Everything hangs off `step()`. Whoever drives it (a thread behind the HTTP app, the offline LLM, a test) calls `add`,
`abort` and `step` from one thread.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import torch

from services.text_engine.core.batch import Batch, Logprobs, SampledToken
from services.text_engine.core.scheduler import Scheduler, StepOutput
from services.text_engine.core.sequence import ImageSpan, Sequence
from services.text_engine.core.stopping import Finish
from services.text_engine.detokenizer import Detokenizer
from services.text_engine.embedding_store import EmbeddingStore
from services.text_engine.runner.grammar import GrammarCompiler
from services.text_engine.runner.model_runner import ModelRunner
from services.text_engine.runner.tensor_parallel import RankFailed
from services.text_engine.tokenizer import Tokenizer
from shared.errors import ContextTooLong, DiptychError, InvalidRequest, Overloaded
from shared.log import get_logger
from shared.sampling import SamplingParams
from shared.wire import ImageRef

log = get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRequest:
    """One request, tokenized; `sampling.n` choices will be generated from it."""

    request_id: str
    token_ids: list[int]
    sampling: SamplingParams
    images: tuple[ImageSpan, ...] = ()
    image_refs: tuple[ImageRef, ...] = ()
    priority: int = 0
    cache_salt: str = ""

    @property
    def num_image_tokens(self) -> int:
        return sum(span.num_tokens for span in self.images)


@dataclass(frozen=True, slots=True)
class TokenOutput:
    """New text of one choice. `finish` is set on its last output."""

    request_id: str
    index: int
    text: str
    token_ids: list[int]
    logprobs: list[tuple[int, Logprobs]]
    finish: Finish | None


@dataclass(frozen=True, slots=True)
class RequestFinished:
    """All choices are done.

    timings   seconds: queue (until first scheduled), transfer (until the last embedding was here), prefill (from first
              scheduled to first token), decode_tokens; transfer overlaps with the other two
    """

    request_id: str
    num_prompt_tokens: int
    num_image_tokens: int
    num_cached_tokens: int
    num_generated_tokens: int
    num_preemptions: int
    timings: dict[str, float]


@dataclass(frozen=True, slots=True)
class RequestFailed:
    request_id: str
    error: DiptychError


EngineOutput = TokenOutput | RequestFinished | RequestFailed


@dataclass(slots=True)
class _Choice:
    sequence: Sequence
    detokenizer: Detokenizer
    finished: bool = False

    def needs_image(self, image_key: str) -> bool:
        """Whether rows of this image are still to be computed."""
        computed = self.sequence.num_computed_tokens
        spans = self.sequence.images_between(computed, self.sequence.num_tokens)
        return not self.finished and any(span.image_key == image_key for span in spans)


@dataclass(slots=True)
class _Request:
    """A request's choices and clock. Times are time.monotonic() seconds."""

    request: EngineRequest
    choices: list[_Choice]
    added: float
    images_ready: float | None = None
    first_scheduled: float | None = None
    first_token: float | None = None
    last_token: float = field(default=0.0)


class Engine:
    """Continuous batching over one model.

    max_model_len         tokens of prompt and answer together
    max_waiting_requests  more waiting sequences than this are refused with Overloaded
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: ModelRunner,
        tokenizer: Tokenizer,
        embeddings: EmbeddingStore,
        grammars: GrammarCompiler,
        *,
        vocab_size: int,
        max_model_len: int,
        max_waiting_requests: int = 1024,
    ) -> None:
        self.scheduler = scheduler
        self.runner = runner
        self.tokenizer = tokenizer
        self.embeddings = embeddings
        self.grammars = grammars
        self.vocab_size = vocab_size
        self.max_model_len = max_model_len
        self.max_waiting_requests = max_waiting_requests
        self._requests: dict[str, _Request] = {}

    @property
    def num_requests(self) -> int:
        return len(self._requests)

    def add(self, request: EngineRequest) -> None:
        """Queue a request. Raises a typed error, and queues nothing, if it can never run or the queue is full.

        An answer may fill what the context leaves after the prompt; a larger max_tokens is cut to that.
        """
        self.check(request)
        sampling = request.sampling
        room = min(self.max_model_len, self.scheduler.blocks.max_sequence_tokens)
        num_prompt_tokens = len(request.token_ids)
        max_total = room if sampling.max_tokens is None else min(room, num_prompt_tokens + sampling.max_tokens)
        choices = []
        for index in range(sampling.n):
            sequence = Sequence(
                request_id=request.request_id,
                token_ids=list(request.token_ids),
                num_prompt_tokens=num_prompt_tokens,
                sampling=sampling,
                max_total_tokens=max_total,
                index=index,
                priority=request.priority,
                images=request.images,
                cache_salt=request.cache_salt.encode(),
                token_filter=None if sampling.constraint is None else self.grammars.matcher(sampling.constraint),
            )
            detokenizer = Detokenizer(
                self.tokenizer,
                stop=sampling.stop,
                include_stop=sampling.include_stop_str_in_output,
                skip_special=sampling.skip_special_tokens,
            )
            choices.append(_Choice(sequence, detokenizer))
        self._requests[request.request_id] = _Request(request, choices, added=time.monotonic())
        self.embeddings.register(request.request_id, request.image_refs)
        for choice in choices:
            self.scheduler.add(choice.sequence)

    def abort(self, request_id: str) -> None:
        """Forget a request at any moment; unknown ids are fine. Its blocks are free when this returns."""
        state = self._requests.pop(request_id, None)
        if state is None:
            return
        for choice in state.choices:
            self.scheduler.finish(choice.sequence)
        self.embeddings.release(request_id, {ref.image_key for ref in state.request.image_refs})

    def fail(self, request_id: str, error: DiptychError) -> list[EngineOutput]:
        """End a request with an error."""
        known = request_id in self._requests
        self.abort(request_id)
        return [RequestFailed(request_id, error)] if known else []

    def image_failed(self, ref: ImageRef, error: DiptychError) -> list[EngineOutput]:
        """An embedding will not come from there: try another source, or end the requests that still need its rows."""
        if self.embeddings.fetch_failed(ref):
            return []
        outputs: list[EngineOutput] = []
        for request_id, state in list(self._requests.items()):
            if any(choice.needs_image(ref.image_key) for choice in state.choices):
                outputs += self.fail(request_id, error)
        return outputs

    def put_image(self, image_key: str, rows: torch.Tensor) -> list[EngineOutput]:
        """An image's embedding, [num_tokens, hidden_size], has arrived."""
        self.embeddings.put(image_key, rows)
        now = time.monotonic()
        for state in self._requests.values():
            if state.first_token is None and any(span.image_key == image_key for span in state.request.images):
                state.images_ready = now
        return []

    def step(self) -> list[EngineOutput] | None:
        """Compute one batch. None: nothing can run until a request is added or an image arrives.

        Raises RankFailed if a process that shares the model is gone: this engine cannot go on.
        """
        batch = self.scheduler.schedule()
        if batch.is_empty:
            return None
        self._note_start(batch)
        try:
            sampled = self.runner.execute_model(batch)
        except RankFailed:
            raise  # no later batch would fare better
        except Exception as error:  # noqa: BLE001 - whatever broke, only the batch's requests may pay for it
            return self._fail_batch(batch, error)
        return self._publish(self.scheduler.update(batch, sampled))

    def close(self) -> None:
        """End the processes that share the model, if there are any."""
        self.runner.close()

    # --- outputs --------------------------------------------------------------------------------------------------

    def _publish(self, steps: list[StepOutput]) -> list[EngineOutput]:
        now = time.monotonic()
        outputs: list[EngineOutput] = []
        for step in steps:
            request = self._requests.get(step.sequence.request_id)
            if request is None:
                continue
            if step.sampled.error is not None:
                error = _sampling_error(step.sequence, step.sampled.error)
                log.warning("a request ends with an error", request_id=step.sequence.request_id, reason=error.message)
                outputs += self.fail(step.sequence.request_id, error)
                continue
            if request.first_token is None:
                request.first_token = now
            request.last_token = now
            outputs.append(self._token_output(request.choices[step.sequence.index], step.sampled, step.finish))
            if all(choice.finished for choice in request.choices):
                outputs.append(self._finished(request))
        return outputs

    def _token_output(self, choice: _Choice, sampled: SampledToken, finish: Finish | None) -> TokenOutput:
        sequence, detokenizer = choice.sequence, choice.detokenizer
        text = ""
        if finish is None or not finish.text_excludes_last:
            search_stop = sequence.num_generated_tokens > sequence.sampling.min_tokens
            text = detokenizer.append(sampled.token_id, search_stop=search_stop)
        if detokenizer.matched_stop is not None:
            self.scheduler.finish(sequence)
            finish = Finish("stop", stop_reason=detokenizer.matched_stop)
        elif finish is not None:
            text += detokenizer.finish()
        choice.finished = finish is not None
        logprobs = [] if sampled.logprobs is None else [(sampled.token_id, sampled.logprobs)]
        return TokenOutput(sequence.request_id, sequence.index, text, [sampled.token_id], logprobs, finish)

    def _finished(self, state: _Request) -> RequestFinished:
        self.abort(state.request.request_id)
        assert state.first_scheduled is not None
        assert state.first_token is not None
        sequences = [choice.sequence for choice in state.choices]
        return RequestFinished(
            request_id=state.request.request_id,
            num_prompt_tokens=len(state.request.token_ids),
            num_image_tokens=state.request.num_image_tokens,
            num_cached_tokens=sequences[0].num_cached_tokens or 0,
            num_generated_tokens=sum(sequence.num_generated_tokens for sequence in sequences),
            num_preemptions=sum(sequence.num_preemptions for sequence in sequences),
            timings={
                "queue": state.first_scheduled - state.added,
                "transfer": (state.images_ready or state.added) - state.added,
                "prefill": state.first_token - state.first_scheduled,
                "decode_tokens": state.last_token - state.first_token,
            },
        )

    # --- checks and failures --------------------------------------------------------------------------------------

    def check(self, request: EngineRequest) -> None:
        """Raise what `add` would raise. Better called first from a thread that may take its time: a new constraint is
        compiled here, for milliseconds, and nothing else changes. Any thread will do."""
        num_prompt_tokens = len(request.token_ids)
        sampling = request.sampling
        if request.request_id in self._requests:
            raise InvalidRequest(f"request id {request.request_id!r} is in use", param="request_id")
        if num_prompt_tokens >= self.max_model_len:
            raise ContextTooLong(
                f"the prompt has {num_prompt_tokens} tokens; this model takes {self.max_model_len} tokens of prompt "
                "and answer together, so shorten the conversation or send fewer or smaller images",
                param="messages",
            )
        capacity = self.scheduler.blocks.max_sequence_tokens
        if num_prompt_tokens >= capacity:
            raise ContextTooLong(
                f"the prompt has {num_prompt_tokens} tokens; the KV cache of this server holds {capacity}",
                param="messages",
            )
        max_span = self.scheduler.max_whole_span
        span = next((s for s in request.images if s.attention == "bidirectional" and s.num_tokens > max_span), None)
        if span is not None:
            raise ContextTooLong(
                f"an image has {span.num_tokens} tokens that must be computed in one step; this server's steps have "
                f"room for {max_span} (max_num_batched_tokens less max_num_seqs, plus one)",
                param="messages",
            )
        for name, token_ids in (("logit_bias", sampling.logit_bias), ("stop_token_ids", sampling.stop_token_ids)):
            bad = next((token_id for token_id in token_ids if token_id >= self.vocab_size), None)
            if bad is not None:
                raise InvalidRequest(f"{name} names token {bad}; ids go from 0 to {self.vocab_size - 1}", param=name)
        if len(self.scheduler.waiting) + sampling.n > self.max_waiting_requests:
            raise Overloaded(
                f"{len(self.scheduler.waiting)} requests are waiting; this server queues {self.max_waiting_requests}",
                retry_after_s=2.0,
            )
        if sampling.constraint is not None:
            self.grammars.check(sampling.constraint)

    def _note_start(self, batch: Batch) -> None:
        now = time.monotonic()
        for item in batch.scheduled:
            state = self._requests[item.sequence.request_id]
            if state.first_scheduled is None:
                state.first_scheduled = now

    def _fail_batch(self, batch: Batch, error: Exception) -> list[EngineOutput]:
        log.error("a step failed; its requests end with an error", num_sequences=len(batch.scheduled), exc_info=error)
        outputs: list[EngineOutput] = []
        for item in batch.scheduled:
            outputs += self.fail(
                item.sequence.request_id, DiptychError("the engine failed on this request; the log has the details")
            )
        return outputs


def _sampling_error(sequence: Sequence, reason: str) -> DiptychError:
    """Why no token came: the client's grammar, if it asked for one and that is what went wrong, else our numbers."""
    constraint, token_filter = sequence.sampling.constraint, sequence.token_filter
    if constraint is not None and token_filter is not None and token_filter.problem == reason:
        return InvalidRequest(f"{constraint.param}: {reason}; make it simpler", param=constraint.param)
    return DiptychError(reason)
