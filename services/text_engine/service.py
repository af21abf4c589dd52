"""The story of one generate request: tokenize off the event loop, queue it, stream its events, abort it when the caller
goes away. Owns the engine's thread and the fetching of embeddings; knows no HTTP of its own.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from functools import partial
from typing import Any

from services.text_engine.adapter_control import AdapterControl
from services.text_engine.build import BuiltEngine, build_engine
from services.text_engine.cache_control import CacheControl
from services.text_engine.config import TextEngineSettings
from services.text_engine.core.queue_limit import Newcomers
from services.text_engine.embedding_delivery import EmbeddingDelivery
from services.text_engine.embedding_fetcher import EmbeddingFetcher
from services.text_engine.engine import Engine
from services.text_engine.engine_io import EngineOutput, EngineRequest, RequestFailed, RequestFinished, TokenOutput
from services.text_engine.engine_thread import EngineThread, in_engine
from services.text_engine.events import are_plain, event_of, line_of, plain_lines, portions
from services.text_engine.input_processing import num_choices, read_prompt, read_request
from services.text_engine.mailbox import Mailbox
from services.text_engine.metrics import EngineMetrics
from services.text_engine.request_timeline import FetchLog, embedding_sources, stage_spans
from services.text_engine.state import engine_state, take_snapshot
from shared.embedding_cache import EmbeddingCache
from shared.errors import (
    DiptychError,
    InvalidRequest,
    NotReady,
    Overloaded,
    RequestAborted,
    UnsupportedFeature,
)
from shared.metrics import watch_certificates
from shared.peer_names import PeerNames
from shared.service_client import ServiceClient
from shared.state import EngineState
from shared.tls import Tls
from shared.torch_threads import compute_alone_elsewhere
from shared.tracing import Attributes, current_span
from shared.wire.engine import GenerateEvent, GenerateRequest, ModelInfo, Started, TokenizeRequest, TokenizeResponse
from shared.wire.engine_admin import CacheState, SleepRequest
from shared.wire.images import ImageRef

STATE_TIMEOUT_S = 2.0


class TextEngineService:
    """Create it on the event loop that serves requests; `start` loads the model in the background."""

    def __init__(
        self, settings: TextEngineSettings, on_death: Callable[[], None] = lambda: None, tls: Tls | None = None
    ) -> None:
        """
        on_death   called when the engine's thread has died, after every running request has been told
        tls        how it reaches encoders and Redis that speak TLS; None: by the public authorities
        """
        tls = tls or Tls("services")
        self.settings = settings
        self._tell_of_death = on_death
        self.metrics = EngineMetrics()
        watch_certificates(self.metrics.registry, (tls,))
        self.load_error: Exception | None = None
        self.is_draining = False
        self.is_hanging = False  # after `close`: the engine's thread could not be ended, and ends with the process
        self._loop = asyncio.get_running_loop()
        self._built: BuiltEngine | None = None
        self._thread: EngineThread | None = None
        self._embeddings: EmbeddingDelivery | None = None
        self._http = ServiceClient(tls=tls, names=PeerNames(settings.tls_server_name), tokens=settings.service_token)
        self._cache = EmbeddingCache(settings.redis_url, op_timeout_s=settings.redis_timeout_s, tls=tls)
        self._newcomers = Newcomers()
        self._streams: dict[str, Mailbox] = {}
        self._is_idle = asyncio.Event()
        self._is_idle.set()
        self._cache_control: CacheControl | None = None
        self._adapter_control: AdapterControl | None = None
        self._fetch_log = FetchLog()
        self._state: asyncio.Task[EngineState] | None = None

    async def start(self) -> None:
        """Load the model without blocking the event loop, then run the engine. Raises what `build_engine` raises."""
        try:
            thread = EngineThread(
                partial(build_engine, self.settings, self._on_wanted, self._on_unwanted),
                self._loop,
                self._deliver,
                self._on_step,
                self._on_death,
            )
            built = await asyncio.wrap_future(thread.start())
        except Exception as error:
            self.load_error = error
            raise
        compute_alone_elsewhere()
        fetcher = EmbeddingFetcher(
            self._cache,
            self._http,
            hidden_size=built.info.hidden_size,
            num_row_parts=built.num_row_parts,
            timeout_s=self.settings.embedding_timeout_s,
        )
        self._embeddings = EmbeddingDelivery(fetcher, thread, self._fetch_log, self.metrics)
        self._thread = thread
        self._built = built
        self._cache_control = CacheControl(thread)
        self._adapter_control = AdapterControl(thread, self.settings, built.adapted_config)
        self.metrics.watch(
            built,
            self._cache,
            max_num_seqs=self.settings.max_num_seqs,
            prefix_caching=self.settings.enable_prefix_caching,
        )

    async def close(self) -> None:
        if self._thread is not None and self._built is not None:
            self.is_hanging = not await asyncio.to_thread(self._thread.stop, self.settings.step_timeout_s)
            if self.is_hanging:  # its thread will not do it
                await asyncio.to_thread(self._built.engine.close)
        if self._embeddings is not None:
            self._embeddings.cancel()
        await self._http.aclose()
        await self._cache.close()

    # --- state ----------------------------------------------------------------------------------------------------

    def why_not_ready(self) -> str | None:
        if self.load_error is not None:
            return f"the model could not be loaded: {self.load_error}"
        if self._thread is None:
            return "the model is loading"
        if self.is_draining:
            return "the service is shutting down"
        if not self._thread.is_alive:
            return "the engine's thread has died"
        if self._cache_control is not None and self._cache_control.state != "awake":
            return f"the engine is {self._cache_control.state}; POST /v1/wake to have it back"
        if self._thread.seconds_in_step() > self.settings.step_timeout_s:
            return f"the current step has been running for {self._thread.seconds_in_step():.0f} s"
        return None

    @property
    def is_live(self) -> bool:
        """False only for what a restart may cure: a dead engine thread, a model that could not be loaded."""
        return self.load_error is None and (self._thread is None or self._thread.is_alive)

    @property
    def info(self) -> ModelInfo:
        built = self._require_built()
        return built.info.model_copy(update={"adapters": built.engine.adapters.infos})

    @property
    def adapter_control(self) -> AdapterControl:
        """Raises NotReady."""
        self._require_built()
        assert self._adapter_control is not None
        return self._adapter_control

    @property
    def cache_control(self) -> CacheControl:
        """Raises NotReady while there is no engine, or none that can answer; asleep it can."""
        if self._cache_control is None or self._thread is None or not self._thread.is_alive:
            raise NotReady(f"the text engine is not ready: {self.why_not_ready()}", retry_after_s=2.0)
        return self._cache_control

    async def sleep(self, request: SleepRequest) -> CacheState:
        """Give back the KV cache's memory until `wake`. Raises UnsupportedFeature, Overloaded."""
        if self.settings.tensor_parallel_size > 1:
            raise UnsupportedFeature("a model that several processes share cannot be put to sleep")

        async def end_requests() -> None:
            if request.mode == "abort":
                error = NotReady("the engine was put to sleep", retry_after_s=2.0)
                for request_id in self._streams:
                    self._end(request_id, error)
            await self._is_idle.wait()

        await self.cache_control.sleep(end_requests, request.timeout_s)
        return await self.cache_control.numbers()

    # --- requests -------------------------------------------------------------------------------------------------

    def queue_opens_in_s(self, priority: int) -> float:
        """When another request of this priority, for one answer, would be queued; 0: at once.

        Not for several answers, whoever asks: gateways take it to hold for every request of the priority, and one that
        wants many places must not close a queue that has a few.
        """
        if self._built is None:
            return 0.0
        return self._built.engine.queue.opens_in_s(priority, num_newcomers=self._newcomers.num)

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[bytes]:
        """Run one request: its events as lines, those that wait together in one piece. Errors known beforehand are
        raised before the first event, later ones are the last event.

        Close the iterator to abort: the request's blocks are free within a step.
        """
        arrived_at = time.monotonic()
        built = self._require_built()
        engine_request, mailbox = await self._take_in(built, request)
        is_over = False
        try:
            num_prompt_tokens = len(engine_request.token_ids)
            started = Started(
                num_prompt_tokens=num_prompt_tokens,
                num_image_tokens=engine_request.num_image_tokens,
                is_reasoning_open=engine_request.reasoning == "open",
                prompt_text=built.engine.tokenizer.decode(engine_request.token_ids) if request.echo else None,
            )
            yield line_of(started)
            while not is_over:
                outputs = await mailbox.take()
                is_over = not isinstance(outputs[-1], TokenOutput)
                if are_plain(outputs):
                    yield plain_lines(outputs)
                    continue
                for output in outputs:
                    event = await self._event(built, output, engine_request, arrived_at)
                    for portion in portions(event):
                        yield line_of(portion)
        finally:
            del self._streams[request.request_id]
            if not is_over:
                self.abort(request.request_id)
            if not self._streams:
                self._is_idle.set()

    async def _event(
        self, built: BuiltEngine, output: EngineOutput, request: EngineRequest, arrived_at: float
    ) -> GenerateEvent:
        naming = partial(event_of, output, request, built.engine.tokenizer)
        is_long = isinstance(output, TokenOutput) and output.prompt_logprobs is not None
        event = await asyncio.to_thread(naming) if is_long else naming()
        if not isinstance(output, RequestFinished):
            return event
        history = self._history(request, output, arrived_at)
        if (span := current_span()) is not None:
            span.stages(history["spans"], began_at=arrived_at)
            model = request.adapter or built.info.id
            span.describe(_traced(model, output), name=f"generate {model}")
        return event.model_copy(update=history)

    async def _take_in(self, built: BuiltEngine, request: GenerateRequest) -> tuple[EngineRequest, Mailbox]:
        """Let a request in, prepare it and hand it to the engine's thread. Counted as a newcomer until it is queued
        there, which may take as long as the current step."""
        leave = self._let_in(built, request)
        try:
            engine_request = await asyncio.to_thread(read_request, built, request)
            self._require_built()  # it may have fallen asleep meanwhile
            if request.request_id in self._streams:
                raise InvalidRequest(f"request id {request.request_id!r} is in use", param="request_id")
            assert self._thread is not None
            self._thread.add(engine_request, on_added=leave)
        except BaseException:
            leave()
            raise
        mailbox = self._streams[request.request_id] = Mailbox()
        self._is_idle.clear()
        return engine_request, mailbox

    def _let_in(self, built: BuiltEngine, request: GenerateRequest) -> Callable[[], None]:
        """Before anything is spent on the prompt: under overload refusals are most of what there is to say."""
        num_sequences = num_choices(request)
        try:
            built.engine.queue.check(request.priority, num_sequences, self._newcomers.num)
        except Overloaded:
            self.metrics.refused.inc()
            raise
        return self._newcomers.enter(num_sequences)

    def _history(self, request: EngineRequest, finished: RequestFinished, arrived_at: float) -> dict[str, Any]:
        return {
            "spans": stage_spans(request, finished, self._fetch_log, arrived_at=arrived_at),
            "embedding_sources": embedding_sources(request, finished, self._fetch_log),
        }

    def abort(self, request_id: str) -> None:
        """Forget a request, running or not; a stream that is still read ends with an error event."""
        self._end(request_id, RequestAborted("the request was aborted"))

    def _end(self, request_id: str, error: DiptychError) -> None:
        if self._thread is not None:
            self._thread.submit(lambda engine: engine.fail(request_id, error))

    async def tokenize(self, request: TokenizeRequest) -> TokenizeResponse:
        built = self._require_built()
        prompt = await asyncio.to_thread(read_prompt, built, request)
        max_model_len = built.info.max_model_len
        return TokenizeResponse(count=len(prompt.token_ids), max_model_len=max_model_len, tokens=prompt.token_ids)

    async def state(self) -> EngineState:
        """What the engine is doing. Looked at between two steps, once for all who ask meanwhile; NotReady if a step
        does not end in time."""
        built = self._require_built()
        if self._state is None or self._state.done():
            self._state = asyncio.create_task(self._look(built))
        return await asyncio.shield(self._state)

    async def _look(self, built: BuiltEngine) -> EngineState:
        assert self._thread is not None
        try:
            snapshot = await asyncio.wait_for(in_engine(self._thread, take_snapshot), STATE_TIMEOUT_S)
        except TimeoutError:
            raise NotReady(f"the current step takes longer than {STATE_TIMEOUT_S:g} s") from None
        return await asyncio.to_thread(engine_state, snapshot, built.info.id, self.settings, self.metrics)

    def _require_built(self) -> BuiltEngine:
        reason = self.why_not_ready()
        if reason is not None or self._built is None:
            raise NotReady(f"the text engine is not ready: {reason}", retry_after_s=2.0)
        return self._built

    # --- from the engine's thread ---------------------------------------------------------------------------------

    def _deliver(self, outputs: list[EngineOutput]) -> None:
        for output in outputs:
            if isinstance(output, TokenOutput):
                self.metrics.observe_token(output)
            elif isinstance(output, RequestFinished):
                self.metrics.observe_finished(output)
            else:
                self.metrics.observe_failed(output)
            if (stream := self._streams.get(output.request_id)) is not None:
                stream.put(output)

    def _on_step(self, engine: Engine, seconds: float | None) -> None:
        self.metrics.observe_step(engine, seconds)

    def _on_death(self) -> None:
        error = NotReady("the engine's thread has died")
        self._deliver([RequestFailed(request_id, error) for request_id in self._streams])
        self._tell_of_death()

    def _on_wanted(self, ref: ImageRef) -> None:
        assert self._embeddings is not None, "no request comes before the engine is there"
        self._loop.call_soon_threadsafe(self._embeddings.start, ref)

    def _on_unwanted(self, image_key: str) -> None:
        if self._embeddings is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._embeddings.stop, image_key)


def _traced(model: str, finished: RequestFinished) -> Attributes:
    """What a span says of a finished request, in the words of OpenTelemetry's conventions for generative AI."""
    return {
        "gen_ai.provider.name": "diptych",
        "gen_ai.response.model": model,
        "gen_ai.usage.input_tokens": finished.num_prompt_tokens,
        "gen_ai.usage.output_tokens": finished.num_generated_tokens,
        "gen_ai.usage.cache_read.input_tokens": finished.num_cached_tokens,
        "diptych.usage.image_tokens": finished.num_image_tokens,
        "diptych.num_preemptions": finished.num_preemptions,
    }
