"""Chat messages between the client's form and the engine's: pictures are collected, then replaced by references.

The order of messages and of parts is the client's; text is passed on as it is, placeholder look-alikes included.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from services.gateway.images import EmbeddingSource, ImageSource, Source
from services.gateway.schema import EmbeddingContent, ImageContent, Message, Part, RefusalContent, Refused, TextContent
from shared.errors import InvalidRequest, UnsupportedFeature
from shared.wire import engine as wire
from shared.wire.images import ImageRef

# Roles whose message may have no content: an assistant that only called tools, a tool that returned nothing.
_MAY_BE_EMPTY = frozenset({"assistant", "tool"})
_AFFINITY_CHARS = 2048


def image_sources(messages: Sequence[Message]) -> list[Source]:
    """Every image of the conversation, in order. Raises UnsupportedFeature for parts of other kinds."""
    sources: list[Source] = []
    for where, part in _parts(messages):
        if isinstance(part, ImageContent):
            sources.append(_source(part, f"{where}.image_url"))
        elif isinstance(part, EmbeddingContent):
            sources.append(EmbeddingSource(part.image_embeds, f"{where}.image_embeds"))
        elif isinstance(part, Refused):
            raise UnsupportedFeature(
                f"{where}: parts of type {part.type[:40]!r} are not supported; use 'text' or 'image_url'",
                param=f"{where}.type",
            )
    return sources


def check_contents(messages: Sequence[Message]) -> None:
    """Raises InvalidRequest naming a message that needs content and has none."""
    for index, message in enumerate(messages):
        if not message.content and message.role not in _MAY_BE_EMPTY:
            raise InvalidRequest(
                f"messages[{index}].content: a {message.role} message needs a string or at least one part",
                param=f"messages[{index}].content",
            )


def to_wire(messages: Iterable[Message], refs: Sequence[ImageRef]) -> list[wire.ChatMessage]:
    """The messages with `refs`, in the order of `image_sources`, in place of their images."""
    remaining = iter(refs)
    return [
        wire.ChatMessage(
            role="system" if message.role == "developer" else message.role,
            content=[part for given in message.content for part in _wire_part(given, remaining)],
            reasoning_content=message.reasoning_content,
            name=message.name,
            tool_calls=message.tool_calls,
            tool_call_id=message.tool_call_id,
        )
        for message in messages
    ]


def affinity_parts(messages: Iterable[wire.ChatMessage]) -> Iterator[bytes]:
    """What the turns of one conversation have in common: its beginning, up to the first question."""
    budget = _AFFINITY_CHARS
    for message in messages:
        for part in message.content:
            if isinstance(part, wire.ImagePart):
                yield part.image.image_key.encode()
            else:
                yield part.text[:budget].encode()
                budget -= min(len(part.text), budget)
        if message.role == "user" or not budget:
            return


def _parts(messages: Sequence[Message]) -> Iterator[tuple[str, Part]]:
    for i, message in enumerate(messages):
        for j, part in enumerate(message.content):
            yield f"messages[{i}].content[{j}]", part


def _source(part: ImageContent, param: str) -> ImageSource:
    if part.image_url is None:
        return ImageSource(None, param, uuid=part.uuid)
    return ImageSource(part.image_url.source, param, part.image_url.detail, part.uuid)


def _wire_part(part: Part, refs: Iterator[ImageRef]) -> Iterator[wire.TextPart | wire.ImagePart]:
    match part:
        case ImageContent() | EmbeddingContent():
            yield wire.ImagePart(image=next(refs))
        case TextContent(text=text) | RefusalContent(refusal=text):
            # An empty text part must not change the prompt: with it or without it, the picture alone is asked about.
            if text:
                yield wire.TextPart(text=text)
