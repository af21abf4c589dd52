"""The story of one generate request: tokenize off the event loop, queue it, stream its events, abort it when the caller
goes away. Owns the engine's thread and the fetching of embeddings; knows no HTTP of its own.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import AsyncGenerator, Callable
from functools import partial
from typing import Any

from services.text_engine.adapter_control import AdapterControl
from services.text_engine.build import BuiltEngine, build_engine
from services.text_engine.cache_control import CacheControl
from services.text_engine.config import TextEngineSettings
from services.text_engine.core.queue_limit import Newcomers
from services.text_engine.embedding_fetcher import EmbeddingFetcher
from services.text_engine.engine import (
    Engine,
    EngineOutput,
    EngineRequest,
    RequestFailed,
    RequestFinished,
    TokenOutput,
)
from services.text_engine.engine_thread import EngineThread, in_engine
from services.text_engine.events import event_of, portions
from services.text_engine.metrics import EngineMetrics
from services.text_engine.prompt import Prompt
from services.text_engine.request_timeline import FetchLog, embedding_sources, stage_spans
from services.text_engine.state import engine_state, take_snapshot
from shared.embedding_cache import EmbeddingCache
from shared.errors import (
    ContextTooLong,
    DiptychError,
    InvalidRequest,
    NotReady,
    Overloaded,
    RequestAborted,
    UnsupportedFeature,
)
from shared.log import get_logger
from shared.metrics import watch_certificates
from shared.peer_names import PeerNames
from shared.sampling import WHOLE_RANGES, Constraint, SamplingParams
from shared.service_client import ServiceClient
from shared.state import EngineState
from shared.tls import Tls
from shared.tracing import Attributes, current_span
from shared.wire import (
    CacheState,
    GenerateEvent,
    GenerateRequest,
    ImageRef,
    ModelInfo,
    SleepRequest,
    Started,
    TokenizeRequest,
    TokenizeResponse,
)

log = get_logger(__name__)
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
        self._fetcher: EmbeddingFetcher | None = None
        self._http = ServiceClient(tls=tls, names=PeerNames(settings.tls_server_name), tokens=settings.service_token)
        self._cache = EmbeddingCache(settings.redis_url, op_timeout_s=settings.redis_timeout_s, tls=tls)
        self._newcomers = Newcomers()
        self._streams: dict[str, asyncio.Queue[EngineOutput]] = {}
        self._is_idle = asyncio.Event()
        self._is_idle.set()
        self._cache_control: CacheControl | None = None
        self._adapter_control: AdapterControl | None = None
        self._fetches: set[asyncio.Task[None]] = set()
        self._fetch_log = FetchLog()
        self._state: asyncio.Task[EngineState] | None = None

    async def start(self) -> None:
        """Load the model without blocking the event loop, then run the engine. Raises what `build_engine` raises."""
        try:
            thread = EngineThread(
                partial(build_engine, self.settings, self._on_wanted),
                self._loop,
                self._deliver,
                self._on_step,
                self._on_death,
            )
            built = await asyncio.wrap_future(thread.start())
        except Exception as error:
            self.load_error = error
            raise
        self._fetcher = EmbeddingFetcher(
            self._cache,
            self._http,
            hidden_size=built.info.hidden_size,
            timeout_s=self.settings.embedding_timeout_s,
        )
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
        for task in self._fetches:
            task.cancel()
        await self._http.aclose()
        await self._cache.close()

    # --- state ----------------------------------------------------------------------------------------------------

    @property
    def is_ready(self) -> bool:
        return self.why_not_ready() is None

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

    def room_in_s(self, priority: int) -> float:
        """When another request of this priority, for one answer, would be queued; 0: at once.

        Not for several answers, whoever asks: gateways take it to hold for every request of the priority, and one that
        wants many places must not close a queue that has a few.
        """
        if self._built is None:
            return 0.0
        return self._built.engine.queue.room_in_s(priority, num_newcomers=self._newcomers.num)

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[GenerateEvent]:
        """Run one request. Errors known beforehand are raised before the first event, later ones are the last event.

        Close the iterator to abort: the request's blocks are free within a step.
        """
        arrived_at = time.monotonic()
        built = self._require_built()
        engine_request, outputs = await self._take_in(built, request)
        is_over = False
        try:
            num_prompt_tokens = len(engine_request.token_ids)
            yield Started(
                num_prompt_tokens=num_prompt_tokens,
                num_image_tokens=engine_request.num_image_tokens,
                is_reasoning_open=engine_request.reasoning == "open",
                prompt_text=built.engine.tokenizer.decode(engine_request.token_ids) if request.echo else None,
            )
            while not is_over:
                output = await outputs.get()
                is_over = not isinstance(output, TokenOutput)
                naming = partial(event_of, output, engine_request, built.engine.tokenizer)
                is_long = isinstance(output, TokenOutput) and output.prompt_logprobs is not None
                event = await asyncio.to_thread(naming) if is_long else naming()
                if isinstance(output, RequestFinished):
                    history = self._history(engine_request, output, arrived_at)
                    event = event.model_copy(update=history)
                    if (span := current_span()) is not None:
                        span.stages(history["spans"], began_at=arrived_at)
                        model = engine_request.adapter or built.info.id
                        span.describe(_traced(model, output), name=f"generate {model}")
                for portion in portions(event):
                    yield portion
        finally:
            del self._streams[request.request_id]
            if not is_over:
                self.abort(request.request_id)
            if not self._streams:
                self._is_idle.set()

    async def _take_in(
        self, built: BuiltEngine, request: GenerateRequest
    ) -> tuple[EngineRequest, asyncio.Queue[EngineOutput]]:
        """Let a request in, prepare it and hand it to the engine's thread. Counted as a newcomer until it is queued
        there, which may take as long as the current step."""
        leave = self._let_in(built, request)
        try:
            engine_request = await asyncio.to_thread(_prepare, built, request)
            self._require_built()  # it may have fallen asleep meanwhile
            if request.request_id in self._streams:
                raise InvalidRequest(f"request id {request.request_id!r} is in use", param="request_id")
            assert self._thread is not None
            self._thread.add(engine_request, on_added=leave)
        except BaseException:
            leave()
            raise
        outputs = self._streams[request.request_id] = asyncio.Queue()
        self._is_idle.clear()
        return engine_request, outputs

    def _let_in(self, built: BuiltEngine, request: GenerateRequest) -> Callable[[], None]:
        """Before anything is spent on the prompt: under overload refusals are most of what there is to say."""
        num_choices = _num_choices(request)
        try:
            built.engine.queue.check(request.priority, num_choices, self._newcomers.num)
        except Overloaded:
            self.metrics.refused.inc()
            raise
        return self._newcomers.enter(num_choices)

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
        prompt = await asyncio.to_thread(_build_prompt, built, request)
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
                stream.put_nowait(output)

    def _on_step(self, engine: Engine, seconds: float | None) -> None:
        self.metrics.observe_step(engine, seconds)

    def _on_death(self) -> None:
        error = NotReady("the engine's thread has died")
        self._deliver([RequestFailed(request_id, error) for request_id in self._streams])
        self._tell_of_death()

    def _on_wanted(self, ref: ImageRef) -> None:
        self._loop.call_soon_threadsafe(self._start_fetch, ref)

    # --- embeddings -----------------------------------------------------------------------------------------------

    def _start_fetch(self, ref: ImageRef) -> None:
        task = asyncio.create_task(self._fetch(ref))
        self._fetches.add(task)
        task.add_done_callback(self._fetches.discard)

    async def _fetch(self, ref: ImageRef) -> None:
        """Bring one embedding to the engine, or the news that it will not come."""
        assert self._fetcher is not None
        assert self._thread is not None
        started, source = time.monotonic(), None
        try:
            with self._fetch_log.fetching(ref.image_key) as fetch:
                rows, fetch.source = await self._fetcher.fetch(ref)
                source = fetch.source
        except DiptychError as error:
            log.warning("no embedding for an image", image_key=ref.image_key[:12], reason=error.message)
            self._thread.submit(partial(Engine.image_failed, ref=ref, error=error))
        except Exception as error:
            log.error("fetching an embedding failed", image_key=ref.image_key[:12], exc_info=error)
            reason = "the engine failed to fetch an image's embedding; the log has the details"
            self._thread.submit(partial(Engine.image_failed, ref=ref, error=DiptychError(reason)))
        else:
            self._thread.submit(lambda engine: engine.put_image(ref.image_key, rows))
        finally:
            self.metrics.observe_fetch(source, time.monotonic() - started)


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


def _num_choices(request: GenerateRequest) -> int:
    """Before its sampling fields are checked; 1 for a number that will be refused."""
    given, (least, most) = request.sampling.get("n"), WHOLE_RANGES["n"]
    return given if type(given) is int and least <= given and (most is None or given <= most) else 1


def sampling_params(request: GenerateRequest) -> SamplingParams:
    """The request's sampling fields, checked. Raises InvalidRequest naming the field."""
    known = {field.name for field in dataclasses.fields(SamplingParams)}
    given = {name: value for name, value in request.sampling.items() if name in known}
    for name in ("stop", "stop_token_ids", "allowed_token_ids", "bad_words"):
        if isinstance(given.get(name), list):
            given[name] = tuple(given[name])
    if "logit_bias" in given:
        given["logit_bias"] = _logit_bias(given["logit_bias"])
    if "constraint" in given:
        given["constraint"] = _constraint(given["constraint"])
    return SamplingParams(**given)


