"""The story of one response: the chat that it means, told in the words of the Responses API.

Images, admission, the choice of an engine, retries and cancellation are the chat's.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

from services.gateway.balancer import Replica
from services.gateway.chat import Chat, RunningChat
from services.gateway.generation import AnswerCut
from services.gateway.responses_chat import to_chat, with_client_paths
from services.gateway.responses_events import ResponseEvents
from services.gateway.responses_output import Output
from services.gateway.responses_schema import ResponsesRequest
from services.gateway.streaming import AnswerStream
from services.gateway.trace import Trace
from shared.wire.engine import Finished, ModelInfo


class Responses:
    def __init__(self, chat: Chat) -> None:
        self._chat = chat

    async def complete(self, body: ResponsesRequest, trace: Trace) -> dict[str, Any]:
        """The whole answer as one body; as in a chat, an engine that breaks over it is replaced once."""
        try:
            return await self._answer(body, trace)
        except AnswerCut as cut:
            return await self._answer(body, trace, avoided=cut.replica)

    async def _answer(
        self, body: ResponsesRequest, trace: Trace, *, avoided: Replica[ModelInfo] | None = None
    ) -> dict[str, Any]:
        """Raises AnswerCut if the engine breaks over it."""
        chat = await self._start(body, trace, avoided=avoided)
        output = Output(body, chat)
        usage: dict[str, Any] = {}
        is_answered = False
        try:
            async for event in chat.generation.events():
                if isinstance(event, Finished):
                    usage = await self._chat.usage(chat, event, trace)
                else:
                    for part in chat.read(event):
                        output.add(*part)
            is_answered = True
        finally:
            await self._chat.end(chat, is_answered=is_answered)
        return output.finished(usage)

    async def stream(self, body: ResponsesRequest, trace: Trace) -> AnswerStream:
        """The same answer as events; returns when the first token is there, so that errors before it stay plain."""
        chat = await self._start(body, trace)
        events = ResponseEvents(Output(body, chat))
        is_answered = False

        async def frames() -> AsyncGenerator[bytes]:
            nonlocal is_answered
            yield events.opening()
            async for event in chat.generation.events():
                if isinstance(event, Finished):
                    is_answered = True
                    yield events.closing(await self._chat.usage(chat, event, trace))
                else:
                    yield b"".join(events.tokens(*part) for part in chat.read(event))

        async def close() -> None:
            await self._chat.end(chat, is_answered=is_answered)

        return AnswerStream(frames(), close, error_frame=events.failure)

    async def _start(
        self, body: ResponsesRequest, trace: Trace, *, avoided: Replica[ModelInfo] | None = None
    ) -> RunningChat:
        request, paths = to_chat(body)
        with with_client_paths(paths):
            return await self._chat.start(request, trace, avoided=avoided)
