"""One generation on some text engine: chosen, opened up to its first token, retried elsewhere until then.

Once a token exists nothing is retried here: the client may have seen it. How the answer ended, the pool hears all the
same.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial

from services.gateway.attempts import Result, on_a_replica
from services.gateway.backends import EngineClient
from services.gateway.balancer import Pool, Replica, is_replica_fault
from shared.errors import DiptychError, ModelNotFound, NotReady, UpstreamFailed
from shared.reasoning import ReasoningFormat
from shared.wire.engine import (
    AdapterInfo,
    Finished,
    GenerateRequest,
    ModelInfo,
    Started,
    TokenizeRequest,
    TokenizeResponse,
    Tokens,
    ToolFormat,
)

RETRY_AFTER_S = 2.0
END_OF_STREAM_S = 0.5


class AnswerCut(UpstreamFailed):
    """The engine broke after its first token: what it would have said is lost, and nobody else can go on with it."""

    def __init__(self, message: str, replica: Replica[ModelInfo]) -> None:
        super().__init__(message)
        self.replica = replica


class Generation:
    """The events of a running generation; it already has its first token. Close it, whatever happens.

    replica    the engine that does it
    asked_at   by time.perf_counter()
    note       hears how the answer ended, unless it is closed before
    """

    def __init__(
        self,
        started: Started,
        first: Tokens | Finished,
        rest: AsyncIterator[Started | Tokens | Finished],
        stack: AsyncExitStack,
        *,
        replica: Replica[ModelInfo],
        asked_at: float,
        note: Callable[[DiptychError | None], None],
    ) -> None:
        self.started = started
        self.asked_at = asked_at
        self.where = f"text_engine-{replica.number}"
        self._replica = replica
        self._note = note
        self._first = first
        self._rest = rest
        self._stack = stack
        self._is_complete = isinstance(first, Finished)

    async def events(self) -> AsyncIterator[Tokens | Finished]:
        """Tokens of all choices as they come, then `Finished`. Raises AnswerCut."""
        if self._is_complete:
            self._note(None)
        yield self._first
        while not self._is_complete:
            try:
                event = await anext(self._rest)
                if isinstance(event, Started):
                    raise UpstreamFailed("the text engine sent its events in the wrong order")
            except DiptychError as error:
                self._note(error)
                if is_replica_fault(error) or isinstance(error, NotReady):
                    raise AnswerCut(error.message, self._replica) from error
                raise
            self._is_complete = isinstance(event, Finished)
            if self._is_complete:
                self._note(None)
            yield event

    async def aclose(self) -> None:
        """Aborts what still runs; gives the connection back if all has been said."""
        try:
            if self._is_complete:
                with suppress(TimeoutError, DiptychError):
                    async with asyncio.timeout(END_OF_STREAM_S):
                        await anext(self._rest, None)
        finally:
            await self._stack.aclose()


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A name that requests may give. adapter: the LoRA adapter of that name; None: the engine's own model"""

    id: str
    info: ModelInfo
    adapter: AdapterInfo | None = None


