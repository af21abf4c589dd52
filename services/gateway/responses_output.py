"""The output of one response: its items, growing event by event, and the response object that holds them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from services.gateway.answers import Choice
from services.gateway.chat import RunningChat
from services.gateway.responses_schema import ResponsesRequest
from services.gateway.streaming import chat_logprobs
from services.gateway.tool_calls.reader import CallDelta, GrowingCall
from shared.wire.engine import TokenLogprob, Tokens


class MessageItem:
    """A message with one part of text."""

    kind: ClassVar = "output_text"

    def __init__(self, item_id: str) -> None:
        self.id = item_id
        self.text = Choice()

    def to_body(self, status: str) -> dict[str, Any]:
        # A message that has only begun has no part yet.
        content = [] if status == "in_progress" else [self.part(self.text.text, self.text.logprobs)]
        return {"id": self.id, "type": "message", "role": "assistant", "status": status, "content": content}

    def part(self, text: str, logprobs: list[TokenLogprob] | None = None) -> dict[str, Any]:
        return {"type": self.kind, "text": text, "annotations": [], "logprobs": output_logprobs(logprobs)}


class ReasoningItem:
    """What the model thought, in its own words: there is no summary of it."""

    kind: ClassVar = "reasoning_text"

    def __init__(self, item_id: str) -> None:
        self.id = item_id
        self.pieces: list[str] = []

    def to_body(self, status: str) -> dict[str, Any]:
        content = [] if status == "in_progress" else [self.part("".join(self.pieces))]
        return {"id": self.id, "type": "reasoning", "status": status, "summary": [], "content": content}

    def part(self, text: str) -> dict[str, Any]:
        return {"type": self.kind, "text": text}


class CallItem:
    """A call of a tool. Whatever ended the answer, a call whose arguments are all there is complete."""

    def __init__(self, item_id: str, call: GrowingCall) -> None:
        self.id = item_id
        self.call = call

    def to_body(self, status: str) -> dict[str, Any]:
        if status != "in_progress":
            status = "completed" if self.call.is_whole else "incomplete"
        return {
            "id": self.id,
            "type": "function_call",
            "status": status,
            "call_id": self.call.id,
            "name": self.call.name,
            "arguments": self.call.arguments,
        }


TextItem = ReasoningItem | MessageItem
Item = TextItem | CallItem


class Output:
    """Items in the order in which they began. One request has one id in everybody's logs, so items carry it, too."""

    def __init__(self, body: ResponsesRequest, chat: RunningChat) -> None:
        self._body = body
        self._chat = chat
        self._suffix = chat.id.removeprefix("chatcmpl-")
        self._is_cut = False
        self._calls: list[CallItem] = []
        self.items: list[Item] = []

    def add(self, event: Tokens, calls: Sequence[CallDelta], reasoning: str) -> None:
        self.add_reasoning(reasoning)
        self.add_text(event)
        for call in calls:
            self.add_call(call)

    def add_reasoning(self, text: str) -> ReasoningItem | None:
        """The item that has grown, None if none has. It stands before all others."""
        if not text:
            return None
        last = self.items[-1] if self.items else None
        if not isinstance(last, ReasoningItem):
            last = ReasoningItem(f"rs_{self._suffix}_{len(self.items)}")
            self.items.append(last)
        last.pieces.append(text)
        return last

    def add_text(self, event: Tokens) -> MessageItem | None:
        """The message that has grown: the last item if it is one, or else a new one; None if there was no text."""
        self._is_cut = self._is_cut or event.finish_reason == "length"
        # The tokens of calls and reasoning have log-probabilities, too, but are no text of a message.
        is_all_text = self._chat.tools is None and self._chat.reasoning is None
        if not event.text and not (event.logprobs and is_all_text):
            return None
        message = self.message()
        message.text.add(event)
        return message

    def add_call(self, delta: CallDelta) -> CallItem:
        """The item that has begun or grown."""
        if delta.name:
            self._calls.append(CallItem(f"fc_{self._suffix}_{len(self.items)}", GrowingCall(delta.id, delta.name)))
            self.items.append(self._calls[-1])
        item = self._calls[delta.number]
        item.call.add(delta)
        return item

    def message(self) -> MessageItem:
        """The message that text belongs to now."""
        last = self.items[-1] if self.items else None
        if isinstance(last, MessageItem):
            return last
        message = MessageItem(f"msg_{self._suffix}_{len(self.items)}")
        self.items.append(message)
        return message

    @property
    def status(self) -> str:
        """Of what is whole; only the end of an answer is ever cut."""
        return "incomplete" if self._is_cut else "completed"

    def finished(self, usage: dict[str, Any]) -> dict[str, Any]:
        """The whole response. An answer without a word is an empty message."""
        if not self.items:
            self.message()
        return self.response(self.status, usage=_usage(usage))

    def response(
        self, status: str, *, usage: dict[str, Any] | None = None, error: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        body, chat = self._body, self._chat
        end = "incomplete" if status == "failed" else status
        return {
            "id": f"resp_{self._suffix}",
            "object": "response",
            "created_at": chat.created,
            "status": status,
            "background": False,
            "error": error,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata,
            "model": chat.model,
            "output": [item.to_body("completed" if item is not self.items[-1] else end) for item in self.items],
            "parallel_tool_calls": body.parallel_tool_calls,
            "previous_response_id": None,
            "reasoning": {"effort": body.reasoning.effort, "summary": None},
            "store": False,
            "temperature": body.temperature,
            "text": {"format": body.text.format or {"type": "text"}},
            "tool_choice": body.echoed_tool_choice,
            "tools": body.echoed_tools,
            "top_p": body.top_p,
            "truncation": "disabled",
            "usage": usage,
        }


def output_logprobs(logprobs: list[TokenLogprob] | None) -> list[dict[str, Any]]:
    found = chat_logprobs(logprobs)
    content: list[dict[str, Any]] = found["content"] if found else []
    return content


def _usage(usage: dict[str, Any]) -> dict[str, Any]:
    """The chat's usage under this API's names."""
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {**usage["prompt_tokens_details"], "cache_write_tokens": 0},
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": usage["completion_tokens_details"],
        "total_tokens": usage["total_tokens"],
        "timings": usage["timings"],
        "timeline": usage["timeline"],
    }
