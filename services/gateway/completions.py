"""The story of one text completion: one or several prompts, each a generation of its own, answered together."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from typing import Any

from services.gateway.answers import Choice, usage_of
from services.gateway.balancer import Replica
from services.gateway.cache_salts import CacheSalts
from services.gateway.constraints import constraint_of
from services.gateway.field_names import named_as_given
from services.gateway.generation import AnswerCut, Generation, Generator
from services.gateway.prompt_tokens import Echo, PromptScores, ScoreLimit, completion_choice
from services.gateway.schema import CompletionRequest, Prompt, wire_sampling
from services.gateway.streaming import DONE, AnswerStream, ChunkTail, CompletionChunks
from services.gateway.trace import Trace
from shared.errors import InvalidRequest
from shared.hashing import digest
from shared.wire.engine import Finished, GenerateRequest, ModelInfo, Tokens

Running = tuple[str, str, list[Generation]]  # the answer's id, the model, and what answers each prompt
MAX_PROMPTS = 256
_AFFINITY_CHARS = 2048
_AFFINITY_TOKENS = 512


class Completions:
    def __init__(self, generator: Generator, salts: CacheSalts) -> None:
        self._generator = generator
        self._salts = salts

    async def complete(self, body: CompletionRequest, trace: Trace) -> dict[str, Any]:
        """All answers as one body; as in a chat, an engine that breaks over one is replaced once."""
        try:
            return await self._answer(body, trace)
        except AnswerCut as cut:
            return await self._answer(body, trace, avoided=cut.replica)

    async def _answer(
        self, body: CompletionRequest, trace: Trace, *, avoided: Replica[ModelInfo] | None = None
    ) -> dict[str, Any]:
        """Raises AnswerCut if an engine breaks over it."""
        completion_id, model, generations = await self._start(body, trace, avoided=avoided)
        choices = [Choice() for _ in range(body.n * len(generations))]
        scores = [PromptScores(body) for _ in generations]
        finished: list[Finished] = []
        try:
            async with aclosing(_merged(generations)) as events:
                async for prompt_index, event in events:
                    if isinstance(event, Finished):
                        finished.append(_counted(event, body))
                        _note(generations[prompt_index], event, trace)
                    else:
                        scores[prompt_index].add(event.prompt_tokens or [])
                        choices[prompt_index * body.n + event.index].add(event)
        finally:
            await _close(generations)

        def told() -> list[dict[str, Any]]:
            texts = [generation.started.prompt_text or "" for generation in generations]
            return [
                completion_choice(choice, index, body, texts[index // body.n], scores[index // body.n])
                for index, choice in enumerate(choices)
            ]

        return {
            "id": completion_id,
            "object": "text_completion",
            "created": int(time.time()),
            "model": model,
            # Of scored prompts that is long work, for which no other request is to wait.
            "choices": await asyncio.to_thread(told) if scores[0].echoed else told(),
            "usage": usage_of(finished, trace),
        }

    async def stream(self, body: CompletionRequest, trace: Trace) -> AnswerStream:
        """Returns when every prompt's first token is there, so that errors before it stay plain."""
        completion_id, model, generations = await self._start(body, trace)
        include_usage = body.stream_options.include_usage
        tail = ChunkTail(body.stream_options, sum(generation.started.num_prompt_tokens for generation in generations))
        chunks = CompletionChunks(id=completion_id, created=int(time.time()), model=model, tail=tail)
        echo = Echo(body)

        async def frames() -> AsyncGenerator[bytes]:
            finished: list[Finished] = []
            async with aclosing(_merged(generations)) as events:
                async for prompt_index, event in events:
                    if isinstance(event, Finished):
                        finished.append(_counted(event, body))
                        _note(generations[prompt_index], event, trace)
                    else:
                        index = prompt_index * body.n + event.index
                        prompt_text = generations[prompt_index].started.prompt_text
                        yield chunks.tokens(echo.applied_to(event, index, prompt_text), index)
            usage = usage_of(finished, trace)
            yield (chunks.usage(usage) if include_usage else b"") + DONE

        async def close() -> None:
            await _close(generations)

        return AnswerStream(frames(), close)

    async def _start(
        self, body: CompletionRequest, trace: Trace, *, avoided: Replica[ModelInfo] | None = None
    ) -> Running:
        trace.model = model = self._generator.model(body.model)
        self._generator.check_queues(model, body.priority)
        if len(body.prompt) > MAX_PROMPTS:
            raise InvalidRequest(f"there are {len(body.prompt)} prompts; at most {MAX_PROMPTS}", param="prompt")
        salt = self._salts.salt(body.cache_salt, trace.key_name)
        params = replace(body.sampling(), constraint=constraint_of(body))
        sampling, limit = wire_sampling(params), ScoreLimit(params)
        completion_id = f"cmpl-{uuid.uuid4().hex}"
        openings = [
            self._generator.open(
                GenerateRequest(
                    request_id=f"{completion_id}-{index}",
                    prompt=prompt,
                    sampling=sampling,
                    priority=body.priority,
                    cache_salt=salt,
                    echo=body.echo,
                    only_echoes=body.only_echoes,
                    cuts_to_context="max_tokens" not in body.model_fields_set,
                ),
                model=model,
                affinity=_affinity(salt, prompt),
                request_id=trace.request_id,
                on_started=partial(limit.add, index),
                avoided=avoided,
            )
            for index, prompt in enumerate(body.prompt)
        ]
        tasks = [asyncio.create_task(opening) for opening in openings]
        try:
            with named_as_given(body.names_given):
                generations = list(await asyncio.gather(*tasks))
        except BaseException:
            for task in tasks:
                task.cancel()
            opened = await asyncio.gather(*tasks, return_exceptions=True)
            await _close([generation for generation in opened if isinstance(generation, Generation)])
            raise
        trace.first_token()
        return completion_id, model, generations


