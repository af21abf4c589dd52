"""Server-sent events: the exact chunks of OpenAI's streams, and the response that sends them.

What is the same in all chunks of a stream is built once as bytes; a token costs one small `dumps` and a join.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import orjson
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from services.gateway.lifecycle import Lifecycle
from services.gateway.schema import StreamOptions
from services.gateway.tool_calls.reader import CallDelta
from services.gateway.trace import Trace
from shared.errors import DiptychError, RequestAborted
from shared.log import get_logger
from shared.wire.engine import PromptToken, TokenLogprob, Tokens

log = get_logger(__name__)
DONE: Final = b"data: [DONE]\n\n"
_TEXT_END: Final = b'},"logprobs":null,"finish_reason":null}]'
_HEADERS: Final = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would otherwise hold tokens back
]


class ChunkTail:
    """How a chunk ends: usage is told in none, only after all, or, as it grows, in each."""

    def __init__(self, options: StreamOptions, num_prompt_tokens: int) -> None:
        self._end = b',"usage":null}\n\n' if options.include_usage else b"}\n\n"
        self._is_growing = options.include_usage and options.continuous_usage_stats
        self._num_prompt_tokens = num_prompt_tokens
        self._num_generated_tokens = 0

    def after(self, event: Tokens) -> bytes:
        if not self._is_growing:
            return self._end
        prompt, generated = self._num_prompt_tokens, self._num_generated_tokens + len(event.token_ids)
        self._num_generated_tokens = generated
        usage = {"prompt_tokens": prompt, "completion_tokens": generated, "total_tokens": prompt + generated}
        return b',"usage":' + orjson.dumps(usage) + b"}\n\n"


class ChatChunks:
    """Frames of one `chat.completion.chunk` stream."""

    def __init__(self, *, id: str, created: int, model: str, tail: ChunkTail) -> None:
        self._head = _head(id=id, object="chat.completion.chunk", created=created, model=model)
        self._tail = tail
        self._openings: dict[int, bytes] = {}

    def tokens(self, event: Tokens, calls: Sequence[CallDelta] = (), reasoning: str = "") -> bytes:
        """The frames of one event; empty if it holds nothing that a client could see yet."""
        tail = self._tail.after(event)
        opening = self._openings.get(event.index)
        first = b""
        if opening is None:
            choice = b'%s"choices":[{"index":%d,"delta":{' % (self._head, event.index)
            first = choice + b'"role":"assistant","content":"","refusal":null' + _TEXT_END + tail
            opening = self._openings[event.index] = choice + b'"content":'
        if event.finish_reason is None and event.logprobs is None and not calls and not reasoning:
            return first + opening + orjson.dumps(event.text) + _TEXT_END + tail if event.text else first
        return first + self._rich(event, calls, reasoning, opening, tail)

    def usage(self, usage: dict[str, Any]) -> bytes:
        return self._head + b'"choices":[],"usage":' + orjson.dumps(usage) + b"}\n\n"

    def _rich(self, event: Tokens, calls: Sequence[CallDelta], reasoning: str, opening: bytes, tail: bytes) -> bytes:
        """The rarer shapes: reasoning, log-probabilities, calls of tools, the end of a choice; each is a chunk."""
        choice: dict[str, Any] = {"index": event.index, "delta": {}, "logprobs": None, "finish_reason": None}
        frames = b""
        logprobs = chat_logprobs(event.logprobs)
        if reasoning:
            told = {} if event.text else {"logprobs": logprobs}
            frames = self._frame(choice | {"delta": reasoning_fields(reasoning), **told}, tail)
        if event.text or (event.logprobs and not reasoning):
            end = b'},"logprobs":' + orjson.dumps(logprobs) + b',"finish_reason":null}]' + tail
            frames += opening + orjson.dumps(event.text) + end
        for call in calls:
            # One a chunk, as OpenAI sends them: there are clients that look at the first only.
            if (entry := call.to_chunk()) is not None:
                frames += self._frame(choice | {"delta": {"tool_calls": [entry]}}, tail)
        if event.finish_reason is not None:
            stop = {} if event.stop_reason is None else {"stop_reason": event.stop_reason}
            frames += self._frame(choice | {"finish_reason": event.finish_reason, **stop}, tail)
        return frames

    def _frame(self, choice: dict[str, Any], tail: bytes) -> bytes:
        return self._head + b'"choices":[' + orjson.dumps(choice) + b"]" + tail


class CompletionChunks:
    """Frames of one `text_completion` stream."""

    def __init__(self, *, id: str, created: int, model: str, tail: ChunkTail) -> None:
        self._head = _head(id=id, object="text_completion", created=created, model=model)
        self._tail = tail
        self._offsets: dict[int, int] = {}

    def tokens(self, event: Tokens, index: int) -> bytes:
        """index   of the choice among those of all prompts"""
        tail = self._tail.after(event)
        if not event.text and event.finish_reason is None and not event.logprobs:
            return b""
        start = b'%s"choices":[{"index":%d,"text":' % (self._head, index) + orjson.dumps(event.text)
        if event.finish_reason is None and event.logprobs is None:
            return start + b',"logprobs":null,"finish_reason":null}]' + tail
        offset = self._offsets.get(index, 0)
        self._offsets[index] = offset + len(event.text)
        rest: dict[str, Any] = {
            "logprobs": completion_logprobs(event.logprobs, offset),
            "finish_reason": event.finish_reason,
        }
        if event.stop_reason is not None:
            rest["stop_reason"] = event.stop_reason
        return start + b"," + orjson.dumps(rest)[1:] + b"]" + tail

    def usage(self, usage: dict[str, Any]) -> bytes:
        return self._head + b'"choices":[],"usage":' + orjson.dumps(usage) + b"}\n\n"


def _head(**fields: str | int) -> bytes:
    return b"data: " + orjson.dumps(fields)[:-1] + b","


def error_frame(error: DiptychError) -> bytes:
    return b"data: " + orjson.dumps(error.to_body()) + b"\n\n"


def reasoning_fields(text: str) -> dict[str, str]:
    """Under DeepSeek's name, which most clients read, and under the shorter one of newer servers."""
    return {"reasoning_content": text, "reasoning": text}


