"""The engine: requests in, text events out, one step at a time. Synchronous, single-threaded, no HTTP.

Everything hangs off `step()`. Whoever drives it (a thread behind the HTTP app, the offline LLM, a test) calls `add`,
`abort` and `step` from one thread.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

import torch

from services.text_engine.adapters import Adapter, Adapters
from services.text_engine.core.batch import Batch, ScheduledSequence
from services.text_engine.core.queue_limit import QueueLimit
from services.text_engine.core.scheduler import Scheduler, StepOutput
from services.text_engine.core.sequence import Sequence
from services.text_engine.core.stopping import Finish
from services.text_engine.detokenizer import Detokenizer
from services.text_engine.embedding_store import EmbeddingStore
from services.text_engine.engine_io import EngineOutput, EngineRequest, RequestFailed, TokenOutput
from services.text_engine.request_state import ChoiceState, RequestState
from services.text_engine.runner.grammar import GrammarCompiler
from services.text_engine.runner.logits_processors import LogitsProcessors
from services.text_engine.runner.model_runner import ModelRunner
from services.text_engine.runner.tensor_parallel import RankFailed
from services.text_engine.runner.token_bans import NOTHING_LEFT, BanCompiler
from services.text_engine.tokenizer import Tokenizer
from shared.errors import ContextTooLong, DiptychError, InvalidRequest
from shared.hashing import digest
from shared.log import get_logger
from shared.wire.images import ImageRef

log = get_logger(__name__)
NUM_PAST_STEPS = 64


class PastStep(NamedTuple):
    """What one step computed, and how long it took. Kept by reference: remembering a step costs nothing, and of ended
    sequences little is left."""

    number: int
    scheduled: list[ScheduledSequence]
    seconds: float

    @property
    def num_tokens(self) -> int:
        return sum(item.num_new_tokens for item in self.scheduled)


class Engine:
    """Continuous batching over one model.

    max_model_len         tokens of prompt and answer together
    queue                 which requests are refused with Overloaded
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: ModelRunner,
        tokenizer: Tokenizer,
        embeddings: EmbeddingStore,
        grammars: GrammarCompiler,
        processors: LogitsProcessors,
        *,
        vocab_size: int,
        max_model_len: int,
        queue: QueueLimit | None = None,
        adapters: Adapters | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.runner = runner
        self.tokenizer = tokenizer
        self.embeddings = embeddings
        self.grammars = grammars
        self.processors = processors
        self.vocab_size = vocab_size
        self._bans = BanCompiler(tokenizer, vocab_size)
        self.max_model_len = max_model_len
        self.queue = queue or QueueLimit(scheduler)
        self.adapters = adapters or Adapters("the model")
        self.num_steps = 0
        self.past_steps: deque[PastStep] = deque(maxlen=NUM_PAST_STEPS)
        self._requests: dict[str, RequestState] = {}
        self._num_cache_resets = 0

    @property
    def num_requests(self) -> int:
        return len(self._requests)

    def add(self, request: EngineRequest) -> None:
        """Queue a request. Raises a typed error, and queues nothing, if it can never run or the queue is full.

        An answer may fill what the context leaves after the prompt; a larger max_tokens is cut to that.
        """
        self._check_limits(request)
        self.queue.check(request.priority, request.sampling.n)
        adapter = None if request.adapter is None else self.adapters.find(request.adapter)
        choices = [self._new_choice(request, index, adapter) for index in range(request.sampling.n)]
        if len(choices) > 1:
            sequences = [choice.sequence for choice in choices]
            for sequence in sequences:
                sequence.choices = sequences
        if adapter is not None:
            self.adapters.acquire(adapter)
        self._requests[request.request_id] = RequestState(request, choices, added=time.monotonic(), adapter=adapter)
        self.embeddings.register(request.request_id, request.image_refs)
        for choice in choices:
            self.scheduler.add(choice.sequence)

    def _new_choice(self, request: EngineRequest, index: int, adapter: Adapter | None) -> ChoiceState:
        sampling = request.sampling
        num_prompt_tokens = len(request.token_ids)
        # The last token of an answer is never computed: one that nobody is told needs no room.
        max_total = min(self.max_model_len, self.scheduler.blocks.max_sequence_tokens) + request.only_echoes
        if sampling.max_tokens is not None:
            max_total = min(max_total, num_prompt_tokens + sampling.max_tokens)
        sequence = Sequence(
            request_id=request.request_id,
            token_ids=list(request.token_ids),
            num_prompt_tokens=num_prompt_tokens,
            sampling=sampling,
            max_total_tokens=max_total,
            index=index,
            priority=request.priority,
            images=request.images,
            cache_salt=digest(request.cache_salt.encode(), self._num_cache_resets.to_bytes(8, "big")),
            processors=self.processors.for_request(sampling.extra_args, request.token_ids),
            bans=self._bans.for_request(sampling),
        )
        if sampling.constraint is not None:
            sequence.token_filter = self.grammars.matcher(sampling.constraint, request.reasoning)
        if adapter is not None:
            sequence.adapter, sequence.adapter_key = adapter.number, adapter.identity.key
        detokenizer = Detokenizer(
            self.tokenizer,
            stop=sampling.stop,
            include_stop=sampling.include_stop_str_in_output,
            skip_special=sampling.skip_special_tokens,
        )
        return ChoiceState(sequence, detokenizer)

    def abort(self, request_id: str) -> None:
        """Forget a request at any moment; unknown ids are fine. Its blocks are free when this returns."""
        state = self._requests.pop(request_id, None)
        if state is None:
            return
        for choice in state.choices:
            self.scheduler.finish(choice.sequence)
            choice.sequence.drop_helpers()
        if state.adapter is not None:
            self.adapters.release(state.adapter)
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

    def put_image(self, image_key: str, rows: torch.Tensor) -> None:
        """An image's embedding, [num_tokens, row_size], has arrived."""
        self.embeddings.put(image_key, rows)
        now = time.monotonic()
        for state in self._requests.values():
            if state.first_token is None and any(span.image_key == image_key for span in state.request.images):
                state.images_ready = now

    def step(self) -> list[EngineOutput] | None:
        """Compute one batch. None: nothing can run until a request is added or an image arrives.

        Raises RankFailed if a process that shares the model is gone: this engine cannot go on.
        """
        started = time.monotonic()
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
        outputs = self._publish(self.scheduler.update(batch, sampled))
        self.num_steps += 1
        seconds = time.monotonic() - started
        self.past_steps.append(PastStep(self.num_steps, batch.scheduled, seconds))
        self.queue.note_step(seconds)
        return outputs

    def use_idle_time(self) -> bool:
        """Do a little of what is not urgent: less than a millisecond, unless the system is slow to find memory. False:
        there is nothing of the kind."""
        return self.runner.prepare_memory(self.scheduler.blocks.pool.num_ever_used)

    # --- the cache ------------------------------------------------------------------------------------------------

    def reset_cache(self) -> None:
        """Nothing computed until now is found by later requests; running ones go on, and add nothing to be found."""
        self._num_cache_resets += 1
        self.scheduler.blocks.forget_all()
        self.embeddings.drop_idle()

    def sleep(self) -> None:
        """Give back the KV cache's memory, of which nothing may be in use; `wake` before the next request."""
        assert not self.num_requests
        self.reset_cache()
        self.runner.release_kv_cache()

    def wake(self) -> None:
        self.runner.restore_kv_cache()

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
            choice = request.choices[step.sequence.index]
            if choice.finished:
                continue  # a stop string ended it with an earlier token of this step
            if step.sampled.error is not None:
                error = _sampling_error(step.sequence, step.sampled.error)
                log.warning("a request ends with an error", request_id=step.sequence.request_id, reason=error.message)
                outputs += self.fail(step.sequence.request_id, error)
                continue
            if request.first_token is None:
                request.first_token = now
            request.last_token = now
            waited_s = now - (request.added if choice.last_token is None else choice.last_token)
            choice.last_token = now
            outputs.append(self._token_output(choice, step, waited_s))
            if all(choice.finished for choice in request.choices):
                self.abort(step.sequence.request_id)
                outputs.append(request.finished())
        return outputs

    def _token_output(self, choice: ChoiceState, step: StepOutput, waited_s: float) -> TokenOutput:
        sequence, detokenizer = choice.sequence, choice.detokenizer
        sampled, finish = step.sampled, step.finish
        text = ""
        if finish is None or not finish.text_excludes_last:
            search_stop = step.num_generated_tokens > sequence.sampling.min_tokens
            text = detokenizer.append(sampled.token_id, search_stop=search_stop)
        if detokenizer.matched_stop is not None:
            self.scheduler.finish(sequence)
            del sequence.token_ids[sequence.num_prompt_tokens + step.num_generated_tokens :]
            finish = Finish("stop", stop_reason=detokenizer.matched_stop)
        elif finish is not None:
            text += detokenizer.finish()
        choice.finished = finish is not None
        logprobs = [] if sampled.logprobs is None else [(sampled.token_id, sampled.logprobs)]
        is_first, choice.has_begun = not choice.has_begun, True
        return TokenOutput(
            sequence.request_id,
            sequence.index,
            text,
            [sampled.token_id],
            logprobs,
            finish,
            prompt_logprobs=sequence.prompt_logprobs if sequence.wants_prompt_logprobs and is_first else None,
            waited_s=waited_s,
            is_first=is_first,
        )

    # --- checks and failures --------------------------------------------------------------------------------------

    def check(self, request: EngineRequest) -> None:
        """Raise what `add` would raise for the request itself, whatever is queued. Better called first, from a thread
        that may take its time: a new constraint is compiled here, for milliseconds. Any thread will do."""
        self._check_limits(request)
        sampling = request.sampling
        self.processors.for_request(sampling.extra_args, request.token_ids)
        self._bans.for_request(sampling)
        if sampling.constraint is not None:
            self.grammars.check(sampling.constraint, request.reasoning)

    def _check_limits(self, request: EngineRequest) -> None:
        num_prompt_tokens = len(request.token_ids)
        sampling = request.sampling
        if request.request_id in self._requests:
            raise InvalidRequest(f"request id {request.request_id!r} is in use", param="request_id")
        if request.num_needed_tokens > self.max_model_len:
            raise ContextTooLong(
                f"the prompt has {num_prompt_tokens} tokens; this model takes {self.max_model_len} tokens of prompt "
                "and answer together, and an answer needs one: shorten the text"
                f"{' or send fewer or smaller images' if request.images else ''}",
                param="messages",
            )
        sampling.check_prompt_logprobs(num_prompt_tokens)
        capacity = self.scheduler.blocks.max_sequence_tokens
        if request.num_needed_tokens > capacity:
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
        for name in ("logit_bias", "stop_token_ids", "allowed_token_ids"):
            token_ids: Iterable[int] = getattr(sampling, name)
            bad = next((token_id for token_id in token_ids if token_id >= self.vocab_size), None)
            if bad is not None:
                raise InvalidRequest(f"{name} names token {bad}; ids go from 0 to {self.vocab_size - 1}", param=name)
        if request.adapter is not None:
            self.adapters.find(request.adapter)

    def _note_start(self, batch: Batch) -> None:
        now = time.monotonic()
        for item in batch.scheduled:
            state = self._requests[item.sequence.request_id]
            if state.first_scheduled is None:
                state.first_scheduled = now

    def _fail_batch(self, batch: Batch, error: Exception) -> list[EngineOutput]:
        if any(copy.direction != "on_device" for copy in batch.copies):
            self.reset_cache()  # who knows which of them were made; those on the device were for this batch alone
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
    if reason == NOTHING_LEFT:
        return InvalidRequest(reason, param="allowed_token_ids" if sequence.sampling.allowed_token_ids else "bad_words")
    return DiptychError(reason)
