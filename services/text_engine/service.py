"""The story of one generate request: tokenize off the event loop, queue it, stream its events, abort it when the caller
goes away. Owns the engine's thread and the fetching of embeddings; knows no HTTP of its own.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncGenerator, Callable
from functools import partial
from typing import Any

import httpx

from services.text_engine.build import BuiltEngine, build_engine
from services.text_engine.config import TextEngineSettings
from services.text_engine.core.batch import Logprobs
from services.text_engine.embedding_fetcher import EmbeddingFetcher
from services.text_engine.engine import (
    Engine,
    EngineOutput,
    EngineRequest,
    RequestFailed,
    RequestFinished,
    TokenOutput,
)
from services.text_engine.engine_thread import EngineThread
from services.text_engine.metrics import EngineMetrics
from services.text_engine.prompt import Prompt
from services.text_engine.tokenizer import Tokenizer
from shared.embedding_cache import EmbeddingCache
from shared.errors import DiptychError, InvalidRequest, NotReady, RequestAborted
from shared.http_errors import wire_error
from shared.log import get_logger
from shared.sampling import Constraint, SamplingParams
from shared.wire import (
    Failed,
    Finished,
    GenerateEvent,
    GenerateRequest,
    ImageRef,
    ModelInfo,
    Started,
    TokenizeRequest,
    TokenizeResponse,
    TokenLogprob,
    Tokens,
)

log = get_logger(__name__)
LOWEST_LOGPROB = -9999.0  # JSON has no minus infinity; OpenAI uses this value


class TextEngineService:
    """Create it on the event loop that serves requests; `start` loads the model in the background."""

    def __init__(self, settings: TextEngineSettings, on_death: Callable[[], None] = lambda: None) -> None:
        """on_death   called when the engine's thread has died, after every running request has been told"""
        self.settings = settings
        self._tell_of_death = on_death
        self.metrics = EngineMetrics()
        self.load_error: Exception | None = None
        self.is_draining = False
        self._loop = asyncio.get_running_loop()
        self._built: BuiltEngine | None = None
        self._thread: EngineThread | None = None
        self._fetcher: EmbeddingFetcher | None = None
        self._http = httpx.AsyncClient(trust_env=False)
        self._cache = EmbeddingCache(settings.redis_url, op_timeout_s=settings.redis_timeout_s)
        self._streams: dict[str, asyncio.Queue[EngineOutput]] = {}
        self._fetches: set[asyncio.Task[None]] = set()

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

    async def close(self) -> None:
        if self._thread is not None:
            await asyncio.to_thread(self._thread.stop)
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
        if self._thread.seconds_in_step() > self.settings.step_timeout_s:
            return f"the current step has been running for {self._thread.seconds_in_step():.0f} s"
        return None

    @property
    def is_live(self) -> bool:
        """False only for what a restart may cure: a dead engine thread, a model that could not be loaded."""
        return self.load_error is None and (self._thread is None or self._thread.is_alive)

    @property
    def info(self) -> ModelInfo:
        return self._require_built().info

    # --- requests -------------------------------------------------------------------------------------------------

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[GenerateEvent]:
        """Run one request. Errors known beforehand are raised before the first event, later ones are the last event.

        Close the iterator to abort: the request's blocks are free within a step.
        """
        built = self._require_built()
        engine_request = await asyncio.to_thread(_prepare, built, request)
        if request.request_id in self._streams:
            raise InvalidRequest(f"request id {request.request_id!r} is in use", param="request_id")
        outputs = self._streams[request.request_id] = asyncio.Queue()
        is_over = False
        try:
            assert self._thread is not None
            self._thread.add(engine_request)
            num_prompt_tokens = len(engine_request.token_ids)
            yield Started(num_prompt_tokens=num_prompt_tokens, num_image_tokens=engine_request.num_image_tokens)
            while not is_over:
                output = await outputs.get()
                is_over = not isinstance(output, TokenOutput)
                yield _event(output, built.engine.tokenizer)
        finally:
            del self._streams[request.request_id]
            if not is_over:
                self.abort(request.request_id)

    def abort(self, request_id: str) -> None:
        """Forget a request, running or not; a stream that is still read ends with an error event."""
        if self._thread is not None:
            self._thread.submit(lambda engine: engine.fail(request_id, RequestAborted("the request was aborted")))

    async def tokenize(self, request: TokenizeRequest) -> TokenizeResponse:
        built = self._require_built()
        prompt = await asyncio.to_thread(_build_prompt, built, request)
        max_model_len = built.info.max_model_len
        return TokenizeResponse(count=len(prompt.token_ids), max_model_len=max_model_len, tokens=prompt.token_ids)

    def _require_built(self) -> BuiltEngine:
        reason = self.why_not_ready()
        if reason is not None or self._built is None:
            raise NotReady(f"the text engine is not ready: {reason}", retry_after_s=2.0)
        return self._built

    # --- from the engine's thread ---------------------------------------------------------------------------------

    def _deliver(self, outputs: list[EngineOutput]) -> None:
        for output in outputs:
            if isinstance(output, RequestFinished):
                self.metrics.observe_finished(output)
            elif isinstance(output, TokenOutput) and output.finish is not None:
                self.metrics.success.labels(output.finish.reason).inc()
            if (stream := self._streams.get(output.request_id)) is not None:
                stream.put_nowait(output)

    def _on_step(self, engine: Engine, seconds: float | None) -> None:
        self.metrics.observe_step(engine.scheduler, seconds)

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
        try:
            rows = await self._fetcher.fetch(ref)
        except DiptychError as caught:
            error = caught  # the name of an except clause does not outlive it
            log.warning("no embedding for an image", image_key=ref.image_key[:12], reason=error.message)
            self._thread.submit(lambda engine: engine.image_failed(ref, error))
        else:
            self._thread.submit(lambda engine: engine.put_image(ref.image_key, rows))


