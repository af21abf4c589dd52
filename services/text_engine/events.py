"""What the engine says, as events and lines on the wire: ids get their readable names, numbers that JSON lacks are
replaced.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final, TypeGuard

import orjson

from services.text_engine.core.batch import Logprobs
from services.text_engine.core.sequence import PromptLogprob
from services.text_engine.engine_io import EngineOutput, EngineRequest, RequestFailed, RequestFinished, TokenOutput
from services.text_engine.tokenizer import Tokenizer
from shared.http_errors import wire_error
from shared.wire.engine import Failed, Finished, GenerateEvent, PromptToken, TokenLogprob, Tokens

LOWEST_LOGPROB: Final = -9999.0  # JSON has no minus infinity; OpenAI uses this value
PROMPT_TOKENS_AT_ONCE: Final = 64  # in one event: its writer and its reader stop for it, and each may have 21 numbers


def line_of(event: GenerateEvent) -> bytes:
    return event.model_dump_json(exclude_none=True).encode() + b"\n"


def are_plain(outputs: Sequence[EngineOutput]) -> TypeGuard[Sequence[TokenOutput]]:
    """Whether there is new text and nothing else, as nearly always: then `plain_lines` can say it."""
    return all(
        isinstance(output, TokenOutput)
        and output.finish is None
        and not output.logprobs
        and output.prompt_logprobs is None
        for output in outputs
    )


def plain_lines(outputs: Sequence[TokenOutput]) -> bytes:
    """The same as by `event_of` and `line_of`, for less: no model is made and checked for every token."""
    events = (
        {"event": "tokens", "index": output.index, "text": output.text, "token_ids": output.token_ids}
        for output in outputs
    )
    return b"".join(orjson.dumps(event, option=orjson.OPT_APPEND_NEWLINE) for event in events)


def event_of(output: EngineOutput, request: EngineRequest, tokenizer: Tokenizer) -> GenerateEvent:
    if isinstance(output, RequestFailed):
        return Failed(error=wire_error(output.error))
    if isinstance(output, RequestFinished):
        return Finished(
            num_prompt_tokens=output.num_prompt_tokens,
            num_image_tokens=output.num_image_tokens,
            num_cached_tokens=output.num_cached_tokens,
            num_generated_tokens=output.num_generated_tokens,
            timings=output.timings,
        )
    finish, of_prompt = output.finish, output.prompt_logprobs
    return Tokens(
        index=output.index,
        text=output.text,
        token_ids=output.token_ids,
        logprobs=[_token_logprob(t, logprobs, tokenizer) for t, logprobs in output.logprobs] or None,
        finish_reason=None if finish is None else finish.reason,
        stop_reason=None if finish is None else finish.stop_reason,
        prompt_tokens=None if of_prompt is None else _prompt_tokens(request, of_prompt, tokenizer),
    )


def portions(event: GenerateEvent) -> Iterator[GenerateEvent]:
    """The same in events that each are soon written and read: a prompt's log-probabilities before the first text."""
    if not isinstance(event, Tokens) or event.prompt_tokens is None:
        yield event
        return
    for start in range(0, len(event.prompt_tokens), PROMPT_TOKENS_AT_ONCE):
        portion = event.prompt_tokens[start : start + PROMPT_TOKENS_AT_ONCE]
        yield Tokens(index=event.index, text="", token_ids=[], prompt_tokens=portion)
    yield event.model_copy(update={"prompt_tokens": None})


def _prompt_tokens(request: EngineRequest, logprobs: list[PromptLogprob], tokenizer: Tokenizer) -> list[PromptToken]:
    of_images = {position for span in request.images for position in range(span.start, span.end)}
    tokens = []
    for position, (token_id, entry) in enumerate(zip(request.token_ids, [None, *logprobs], strict=True)):
        named = _named(token_id, tokenizer)
        if entry is None or position in of_images:
            tokens.append(PromptToken(**named))
        else:
            logprob = max(entry.logprob, LOWEST_LOGPROB)
            tokens.append(PromptToken(**named, logprob=logprob, rank=entry.rank, top=_top(entry, tokenizer)))
    return tokens


def _token_logprob(token_id: int, logprobs: Logprobs, tokenizer: Tokenizer) -> TokenLogprob:
    logprob = max(logprobs.logprob, LOWEST_LOGPROB)
    return TokenLogprob(**_named(token_id, tokenizer), logprob=logprob, top=_top(logprobs, tokenizer))


def _top(logprobs: Logprobs | PromptLogprob, tokenizer: Tokenizer) -> list[TokenLogprob]:
    return [
        TokenLogprob(**_named(token_id, tokenizer), logprob=max(logprob, LOWEST_LOGPROB))
        for token_id, logprob in zip(logprobs.top_token_ids, logprobs.top_logprobs, strict=True)
    ]


def _named(token_id: int, tokenizer: Tokenizer) -> dict[str, Any]:
    """A token under its readable name: its text, or the special token's spelling, which adds no text."""
    raw = tokenizer.token_bytes(token_id)
    token = raw.decode("utf-8", "replace") or tokenizer.token_string(token_id) or ""
    return {"token_id": token_id, "token": token, "bytes": list(raw)}