class Generator:
    def __init__(self, pool: Pool[ModelInfo], client: EngineClient) -> None:
        self._pool = pool
        self._client = client

    def models(self) -> list[ServedModel]:
        """Every model that an engine serves or has served, ready or not, each once: adapters after what they adapt."""
        infos = [replica.info for replica in self._pool.replicas if replica.info is not None]
        served = {info.id: ServedModel(info.id, info) for info in infos}
        for info in infos:
            for adapter in info.adapters:
                served.setdefault(adapter.name, ServedModel(adapter.name, info, adapter))
        return list(served.values())

    def served(self, model: str) -> ServedModel:
        """Raises ModelNotFound: it may have gone since `model` said its name."""
        served = next((each for each in self.models() if each.id == model), None)
        if served is None:
            raise ModelNotFound(f"the model {model!r} is not served any more", param="model")
        return served

    def model(self, name: str | None) -> str:
        """The served model that a request means; a request without a name means the first one.

        Raises ModelNotFound; NotReady while no engine has said yet what it serves.
        """
        served = [each.id for each in self.models()]
        if not served:
            raise NotReady("no text engine is ready yet", retry_after_s=RETRY_AFTER_S)
        if name is None:
            return served[0]
        if name not in served:
            raise ModelNotFound(
                f"the model {name[:80]!r} does not exist here; there is {', '.join(served)}", param="model"
            )
        return name

    def takes_images(self, model: str) -> bool:
        return any(each.info.supports_images for each in self.models() if each.id == model)

    def tool_format(self, model: str) -> ToolFormat:
        return self.served(model).info.tool_format

    def reasoning_format(self, model: str) -> ReasoningFormat | None:
        return self.served(model).info.reasoning_format

    async def open(
        self,
        request: GenerateRequest,
        *,
        model: str,
        affinity: bytes,
        request_id: str,
        on_started: Callable[[Started], None] = lambda _: None,
        avoided: Replica[ModelInfo] | None = None,
    ) -> Generation:
        """A generation with its first token. Raises whatever the last engine refused it with.

        An engine that takes nothing (leaving, full) is passed over; one that breaks is replaced once.

        on_started   hears of the prompt before anything of the answer is read; what it raises ends the request
        avoided      an engine that is asked only if there is no other
        """

        async def work(replica: Replica[ModelInfo], num_tries: int) -> Generation:
            # An engine knows requests by their id, and an earlier try may not be gone from it yet.
            attempt = f"{request.request_id}-retry{num_tries}" if num_tries else request.request_id
            adapter = None if replica.info is None or replica.info.id == model else model
            asked = request.model_copy(update={"request_id": attempt, "adapter": adapter})
            return await self._open_on(replica, asked, request_id, on_started)

        return await self._on_an_engine(model, affinity, work, priority=request.priority, avoided=avoided)

    def check_queues(self, model: str, priority: int) -> None:
        """Raises Overloaded if all engines have said that they would refuse it: to be asked before anything is spent
        on a request, its pictures above all."""
        self._pool.check_queues(self._engines(model), priority)

    async def tokenize(self, request: TokenizeRequest, *, model: str) -> TokenizeResponse:
        async def work(replica: Replica[ModelInfo], _num_tries: int) -> TokenizeResponse:
            with replica.lease():
                answer = await self._client.tokenize(replica.url, request)
            self._pool.note(replica, None)
            return answer

        return await self._on_an_engine(model, b"", work)

    async def _on_an_engine(
        self,
        model: str,
        affinity: bytes,
        work: Callable[[Replica[ModelInfo], int], Awaitable[Result]],
        *,
        priority: int | None = None,
        avoided: Replica[ModelInfo] | None = None,
    ) -> Result:
        """priority   None: it waits in no queue"""

        def choose(tried: list[Replica[ModelInfo]], failure: DiptychError) -> Replica[ModelInfo] | None:
            others = self._engines(model, tried)
            others = [each for each in others if each is not avoided] or others
            if priority is not None:
                if not tried:
                    self.check_queues(model, priority)
                others = self._pool.with_open_queue(others, priority)
            return self._pool.least_loaded(others, affinity) or self._again(tried, failure)

        nobody = NotReady(f"no text engine that serves {model!r} is ready", retry_after_s=RETRY_AFTER_S)
        return await on_a_replica(self._pool, choose, work, nobody=nobody)

    def _engines(self, model: str, tried: Sequence[Replica[ModelInfo]] = ()) -> list[Replica[ModelInfo]]:
        return self._pool.available(tried, lambda info: info.serves(model))

    def _again(self, tried: list[Replica[ModelInfo]], failure: DiptychError) -> Replica[ModelInfo] | None:
        """The last replica, if only the connection broke: an idle one may have been closed at its other end."""
        broke = bool(tried) and type(failure) is UpstreamFailed
        return tried[-1] if broke and tried[-1] in self._pool.available() else None

    @asynccontextmanager
    async def _admission(self, replica: Replica[ModelInfo], priority: int) -> AsyncIterator[None]:
        """One request of a crowd asks first: what the engine tells it of its queue, the others hear before they ask."""
        async with replica.admission_slots:
            self._pool.check_queues([replica], priority)
            yield

    async def _open_on(
        self,
        replica: Replica[ModelInfo],
        request: GenerateRequest,
        request_id: str,
        on_started: Callable[[Started], None],
    ) -> Generation:
        stack = AsyncExitStack()
        asked_at = time.perf_counter()
        try:
            stack.enter_context(replica.lease())
            generating = self._client.generate(
                replica.url,
                request,
                request_id,
                admission=self._admission(replica, request.priority),
                on_queue=partial(self._pool.note_queue, replica, request.priority),
            )
            events = await stack.enter_async_context(generating)
            started = await anext(events)
            if isinstance(started, Started):
                on_started(started)
            first = await anext(events)
            if not isinstance(started, Started) or isinstance(first, Started):
                raise UpstreamFailed("the text engine sent its events in the wrong order")
        except BaseException:
            await stack.aclose()
            raise
        note = partial(self._pool.note, replica)
        return Generation(started, first, events, stack, replica=replica, asked_at=asked_at, note=note)
