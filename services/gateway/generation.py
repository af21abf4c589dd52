"""One generation on some text engine: chosen, opened up to its first token, retried elsewhere until then.

Once a token exists nothing is retried: the client may have seen it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, suppress

from services.gateway.backends import EngineClient
from services.gateway.balancer import Pool, Replica, is_replica_fault, is_worth_another_replica
from shared.errors import DiptychError, ModelNotFound, NotReady, UpstreamFailed
from shared.wire import (
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
MAX_FAULTS = 1  # engines that may break over one request before another is not worth the risk


class Generation:
    """The events of a running generation; it already has its first token. Close it, whatever happens."""

    def __init__(
        self,
        started: Started,
        first: Tokens | Finished,
        rest: AsyncIterator[Started | Tokens | Finished],
        stack: AsyncExitStack,
    ) -> None:
        self.started = started
        self._first = first
        self._rest = rest
        self._stack = stack
        self._is_complete = isinstance(first, Finished)

    async def events(self) -> AsyncIterator[Tokens | Finished]:
        """Tokens of all choices as they come, then `Finished`."""
        yield self._first
        while not self._is_complete:
            event = await anext(self._rest)
            if isinstance(event, Started):
                raise UpstreamFailed("the text engine sent its events in the wrong order")
            self._is_complete = isinstance(event, Finished)
            yield event

    async def aclose(self) -> None:
        """Aborts what still runs; gives the connection back if all has been said."""
        if self._is_complete:
            with suppress(TimeoutError, DiptychError):
                async with asyncio.timeout(END_OF_STREAM_S):
                    await anext(self._rest, None)
        await self._stack.aclose()


class Generator:
    def __init__(self, pool: Pool[ModelInfo], client: EngineClient) -> None:
        self._pool = pool
        self._client = client

    def models(self) -> list[ModelInfo]:
        """Every model that an engine serves or has served, ready or not, each once."""
        infos = {replica.info.id: replica.info for replica in self._pool.replicas if replica.info is not None}
        return list(infos.values())

    def model(self, name: str | None) -> str:
        """The served model that a request means; a request without a name means the first one.

        Raises ModelNotFound; NotReady while no engine has said yet what it serves.
        """
        served = [info.id for info in self.models()]
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
        return any(info.supports_images for info in self.models() if info.id == model)

    def tool_format(self, model: str) -> ToolFormat:
        return next(info.tool_format for info in self.models() if info.id == model)

    async def open(self, request: GenerateRequest, *, model: str, affinity: bytes, request_id: str) -> Generation:
        """A generation with its first token. Raises whatever the last engine refused it with.

        An engine that takes nothing (leaving, full) is passed over; one that breaks is replaced once.
        """
        tried: list[Replica[ModelInfo]] = []
        num_faults = 0
        replica = self._choose(model, affinity)
        while True:
            # An engine knows requests by their id, and an earlier try may not be gone from it yet.
            attempt = f"{request.request_id}-retry{len(tried)}" if tried else request.request_id
            try:
                return await self._open_on(replica, request.model_copy(update={"request_id": attempt}), request_id)
            except DiptychError as error:
                num_faults += is_replica_fault(error)
                if not is_worth_another_replica(error) or num_faults > MAX_FAULTS:
                    raise
                tried.append(replica)
                others = self._pool.available(tried, lambda info: info.id == model)
                other = self._pool.least_loaded(others, affinity) or self._again(replica, error)
                if other is None:
                    raise
                replica = other

    async def tokenize(self, request: TokenizeRequest, *, model: str) -> TokenizeResponse:
        replica = self._choose(model, affinity=b"")
        try:
            with replica.lease():
                counted = await self._client.tokenize(replica.url, request)
        except DiptychError as error:
            self._pool.note(replica, error)
            raise
        self._pool.note(replica, None)
        return counted

    def _choose(self, model: str, affinity: bytes) -> Replica[ModelInfo]:
        replica = self._pool.least_loaded(self._pool.available(suits=lambda info: info.id == model), affinity)
        if replica is None:
            raise NotReady(f"no text engine that serves {model!r} is ready", retry_after_s=RETRY_AFTER_S)
        return replica

    def _again(self, replica: Replica[ModelInfo], error: Exception) -> Replica[ModelInfo] | None:
        """The same replica, if only the connection broke: an idle one may have been closed at its other end."""
        broke = type(error) is UpstreamFailed
        return replica if broke and replica in self._pool.available() else None

    async def _open_on(self, replica: Replica[ModelInfo], request: GenerateRequest, request_id: str) -> Generation:
        stack = AsyncExitStack()
        try:
            stack.enter_context(replica.lease())
            events = await stack.enter_async_context(self._client.generate(replica.url, request, request_id))
            started = await anext(events)
            first = await anext(events)
            if not isinstance(started, Started) or isinstance(first, Started):
                raise UpstreamFailed("the text engine sent its events in the wrong order")
        except BaseException as error:
            await stack.aclose()
            self._pool.note(replica, error)
            raise
        self._pool.note(replica, None)
        return Generation(started, first, events, stack)
