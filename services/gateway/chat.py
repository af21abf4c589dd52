"""The story of one chat: images loaded and admitted, an engine asked, its tokens passed on.

Pictures are never decoded here and prompts never rendered: encoders see, engines speak.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Any

from services.gateway.admission import Admission
from services.gateway.answers import Choice, usage_of
from services.gateway.constraints import ToolPlan, constraint_of
from services.gateway.generation import Generation, Generator
from services.gateway.images import ImageLoader, LoadedImage
from services.gateway.messages import affinity_parts, check_contents, image_sources, to_wire
from services.gateway.schema import ChatRequest, Message, wire_sampling, wire_tools
from services.gateway.streaming import DONE, AnswerStream, ChatChunks, ChunkTail
from services.gateway.tool_calls import NumberedCall, ToolReader
from services.gateway.trace import Trace
from services.gateway.vision import Vision
from shared.errors import EmbeddingNotFound, EncodeFailed, UnsupportedFeature
from shared.hashing import digest
from shared.wire import Finished, GenerateRequest, Tokens


@dataclass(frozen=True, slots=True)
class Question:
    """A checked request with its images' bytes, ready to be asked, twice if need be."""

    id: str
    body: ChatRequest
    model: str
    sampling: dict[str, Any]
    tools: list[dict[str, Any]] | None
    images: list[LoadedImage]


@dataclass(frozen=True, slots=True)
class RunningChat:
    """A chat whose first token is there.

    tools   None: no tools were offered, so text is text
    """

    id: str
    created: int
    model: str
    generation: Generation
    admission: Admission
    tools: ToolReader | None

    def read(self, event: Tokens) -> tuple[Tokens, Sequence[NumberedCall]]:
        """The event's text without calls of tools, and the calls."""
        return (event, ()) if self.tools is None else self.tools.read(event)


class Chat:
    def __init__(self, generator: Generator, vision: Vision, loader: ImageLoader, *, max_image_bytes: int) -> None:
        self._generator = generator
        self._vision = vision
        self._loader = loader
        self._max_image_bytes = max_image_bytes

    async def complete(self, body: ChatRequest, trace: Trace) -> dict[str, Any]:
        """The whole answer as one body."""
        chat = await self.start(body, trace)
        choices = [Choice() for _ in range(body.n)]
        usage: dict[str, Any] = {}
        is_answered = False
        try:
            async for event in chat.generation.events():
                if isinstance(event, Finished):
                    usage = self.usage(chat, event, trace)
                else:
                    choices[event.index].add(*chat.read(event))
            is_answered = True
        finally:
            await self.end(chat, is_answered=is_answered)
        return {
            "id": chat.id,
            "object": "chat.completion",
            "created": chat.created,
            "model": chat.model,
            "choices": [choice.to_chat(index) for index, choice in enumerate(choices)],
            "usage": usage,
        }

    async def stream(self, body: ChatRequest, trace: Trace) -> AnswerStream:
        """The same answer as frames; returns when the first token is there, so that errors before it stay plain."""
        chat = await self.start(body, trace)
        include_usage = body.stream_options.include_usage
        tail = ChunkTail(body.stream_options, chat.generation.started.num_prompt_tokens)
        chunks = ChatChunks(id=chat.id, created=chat.created, model=chat.model, tail=tail)
        is_answered = False

        async def frames() -> AsyncGenerator[bytes]:
            nonlocal is_answered
            async for event in chat.generation.events():
                if not isinstance(event, Finished):
                    yield chunks.tokens(*chat.read(event))
                    continue
                usage = self.usage(chat, event, trace)
                is_answered = True
                yield (chunks.usage(usage) if include_usage else b"") + DONE

        async def close() -> None:
            await self.end(chat, is_answered=is_answered)

        return AnswerStream(frames(), close)

    # --- the story --------------------------------------------------------------------------------------------------

    async def start(self, body: ChatRequest, trace: Trace) -> RunningChat:
        """Check, load, admit, ask; once more with a fresh encode if an image's embedding was lost on the way."""
        trace.model = model = self._generator.model(body.model)
        plan = ToolPlan.of(body, self._generator.tool_format(model))
        sampling = wire_sampling(plan.applied_to(body.sampling(), constraint_of(body)))
        tools = wire_tools(body.tools) if plan.functions else None
        images = await self.load(body.messages, model, trace)
        question = Question(f"chatcmpl-{uuid.uuid4().hex}", body, model, sampling, tools, images)
        try:
            generation, admission = await self._ask(question, trace, fresh=False)
        except EmbeddingNotFound:
            try:
                generation, admission = await self._ask(question, trace, fresh=True)
            except EmbeddingNotFound as error:
                # To the client this is no 404: it did nothing wrong and cannot do anything about it.
                raise EncodeFailed(f"encoding failed twice: {error.message}", param=error.param) from error
        trace.first_token()
        return RunningChat(question.id, int(time.time()), model, generation, admission, plan.reader())

    async def _ask(self, question: Question, trace: Trace, *, fresh: bool) -> tuple[Generation, Admission]:
        """Admit the images and ask an engine at once: encoding them and prefilling the text before them overlap."""
        body = question.body
        admission = await self.admit(question.images, trace, fresh=fresh)
        request = GenerateRequest(
            request_id=f"{question.id}-fresh" if fresh else question.id,
            messages=to_wire(body.messages, admission.refs),
            tools=question.tools,
            sampling=question.sampling,
            priority=body.priority,
            cache_salt=body.cache_salt,
        )
        affinity = digest(request.cache_salt.encode(), *affinity_parts(request.messages or ()))
        try:
            opening = self._generator.open(
                request, model=question.model, affinity=affinity, request_id=trace.request_id
            )
            return await admission.guard(opening), admission
        except BaseException:
            admission.release(abandoned=True)
            raise

    async def load(self, messages: Sequence[Message], model: str, trace: Trace) -> list[LoadedImage]:
        check_contents(messages)
        sources = image_sources(messages)
        trace.num_images = len(sources)
        if not sources:
            return []
        if not self._generator.takes_images(model):
            raise UnsupportedFeature(f"{model} takes text only; remove the image parts", param=sources[0].param)
        with trace.stage("fetch"):
            return await self._loader.load(sources, self._vision.max_image_bytes(self._max_image_bytes))

    async def admit(self, images: list[LoadedImage], trace: Trace, *, fresh: bool) -> Admission:
        return await self._vision.admit(images, trace, fresh=fresh) if images else Admission()

    def usage(self, chat: RunningChat, finished: Finished, trace: Trace) -> dict[str, Any]:
        for timings in chat.admission.timings:
            trace.merge(timings)
        return usage_of([finished], trace)

    async def end(self, chat: RunningChat, *, is_answered: bool) -> None:
        chat.admission.release(abandoned=not is_answered)
        await chat.generation.aclose()