def chat_logprobs(logprobs: list[TokenLogprob] | None) -> dict[str, Any] | None:
    if logprobs is None:
        return None
    content = [{**_logprob(entry), "top_logprobs": [_logprob(other) for other in entry.top]} for entry in logprobs]
    return {"content": content, "refusal": None}


def _logprob(entry: TokenLogprob) -> dict[str, Any]:
    return {"token": entry.token, "logprob": entry.logprob, "bytes": entry.bytes}


def completion_logprobs(logprobs: Sequence[TokenLogprob | PromptToken] | None, offset: int) -> dict[str, Any] | None:
    """The older shape: parallel lists. offset: characters of this choice before these tokens."""
    if logprobs is None:
        return None
    offsets = []
    for entry in logprobs:
        offsets.append(offset)
        offset += len(entry.token) if isinstance(entry, TokenLogprob) or entry.bytes else 0
    return {
        "tokens": [entry.token for entry in logprobs],
        "token_logprobs": [entry.logprob for entry in logprobs],
        "top_logprobs": [
            None if entry.logprob is None else {other.token: other.logprob for other in entry.top} for entry in logprobs
        ],
        "text_offset": offsets,
    }


@dataclass(frozen=True, slots=True)
class AnswerStream:
    """An answer whose first token is there: what could be refused has been refused with a status of its own.

    close         lets go of everything behind `frames`; to be called exactly once, whatever happens
    error_frame   the end of a stream that fails midway
    """

    frames: AsyncGenerator[bytes]
    close: Callable[[], Awaitable[None]]
    error_frame: Callable[[DiptychError], bytes] = error_frame


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
                await self._send_first(send)
                await self._lifecycle.attend(receive, self._send_frames(send))
            except RequestAborted as error:
                self._trace.outcome = error.code
                return
            except DiptychError as error:
                await self._send_error(send, error)
            except Exception as error:  # the status is spent, so no handler can answer any more
                log.error("unexpected error in a stream", request_id=self._trace.request_id, exc_info=error)
                await self._send_error(send, DiptychError("internal error; the server's log has the details"))
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            try:
                await self._answer.frames.aclose()
            finally:
                await self._answer.close()

    async def _send_error(self, send: Send, error: DiptychError) -> None:
        self._trace.failed(error)
        await send({"type": "http.response.body", "body": self._answer.error_frame(error), "more_body": True})

    async def _send_first(self, send: Send) -> None:
        """It is there already: clients get it before a watch over them is set up."""
        if frame := await anext(self._answer.frames, b""):
            await send({"type": "http.response.body", "body": frame, "more_body": True})

    async def _send_frames(self, send: Send) -> None:
        async for frame in self._answer.frames:
            if frame:
                await send({"type": "http.response.body", "body": frame, "more_body": True})