def sampling_params(request: GenerateRequest) -> SamplingParams:
    """The request's sampling fields, checked. Raises InvalidRequest naming the field."""
    known = {field.name for field in dataclasses.fields(SamplingParams)}
    given = {name: value for name, value in request.sampling.items() if name in known}
    for name in ("stop", "stop_token_ids"):
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
        images=prompt.images,
        image_refs=prompt.image_refs,
        priority=request.priority,
        cache_salt=request.cache_salt,
    )
    built.engine.check(engine_request)
    return engine_request


def _build_prompt(built: BuiltEngine, request: GenerateRequest | TokenizeRequest) -> Prompt:
    if request.messages is not None:
        return built.prompts.from_messages(request.messages, request.tools)
    if request.prompt is None:
        raise InvalidRequest("give either messages or prompt", param="messages")
    return built.prompts.from_prompt(request.prompt, built.info.vocab_size)


def _event(output: EngineOutput, tokenizer: Tokenizer) -> GenerateEvent:
    if isinstance(output, RequestFailed):
        return Failed(error=wire_error(output.error))
    if isinstance(output, RequestFinished):
        return Finished(
            num_prompt_tokens=output.num_prompt_tokens,
            num_image_tokens=output.num_image_tokens,
            num_cached_tokens=output.num_cached_tokens,
            num_generated_tokens=output.num_generated_tokens,
            timings=output.timings,
        )
    finish = output.finish
    return Tokens(
        index=output.index,
        text=output.text,
        token_ids=output.token_ids,
        logprobs=[_token_logprob(t, logprobs, tokenizer) for t, logprobs in output.logprobs] or None,
        finish_reason=None if finish is None else finish.reason,
        stop_reason=None if finish is None else finish.stop_reason,
    )


def _token_logprob(token_id: int, logprobs: Logprobs, tokenizer: Tokenizer) -> TokenLogprob:
    top = zip(logprobs.top_token_ids, logprobs.top_logprobs, strict=True)
    return TokenLogprob(
        **_named(token_id, logprobs.logprob, tokenizer),
        top=[TokenLogprob(**_named(top_id, logprob, tokenizer)) for top_id, logprob in top],
    )


def _named(token_id: int, logprob: float, tokenizer: Tokenizer) -> dict[str, Any]:
    """A token under its readable name: its text, or the special token's spelling, which adds no text."""
    raw = tokenizer.token_bytes(token_id)
    token = raw.decode("utf-8", "replace") or tokenizer.token_string(token_id) or ""
    return {"token_id": token_id, "token": token, "logprob": max(logprob, LOWEST_LOGPROB), "bytes": list(raw)}