def _counted(finished: Finished, body: CompletionRequest) -> Finished:
    """As the client is to see it: a token that was generated only because engines must is none."""
    return finished.model_copy(update={"num_generated_tokens": 0}) if body.only_echoes else finished


def _note(generation: Generation, finished: Finished, trace: Trace) -> None:
    trace.timeline.add_all(finished.spans, began_at=generation.asked_at, where=generation.where)


async def _close(generations: list[Generation]) -> None:
    await asyncio.gather(*(generation.aclose() for generation in generations))


async def _merged(generations: list[Generation]) -> AsyncGenerator[tuple[int, Tokens | Finished]]:
    """Events of all prompts as they come, each with the index of its prompt."""
    if len(generations) == 1:
        async for only in generations[0].events():
            yield 0, only
        return
    # One place per prompt: a client that reads slowly slows its engines down instead of filling memory.
    queue: asyncio.Queue[tuple[int, Tokens | Finished | Exception | None]] = asyncio.Queue(len(generations))

    async def pump(index: int, generation: Generation) -> None:
        try:
            async for event in generation.events():
                await queue.put((index, event))
            await queue.put((index, None))
        except Exception as error:  # noqa: BLE001 - whatever it was, whoever waits for the queue must hear of it
            await queue.put((index, error))

    pumps = [asyncio.create_task(pump(index, generation)) for index, generation in enumerate(generations)]
    num_running = len(pumps)
    try:
        while num_running:
            index, event = await queue.get()
            if isinstance(event, Exception):
                raise event
            if event is None:
                num_running -= 1
            else:
                yield index, event
    finally:
        for task in pumps:
            task.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)


def _affinity(cache_salt: str, prompt: Prompt) -> bytes:
    if isinstance(prompt, str):
        return digest(cache_salt.encode(), prompt[:_AFFINITY_CHARS].encode())
    return digest(cache_salt.encode(), repr(prompt[:_AFFINITY_TOKENS]).encode())