def _logit_bias(given: object) -> dict[int, Any]:
    """Keys are strings in JSON. Raises InvalidRequest for anything but an object from token ids to numbers."""
    if not isinstance(given, dict):
        raise InvalidRequest(f"logit_bias is {given!r}; give an object from token ids to numbers", param="logit_bias")
    try:
        return {int(token_id): bias for token_id, bias in given.items()}
    except ValueError:
        raise InvalidRequest(f"logit_bias has keys {list(given)}; they must be token ids", param="logit_bias") from None


def _constraint(given: object) -> Constraint:
    """Raises InvalidRequest for anything but an object with a constraint's fields."""
    try:
        return Constraint(**given)  # type: ignore[arg-type]
    except TypeError:
        raise InvalidRequest("constraint is an object with a kind and a value", param="constraint") from None


def _prepare(built: BuiltEngine, request: GenerateRequest) -> EngineRequest:
    """The request as the engine takes it. Raises whatever is wrong with it."""
    sampling = sampling_params(request)
    prompt = _build_prompt(built, request)
    engine_request = EngineRequest(
        request_id=request.request_id,
        token_ids=prompt.token_ids,
        sampling=sampling,
        reasoning=prompt.reasoning,
        images=prompt.images,
        image_refs=prompt.image_refs,
        priority=request.priority,
        cache_salt=request.cache_salt,
        adapter=request.adapter,
    )
    try:
        built.engine.check(engine_request)
        if not request.cuts_to_context:
            _check_room(engine_request, built.engine.max_model_len)
    except ContextTooLong as error:
        if request.prompt is not None and error.param == "messages":
            raise ContextTooLong(error.message, param="prompt") from error
        raise
    return engine_request


def _check_room(request: EngineRequest, max_model_len: int) -> None:
    """Raises ContextTooLong if more is asked for than can follow the prompt. Cutting it would be an answer to another
    question; the KV cache being smaller than the context is not the client's to know, so that cuts."""
    asked, room = request.sampling.max_tokens, max_model_len - len(request.token_ids)
    if asked is not None and asked > room:
        raise ContextTooLong(
            f"max_tokens is {asked}, but the prompt has {len(request.token_ids)} tokens and this model takes "
            f"{max_model_len} tokens of prompt and answer together; ask for at most {room}, or leave max_tokens out to "
            "use what is left",
            param="max_tokens",
        )


def _build_prompt(built: BuiltEngine, request: GenerateRequest | TokenizeRequest) -> Prompt:
    if request.messages is not None:
        return built.prompts.from_messages(request.messages, request.tools, request.template_kwargs)
    if request.prompt is None:
        raise InvalidRequest("give either messages or prompt", param="messages")
    return built.prompts.from_prompt(request.prompt, built.info.vocab_size)
