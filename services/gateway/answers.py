"""Whole answers: choices put together from events, usage, and the bodies of replies that are not streamed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from services.gateway.streaming import chat_logprobs, completion_logprobs, reasoning_fields
from services.gateway.tool_calls.reader import CallDelta, GrowingCall
from services.gateway.trace import Trace
from shared.wire.engine import Finished, TokenLogprob, Tokens


@dataclass(slots=True)
class Choice:
    """One choice of an answer, growing event by event."""

    pieces: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: list[GrowingCall] = field(default_factory=list)
    logprobs: list[TokenLogprob] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def add(self, event: Tokens, calls: Sequence[CallDelta] = (), reasoning: str = "") -> None:
        self.pieces.append(event.text)
        self.reasoning.append(reasoning)
        for delta in calls:
            if delta.name:
                self.calls.append(GrowingCall(delta.id, delta.name))
            self.calls[delta.number].add(delta)
        if event.logprobs is not None:
            self.logprobs = self.logprobs if self.logprobs is not None else []
            self.logprobs.extend(event.logprobs)
        if event.finish_reason is not None:
            self.finish_reason, self.stop_reason = event.finish_reason, event.stop_reason

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    def to_chat(self, index: int) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": self.text, "refusal": None}
        if reasoning := "".join(self.reasoning):
            message |= {"content": self.text or None, **reasoning_fields(reasoning)}
        if self.calls:
            message |= {"content": self.text or None, "tool_calls": [call.to_body() for call in self.calls]}
        return {"index": index, "message": message, "logprobs": chat_logprobs(self.logprobs), **self._end()}

    def to_completion(self, index: int) -> dict[str, Any]:
        return {"index": index, "text": self.text, "logprobs": completion_logprobs(self.logprobs, 0), **self._end()}

    def _end(self) -> dict[str, Any]:
        stop = {} if self.stop_reason is None else {"stop_reason": self.stop_reason}
        return {"finish_reason": self.finish_reason, **stop}


def usage_of(all_finished: list[Finished], trace: Trace, num_reasoning_tokens: int = 0) -> dict[str, Any]:
    """OpenAI's usage over all generations of a request, with image tokens and its stages' times; noted in the trace."""
    prompt = sum(finished.num_prompt_tokens for finished in all_finished)
    cached = sum(finished.num_cached_tokens for finished in all_finished)
    images = sum(finished.num_image_tokens for finished in all_finished)
    generated = sum(finished.num_generated_tokens for finished in all_finished)
    for finished in all_finished:
        trace.merge(finished.timings)
    trace.num_prompt_tokens, trace.num_cached_tokens, trace.num_generated_tokens = prompt, cached, generated
    trace.num_image_tokens = images
    return {
        "prompt_tokens": prompt,
        "completion_tokens": generated,
        "total_tokens": prompt + generated,
        "prompt_tokens_details": {"cached_tokens": cached, "image_tokens": images},
        "completion_tokens_details": {"reasoning_tokens": num_reasoning_tokens},
        "timings": trace.rounded_stages(),
        "timeline": trace.timeline.to_body(trace.first_token_s),
    }
