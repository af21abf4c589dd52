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
from services.gateway.generation import Generation, Generator
from services.gateway.images import ImageLoader, LoadedImage
from services.gateway.messages import affinity_parts, check_contents, image_sources, to_wire
from services.gateway.schema import ChatRequest, Message, TokenizeBody, wire_sampling
from services.gateway.streaming import DONE, AnswerStream, ChatChunks
from services.gateway.trace import Trace
from services.gateway.vision import Vision
from shared.errors import EmbeddingNotFound, EncodeFailed, InvalidRequest, UnsupportedFeature
from shared.hashing import digest
from shared.wire import Finished, GenerateRequest, TokenizeRequest, TokenizeResponse


@dataclass(frozen=True, slots=True)
class Question:
    """A checked request with its images' bytes, ready to be asked, twice if need be."""

    id: str
    body: ChatRequest
    model: str
    sampling: dict[str, Any]
    images: list[LoadedImage]


@dataclass(frozen=True, slots=True)
class RunningChat:
    """A chat whose first token is there."""

    id: str
    created: int
    model: str
    generation: Generation
    admission: Admission


class Chat:
    def __init__(self, generator: Generator, vision: Vision, loader: ImageLoader, *, max_image_bytes: int) -> None:
        self._generator = generator
        self._vision = vision
        self._loader = loader
        self._max_image_bytes = max_image_bytes

    async def complete(self, body: ChatRequest, trace: Trace) -> dict[str, Any]:
        """The whole answer as one body."""
        chat = await self._start(body, trace)
        choices = [Choice() for _ in range(body.n)]
        usage: dict[str, Any] = {}
        is_answered = False
        try:
            async for event in chat.generation.events():
                if isinstance(event, Finished):
                    usage = self._usage(chat, event, trace)
                else:
                    choices[event.index].add(event)
            is_answered = True
        finally:
            await self._end(chat, is_answered=is_answered)
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
        chat = await self._start(body, trace)
        include_usage = body.stream_options.include_usage
        chunks = ChatChunks(id=chat.id, created=chat.created, model=chat.model, include_usage=include_usage)
        is_answered = False

        async def frames() -> AsyncGenerator[bytes]:
            nonlocal is_answered
            async for event in chat.generation.events():
                if not isinstance(event, Finished):
                    yield chunks.tokens(event)
                    continue
                usage = self._usage(chat, event, trace)
                is_answered = True
                yield (chunks.usage(usage) if include_usage else b"") + DONE

        async def close() -> None:
            await self._end(chat, is_answered=is_answered)

        return AnswerStream(frames(), close)

    async def tokenize(self, body: TokenizeBody, trace: Trace) -> TokenizeResponse:
        """How an engine would count this prompt, pictures included."""
        model = self._generator.model(body.model)
        if bool(body.messages) == (body.prompt is not None):
            raise InvalidRequest("give either prompt or messages", param="prompt")
        if not body.messages:
            return await self._generator.tokenize(TokenizeRequest(prompt=body.prompt), model=model)
        admission = await self._admit(await self._load(body.messages, model, trace), trace, fresh=False)
        try:
            messages = to_wire(body.messages, admission.refs)
            return await self._generator.tokenize(TokenizeRequest(messages=messages, tools=body.tools), model=model)
        finally:
            admission.release(abandoned=False)

    # --- the story --------------------------------------------------------------------------------------------------

    async def _start(self, body: ChatRequest, trace: Trace) -> RunningChat:
        """Check, load, admit, ask; once more with a fresh encode if an image's embedding was lost on the way."""
        trace.model = model = self._generator.model(body.model)
        sampling = wire_sampling(body.sampling())
        images = await self._load(body.messages, model, trace)
        question = Question(f"chatcmpl-{uuid.uuid4().hex}", body, model, sampling, images)
        try:
            generation, admission = await self._ask(question, trace, fresh=False)
        except EmbeddingNotFound:
            try:
                generation, admission = await self._ask(question, trace, fresh=True)
            except EmbeddingNotFound as error:
                # To the client this is no 404: it did nothing wrong and cannot do anything about it.
                raise EncodeFailed(f"encoding failed twice: {error.message}", param=error.param) from error
        trace.first_token()
        return RunningChat(question.id, int(time.time()), model, generation, admission)

    async def _ask(self, question: Question, trace: Trace, *, fresh: bool) -> tuple[Generation, Admission]:
        """Admit the images and ask an engine at once: encoding them and prefilling the text before them overlap."""
        body = question.body
        admission = await self._admit(question.images, trace, fresh=fresh)
        request = GenerateRequest(
            request_id=f"{question.id}-fresh" if fresh else question.id,
            messages=to_wire(body.messages, admission.refs),
            tools=body.tools if body.tool_choice == "auto" else None,
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

    async def _load(self, messages: Sequence[Message], model: str, trace: Trace) -> list[LoadedImage]:
        check_contents(messages)
        sources = image_sources(messages)
        trace.num_images = len(sources)
        if not sources:
            return []
        if not self._generator.takes_images(model):
            raise UnsupportedFeature(f"{model} takes text only; remove the image parts", param=sources[0].param)
        with trace.stage("fetch"):
            return await self._loader.load(sources, self._vision.max_image_bytes(self._max_image_bytes))

    async def _admit(self, images: list[LoadedImage], trace: Trace, *, fresh: bool) -> Admission:
        return await self._vision.admit(images, trace, fresh=fresh) if images else Admission()

    def _usage(self, chat: RunningChat, finished: Finished, trace: Trace) -> dict[str, Any]:
        for timings in chat.admission.timings:
            trace.merge(timings)
        return usage_of([finished], trace)

    async def _end(self, chat: RunningChat, *, is_answered: bool) -> None:
        chat.admission.release(abandoned=not is_answered)
        await chat.generation.aclose()
