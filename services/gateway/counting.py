"""The story of one count: a prompt tokenized as an engine would, its pictures sent along or known by size alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from services.gateway.chat import Chat
from services.gateway.generation import Generator
from services.gateway.messages import to_wire
from services.gateway.schema import TokenizeBody, template_kwargs, wire_tools
from services.gateway.trace import Trace
from services.gateway.vision import Vision
from shared.errors import InvalidRequest, UnsupportedFeature
from shared.wire.engine import ChatMessage, ImagePart, TokenizeRequest, TokenizeResponse
from shared.wire.images import ImageRef


class Counting:
    def __init__(self, generator: Generator, vision: Vision, chat: Chat) -> None:
        self._generator = generator
        self._vision = vision
        self._chat = chat

    async def count(self, body: TokenizeBody, trace: Trace) -> dict[str, Any]:
        """Tokens of the prompt, and of each of its pictures in order."""
        model = self._generator.model(body.model)
        if body.prompt is not None:
            if body.messages or body.images:
                raise InvalidRequest("give either prompt or messages; pictures belong to messages", param="prompt")
            return _answer(await self._generator.tokenize(TokenizeRequest(prompt=body.prompt), model=model), [])
        if not body.messages and not body.images:
            raise InvalidRequest("give a prompt, messages or the sizes of images", param="prompt")
        images = await self._chat.load(body.messages, model, trace)
        sized = await self._sized(body, model, num_others=len(images))
        admission = await self._chat.admit(images, trace, fresh=False, num_others=len(sized))
        try:
            messages = _with_pictures(to_wire(body.messages, admission.refs), sized)
            request = TokenizeRequest(
                messages=messages,
                tools=wire_tools(body.tools),
                template_kwargs=template_kwargs(body.chat_template_kwargs, body.reasoning_effort),
            )
            counted = await self._generator.tokenize(request, model=model)
        finally:
            admission.release(abandoned=False)
        return _answer(counted, [*admission.refs, *sized])

    async def _sized(self, body: TokenizeBody, model: str, *, num_others: int) -> list[ImageRef]:
        if not body.images:
            return []
        if not self._generator.takes_images(model):
            raise UnsupportedFeature(f"{model} takes text only; leave images out", param="images")
        return await self._vision.describe(body.images, num_others=num_others)


def _with_pictures(messages: list[ChatMessage], refs: Sequence[ImageRef]) -> list[ChatMessage]:
    """Pictures known by size are counted as the last parts of the last question."""
    parts = [ImagePart(image=ref) for ref in refs]
    if messages and messages[-1].role == "user":
        *earlier, last = messages
        return [*earlier, last.model_copy(update={"content": [*last.content, *parts]})]
    return [*messages, ChatMessage(role="user", content=list(parts))] if parts else messages


def _answer(counted: TokenizeResponse, refs: Sequence[ImageRef]) -> dict[str, Any]:
    return {**counted.model_dump(), "image_tokens": [ref.num_tokens for ref in refs]}
