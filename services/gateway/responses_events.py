"""The events in which a response is streamed. They are numbered; the last one carries the whole response, so there is
no `[DONE]`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson

from services.gateway.responses_output import CallItem, Item, MessageItem, Output, TextItem, output_logprobs
from services.gateway.tool_calls.reader import CallDelta
from shared.errors import DiptychError
from shared.wire.engine import Tokens


class ResponseEvents:
    """Frames about the items of `output` as they begin, grow and end; an item ends where the next one begins."""

    def __init__(self, output: Output) -> None:
        self._output = output
        self._open: Item | None = None
        self._num_events = 0

    def opening(self) -> bytes:
        response = self._output.response("in_progress")
        kinds = ("response.created", "response.in_progress")
        return b"".join(self._frame(kind, response=response) for kind in kinds)

    def tokens(self, event: Tokens, calls: Sequence[CallDelta], reasoning: str) -> bytes:
        frames = b""
        if (thought := self._output.add_reasoning(reasoning)) is not None:
            frames += self._grown(thought, delta=reasoning)
        if (message := self._output.add_text(event)) is not None:
            frames += self._grown(message, delta=event.text, logprobs=output_logprobs(event.logprobs))
        for call in calls:
            frames += self._call(self._output.add_call(call), call)
        return frames

    def closing(self, usage: dict[str, Any]) -> bytes:
        response = self._output.finished(usage)
        last = self._output.items[-1]
        begin = self._begin(last) if isinstance(last, MessageItem) and last is not self._open else b""
        return begin + self._end(response["status"]) + self._frame(f"response.{response['status']}", response=response)

    def failure(self, error: DiptychError) -> bytes:
        """An error after the first token: what happened, then the response that it ended."""
        about = {"code": error.code, "message": error.message}
        response = self._output.response("failed", error=about)
        return self._frame("error", **about, param=error.param) + self._frame("response.failed", response=response)

    # --- items ------------------------------------------------------------------------------------------------------

    def _grown(self, item: TextItem, **delta: Any) -> bytes:
        begin = b"" if item is self._open else self._begin(item)
        return begin + self._frame(f"response.{item.kind}.delta", **self._part_of(item), **delta)

    def _begin(self, item: TextItem) -> bytes:
        ended, self._open = self._end("completed"), item
        part = self._part_of(item)
        return ended + self._added(item) + self._frame("response.content_part.added", **part, part=item.part(""))

    def _end(self, status: str) -> bytes:
        if self._open is None:
            return b""
        item, self._open = self._open, None
        if isinstance(item, CallItem):
            arguments = item.call.arguments
            told = self._frame("response.function_call_arguments.done", **self._place_of(item), arguments=arguments)
            return told + self._done(item, status)
        part = self._part_of(item)
        [content] = item.to_body(status)["content"]
        whole = {name: content[name] for name in ("text", "logprobs") if name in content}
        return (
            self._frame(f"response.{item.kind}.done", **part, **whole)
            + self._frame("response.content_part.done", **part, part=content)
            + self._done(item, status)
        )

    def _call(self, item: CallItem, delta: CallDelta) -> bytes:
        frames = b""
        if delta.name:
            frames = self._end("completed") + self._added(item)
            self._open = item
        if delta.arguments:
            place = self._place_of(item)
            frames += self._frame("response.function_call_arguments.delta", **place, delta=delta.arguments)
        return frames + (self._end("completed") if delta.is_last else b"")

    def _added(self, item: Item) -> bytes:
        body = item.to_body("in_progress")
        return self._frame("response.output_item.added", output_index=self._index_of(item), item=body)

    def _done(self, item: Item, status: str) -> bytes:
        body = item.to_body(status)
        return self._frame("response.output_item.done", output_index=self._index_of(item), item=body)

    def _part_of(self, item: TextItem) -> dict[str, Any]:
        return {**self._place_of(item), "content_index": 0}

    def _place_of(self, item: Item) -> dict[str, Any]:
        return {"item_id": item.id, "output_index": self._index_of(item)}

    def _index_of(self, item: Item) -> int:
        return self._output.items.index(item)

    def _frame(self, kind: str, **fields: Any) -> bytes:
        data = orjson.dumps({"type": kind, "sequence_number": self._num_events, **fields})
        self._num_events += 1
        return b"event: %s\ndata: %s\n\n" % (kind.encode(), data)
