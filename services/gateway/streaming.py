"""Server-sent events: the exact chunks of OpenAI's streams, and the response that sends them.

What is the same in all chunks of a stream is built once as bytes; a token costs one small `dumps` and a join.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Final

import orjson
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from services.gateway.lifecycle import Lifecycle
from services.gateway.trace import Trace
from shared.errors import DiptychError, RequestAborted
from shared.log import get_logger
from shared.wire import TokenLogprob, Tokens

log = get_logger(__name__)
DONE: Final = b"data: [DONE]\n\n"
_HEADERS: Final = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would otherwise hold tokens back
]


class ChatChunks:
    """Frames of one `chat.completion.chunk` stream. `include_usage`: inner chunks carry `"usage": null`."""

    def __init__(self, *, id: str, created: int, model: str, include_usage: bool) -> None:
        self._head = _head(id=id, object="chat.completion.chunk", created=created, model=model)
        self._tail = b',"usage":null}\n\n' if include_usage else b"}\n\n"
        self._openings: dict[int, bytes] = {}
        self._text_end = b'},"logprobs":null,"finish_reason":null}]' + self._tail

    def tokens(self, event: Tokens) -> bytes:
        """The frames of one event; empty if it holds nothing that a client could see yet."""
        opening = self._openings.get(event.index)
        first = b""
        if opening is None:
            choice = b'%s"choices":[{"index":%d,"delta":{' % (self._head, event.index)
            first = choice + b'"role":"assistant","content":"","refusal":null' + self._text_end
            opening = self._openings[event.index] = choice + b'"content":'
        if event.finish_reason is None and event.logprobs is None:
            return first + opening + orjson.dumps(event.text) + self._text_end if event.text else first
        return first + self._rich(event, opening)

    def usage(self, usage: dict[str, Any]) -> bytes:
        return self._head + b'"choices":[],"usage":' + orjson.dumps(usage) + b"}\n\n"

    def _rich(self, event: Tokens, opening: bytes) -> bytes:
        """The rare shapes: with log-probabilities, and the end of a choice, which has a chunk of its own."""
        frames = b""
        if event.text or event.logprobs:
            logprobs = orjson.dumps(chat_logprobs(event.logprobs))
            frames = (
                opening
                + orjson.dumps(event.text)
                + b'},"logprobs":'
                + logprobs
                + b',"finish_reason":null}]'
                + self._tail
            )
        if event.finish_reason is not None:
            end: dict[str, Any] = {
                "index": event.index,
                "delta": {},
                "logprobs": None,
                "finish_reason": event.finish_reason,
            }
            if event.stop_reason is not None:
                end["stop_reason"] = event.stop_reason
            frames += self._head + b'"choices":[' + orjson.dumps(end) + b"]" + self._tail
        return frames


class CompletionChunks:
    """Frames of one `text_completion` stream."""

    def __init__(self, *, id: str, created: int, model: str, include_usage: bool) -> None:
        self._head = _head(id=id, object="text_completion", created=created, model=model)
        self._tail = b',"usage":null}\n\n' if include_usage else b"}\n\n"
        self._offsets: dict[int, int] = {}

    def tokens(self, event: Tokens, index: int) -> bytes:
        """index   of the choice among those of all prompts"""
        if not event.text and event.finish_reason is None and not event.logprobs:
            return b""
        start = b'%s"choices":[{"index":%d,"text":' % (self._head, index) + orjson.dumps(event.text)
        if event.finish_reason is None and event.logprobs is None:
            return start + b',"logprobs":null,"finish_reason":null}]' + self._tail
        offset = self._offsets.get(index, 0)
        self._offsets[index] = offset + len(event.text)
        rest: dict[str, Any] = {
            "logprobs": completion_logprobs(event.logprobs, offset),
            "finish_reason": event.finish_reason,
        }
        if event.stop_reason is not None:
            rest["stop_reason"] = event.stop_reason
        return start + b"," + orjson.dumps(rest)[1:] + b"]" + self._tail

    def usage(self, usage: dict[str, Any]) -> bytes:
        return self._head + b'"choices":[],"usage":' + orjson.dumps(usage) + b"}\n\n"


def _head(**fields: str | int) -> bytes:
    return b"data: " + orjson.dumps(fields)[:-1] + b","


def error_frame(error: DiptychError) -> bytes:
    return b"data: " + orjson.dumps(error.to_body()) + b"\n\n"


def chat_logprobs(logprobs: list[TokenLogprob] | None) -> dict[str, Any] | None:
    if logprobs is None:
        return None
    content = [{**_logprob(entry), "top_logprobs": [_logprob(other) for other in entry.top]} for entry in logprobs]
    return {"content": content, "refusal": None}


def _logprob(entry: TokenLogprob) -> dict[str, Any]:
    return {"token": entry.token, "logprob": entry.logprob, "bytes": entry.bytes}


def completion_logprobs(logprobs: list[TokenLogprob] | None, offset: int) -> dict[str, Any] | None:
    """The older shape: parallel lists. offset: characters of this choice before these tokens."""
    if logprobs is None:
        return None
    offsets = []
    for entry in logprobs:
        offsets.append(offset)
        offset += len(entry.token)
    return {
        "tokens": [entry.token for entry in logprobs],
        "token_logprobs": [entry.logprob for entry in logprobs],
        "top_logprobs": [{other.token: other.logprob for other in entry.top} for entry in logprobs],
        "text_offset": offsets,
    }


@dataclass(frozen=True, slots=True)
class AnswerStream:
    """An answer whose first token is there: what could be refused has been refused with a status of its own.

    close   lets go of everything behind `frames`; to be called exactly once, whatever happens
    """

    frames: AsyncGenerator[bytes]
    close: Callable[[], Awaitable[None]]


class SseResponse(Response):
    """Sends frames as they come; an error becomes the last frame; a client that leaves ends the work behind them."""

    def __init__(self, answer: AnswerStream, lifecycle: Lifecycle, trace: Trace) -> None:
        self.status_code = 200
        self.background = None
        self.body = b""
        self.raw_headers = list(_HEADERS)
        self._answer = answer
        self._lifecycle = lifecycle
        self._trace = trace

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            try:
                await self._lifecycle.attend(receive, self._send_frames(send))
            except RequestAborted as error:
                self._trace.outcome = error.code
                return
            except DiptychError as error:
                self._trace.outcome = error.code
                await send({"type": "http.response.body", "body": error_frame(error), "more_body": True})
            except Exception as error:  # the status is spent, so no handler can answer any more
                log.error("unexpected error in a stream", request_id=self._trace.request_id, exc_info=error)
                self._trace.outcome = DiptychError.code
                internal = DiptychError("internal error; the server's log has the details")
                await send({"type": "http.response.body", "body": error_frame(internal), "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            await self._answer.frames.aclose()
            await self._answer.close()

    async def _send_frames(self, send: Send) -> None:
        async for frame in self._answer.frames:
            if frame:
                await send({"type": "http.response.body", "body": frame, "more_body": True})
