"""The events in which a response is streamed. They are numbered; the last one carries the whole response, so there is
no `[DONE]`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson

from services.gateway.responses_output import CallItem, MessageItem, Output, output_logprobs, text_part
from services.gateway.tool_calls import NumberedCall
from shared.errors import DiptychError
from shared.wire import Tokens


class ResponseEvents:
    """Frames about the items of `output` as they begin, grow and end; an item ends where the next one begins."""

    def __init__(self, output: Output) -> None:
        self._output = output
        self._open: MessageItem | None = None
        self._num_events = 0

    def opening(self) -> bytes:
        response = self._output.response("in_progress")
        kinds = ("response.created", "response.in_progress")
        return b"".join(self._frame(kind, response=response) for kind in kinds)

    def tokens(self, event: Tokens, calls: Sequence[NumberedCall]) -> bytes:
        message = self._output.add_text(event)
        frames = b"" if message is None else self._text(message, event)
        for call in calls:
            frames += self._end_message() + self._call(self._output.add_call(call))
        return frames

    def closing(self, usage: dict[str, Any]) -> bytes:
        response = self._output.finished(usage)
        last = self._output.items[-1]
        begin = self._begin_message(last) if isinstance(last, MessageItem) and last is not self._open else b""
        return begin + self._end_message() + self._frame(f"response.{response['status']}", response=response)

    def failure(self, error: DiptychError) -> bytes:
        """An error after the first token: what happened, then the response that it ended."""
        about = {"code": error.code, "message": error.message}
        response = self._output.response("failed", error=about)
        return self._frame("error", **about, param=error.param) + self._frame("response.failed", response=response)

    # --- items ------------------------------------------------------------------------------------------------------

    def _text(self, message: MessageItem, event: Tokens) -> bytes:
        begin = b"" if message is self._open else self._begin_message(message)
        delta = {"delta": event.text, "logprobs": output_logprobs(event.logprobs)}
        return begin + self._frame("response.output_text.delta", **self._part_of(message), **delta)

    def _begin_message(self, message: MessageItem) -> bytes:
        self._open = message
        part = self._part_of(message)
        return self._added(message) + self._frame("response.content_part.added", **part, part=text_part("", None))

    def _end_message(self) -> bytes:
        if self._open is None:
            return b""
        message, self._open = self._open, None
        part = self._part_of(message)
        [content] = message.to_body(self._output.status)["content"]
        whole = {"text": content["text"], "logprobs": content["logprobs"]}
        return (
            self._frame("response.output_text.done", **part, **whole)
            + self._frame("response.content_part.done", **part, part=content)
            + self._done(message)
        )

    def _call(self, item: CallItem) -> bytes:
        place = {"item_id": item.id, "output_index": self._index}
        arguments = item.call.call.arguments
        return (
            self._added(item)
            + self._frame("response.function_call_arguments.delta", **place, delta=arguments)
            + self._frame("response.function_call_arguments.done", **place, arguments=arguments)
            + self._done(item)
        )

    def _added(self, item: MessageItem | CallItem) -> bytes:
        return self._frame("response.output_item.added", output_index=self._index, item=item.to_body("in_progress"))

    def _done(self, item: MessageItem | CallItem) -> bytes:
        return self._frame(
            "response.output_item.done", output_index=self._index, item=item.to_body(self._output.status)
        )

    def _part_of(self, message: MessageItem) -> dict[str, Any]:
        return {"item_id": message.id, "output_index": self._index, "content_index": 0}

    @property
    def _index(self) -> int:
        """Of the item that frames are about: always the last one."""
        return len(self._output.items) - 1

    def _frame(self, kind: str, **fields: Any) -> bytes:
        data = orjson.dumps({"type": kind, "sequence_number": self._num_events, **fields})
        self._num_events += 1
        return b"event: %s\ndata: %s\n\n" % (kind.encode(), data)
