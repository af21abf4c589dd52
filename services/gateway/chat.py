"""The story of one chat: images loaded and admitted, an engine asked, its tokens passed on.

Pictures are never decoded here and prompts never rendered: encoders see, engines speak.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from services.gateway.admission import Admission
from services.gateway.answers import Choice, usage_of
from services.gateway.auth import ANONYMOUS
from services.gateway.balancer import Replica
from services.gateway.cache_salts import CacheSalts
from services.gateway.constraints import ToolPlan, constraint_of
from services.gateway.field_names import named_as_given
from services.gateway.generation import AnswerCut, Generation, Generator
from services.gateway.images import ImageLoader, LoadedImage
from services.gateway.messages import affinity_parts, check_contents, image_sources, to_wire
from services.gateway.prompt_tokens import prompt_logprobs_body
from services.gateway.reasoning import ReasoningReader
from services.gateway.schema import ChatRequest, Message, template_kwargs, wire_sampling, wire_tools
from services.gateway.streaming import DONE, AnswerStream, ChatChunks, ChunkTail
from services.gateway.timeline import GATEWAY, Timeline
from services.gateway.tool_calls.reader import CallDelta, ToolReader
from services.gateway.trace import Trace
from services.gateway.vision import Vision
from shared.errors import EmbeddingNotFound, EncodeFailed, UnsupportedFeature
from shared.hashing import digest
from shared.wire.engine import Finished, GenerateRequest, ModelInfo, Tokens


@dataclass(frozen=True, slots=True)
class Question:
    """A checked request with its images' bytes, ready to be asked, twice if need be."""

    id: str
    body: ChatRequest
    model: str
    sampling: dict[str, Any]
    tools: list[dict[str, Any]] | None
    images: list[LoadedImage]
    avoided: Replica[ModelInfo] | None


@dataclass(frozen=True, slots=True)
class RunningChat:
    """A chat whose first token is there.

    reasoning   None: the model marks none
    tools       None: no tools were offered, so text is text
    """

    id: str
    created: int
    model: str
    generation: Generation
    admission: Admission
    reasoning: ReasoningReader | None
    tools: ToolReader | None

    def read(self, event: Tokens) -> Sequence[tuple[Tokens, Sequence[CallDelta], str]]:
        """The event's text without calls of tools and reasoning, what it adds to calls after that text, and the
        reasoning before it; more than one of these where text follows calls."""
        event, reasoning = (event, "") if self.reasoning is None else self.reasoning.read(event)
        if self.tools is None:
            return ((event, (), reasoning),)
        (first, calls), *rest = self.tools.read(event)
        return [(first, calls, reasoning), *((text, later_calls, "") for text, later_calls in rest)]


class Chat:
    def __init__(
        self, generator: Generator, vision: Vision, loader: ImageLoader, salts: CacheSalts, *, max_image_bytes: int
    ) -> None:
        self._generator = generator
        self._vision = vision
        self._loader = loader
        self._salts = salts
        self._max_image_bytes = max_image_bytes

    async def complete(self, body: ChatRequest, trace: Trace) -> dict[str, Any]:
        """The whole answer as one body; an engine that breaks over it is replaced once, even in the middle."""
        try:
            return await self._answer(body, trace)
        except AnswerCut as cut:  # nobody has seen anything of it
            return await self._answer(body, trace, avoided=cut.replica)

    async def _answer(
        self, body: ChatRequest, trace: Trace, *, avoided: Replica[ModelInfo] | None = None
    ) -> dict[str, Any]:
        """Raises AnswerCut if the engine breaks over it."""
        chat = await self.start(body, trace, avoided=avoided)
        choices = [Choice() for _ in range(body.n)]
        usage: dict[str, Any] = {}
        prompt_logprobs: list[dict[str, Any] | None] = []
        is_answered = False
        try:
            async for event in chat.generation.events():
                if isinstance(event, Finished):
                    usage = await self.usage(chat, event, trace)
                else:
                    prompt_logprobs += prompt_logprobs_body(event.prompt_tokens or [], body.prompt_logprobs or 0)
                    for part in chat.read(event):
                        choices[event.index].add(*part)
            is_answered = True
        finally:
            await self.end(chat, is_answered=is_answered)
        answer = {
            "id": chat.id,
            "object": "chat.completion",
            "created": chat.created,
            "model": chat.model,
            "choices": [choice.to_chat(index) for index, choice in enumerate(choices)],
            "usage": usage,
        }
        if body.prompt_logprobs is not None:
            answer["prompt_logprobs"] = prompt_logprobs
        return answer

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
                    yield b"".join(chunks.tokens(*part) for part in chat.read(event))
                    continue
                usage = await self.usage(chat, event, trace)
                is_answered = True
                yield (chunks.usage(usage) if include_usage else b"") + DONE

        async def close() -> None:
            await self.end(chat, is_answered=is_answered)

        return AnswerStream(frames(), close)

    # --- the story --------------------------------------------------------------------------------------------------

    async def start(self, body: ChatRequest, trace: Trace, *, avoided: Replica[ModelInfo] | None = None) -> RunningChat:
        """Check, load, admit, ask; once more with a fresh encode if an image's embedding was lost on the way.

        avoided   an engine that is asked only if there is no other
        """
        trace.timeline.hides_origins = self._salts.by_key
        trace.timeline.add("receive", trace.started_at, time.perf_counter(), GATEWAY)
        trace.model = model = self._generator.model(body.model)
        self._generator.check_queues(model, body.priority)
        plan = ToolPlan.of(body, self._generator.tool_format(model))
        form = self._generator.reasoning_format(model)
        content = constraint_of(body)
        sampling = wire_sampling(plan.applied_to(body.sampling(), content))
        tools = wire_tools(body.tools) if plan.functions else None
        images = await self.load(body.messages, model, trace)
        question = Question(f"chatcmpl-{uuid.uuid4().hex}", body, model, sampling, tools, images, avoided)
        try:
            generation, admission = await self._ask(question, trace, fresh=False)
        except EmbeddingNotFound:
            try:
                generation, admission = await self._ask(question, trace, fresh=True)
            except EmbeddingNotFound as error:
                # To the client this is no 404: it did nothing wrong and cannot do anything about it.
                raise EncodeFailed(f"encoding failed twice: {error.message}", param=error.param) from error
        trace.first_token()
        is_open = generation.started.is_reasoning_open
        reasoning = None if form is None else ReasoningReader(form, is_open=is_open)
        return RunningChat(question.id, int(time.time()), model, generation, admission, reasoning, plan.reader(content))

    async def _ask(self, question: Question, trace: Trace, *, fresh: bool) -> tuple[Generation, Admission]:
        """Admit the images and ask an engine at once: encoding them and prefilling the text before them overlap."""
        body = question.body
        admission = await self.admit(question.images, trace, fresh=fresh)
        request = GenerateRequest(
            request_id=f"{question.id}-fresh" if fresh else question.id,
            messages=to_wire(body.messages, admission.refs),
            tools=question.tools,
            template_kwargs=template_kwargs(body.chat_template_kwargs, body.reasoning_effort),
            sampling=question.sampling,
            priority=body.priority,
            cache_salt=self._salts.salt(body.cache_salt, trace.key_name),
        )
        affinity = digest(request.cache_salt.encode(), *affinity_parts(request.messages or ()))
        try:
            opening = self._generator.open(
                request,
                model=question.model,
                affinity=affinity,
                request_id=trace.request_id,
                avoided=question.avoided,
            )
            with named_as_given(body.names_given):
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
            max_bytes = self._vision.max_image_bytes(self._max_image_bytes)
            images = await self._loader.load(sources, max_bytes, trace.key_name or ANONYMOUS)
        for number, image in enumerate(images):
            trace.timeline.add("fetch", image.asked_at, image.loaded_at, GATEWAY, number)
        return images

    async def admit(self, images: list[LoadedImage], trace: Trace, *, fresh: bool, num_others: int = 0) -> Admission:
        """num_others   pictures of the conversation beside these, of which only the size is known"""
        if not images:
            return Admission()
        return await self._vision.admit(images, trace, fresh=fresh, num_others=num_others)

    async def usage(self, chat: RunningChat, finished: Finished, trace: Trace) -> dict[str, Any]:
        await self._tell(chat, finished, trace.timeline)
        for timings in chat.admission.timings:
            trace.merge(timings)
        num_reasoning_tokens = 0 if chat.reasoning is None else chat.reasoning.num_tokens
        return usage_of([finished], trace, num_reasoning_tokens)

    async def _tell(self, chat: RunningChat, finished: Finished, timeline: Timeline) -> None:
        generation, numbers = chat.generation, chat.admission.numbers()
        await chat.admission.tell(timeline)
        timeline.add_all(finished.spans, began_at=generation.asked_at, where=generation.where, images=numbers)
        for key, source in finished.embedding_sources.items():
            for number in numbers.get(key, ()):
                timeline.images[number] = replace(timeline.images[number], embedding_from=source)

    async def end(self, chat: RunningChat, *, is_answered: bool) -> None:
        chat.admission.release(abandoned=not is_answered)
        await chat.generation.aclose()
