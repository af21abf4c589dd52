"""The exact shape of streamed chunks, and what they cost."""

from __future__ import annotations

import json
import time
from typing import Any

from services.gateway.answers import Choice, usage_of
from services.gateway.backends import LineSplitter
from services.gateway.schema import StreamOptions
from services.gateway.streaming import ChatChunks, ChunkTail, CompletionChunks, error_frame
from services.gateway.tool_calls.reader import CallDelta
from services.gateway.trace import Trace
from shared.errors import UpstreamFailed
from shared.wire.engine import Finished, TokenLogprob, Tokens


def tail(**options: bool) -> ChunkTail:
    return ChunkTail(StreamOptions(**options), num_prompt_tokens=10)


def chat_chunks(**options: bool) -> ChatChunks:
    return ChatChunks(id="chatcmpl-1", created=7, model="demo", tail=tail(**options))


def tokens(text: str, **fields: Any) -> Tokens:
    return Tokens(text=text, token_ids=[1], **fields)


def parsed(frames: bytes) -> list[dict[str, Any]]:
    assert frames.endswith(b"\n\n")
    events = frames.decode().split("\n\n")[:-1]
    assert all(event.startswith("data: ") and "\n" not in event for event in events)
    return [json.loads(event[len("data: ") :]) for event in events]


def test_the_first_chunk_of_a_choice_carries_the_role_and_no_other_does():
    """Case B10."""
    chunks = chat_chunks()
    first, text = parsed(chunks.tokens(tokens("Hel")))
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": "", "refusal": None}
    assert text["choices"][0]["delta"] == {"content": "Hel"}
    [later] = parsed(chunks.tokens(tokens("lo")))
    assert later["choices"][0]["delta"] == {"content": "lo"}


def test_every_chunk_has_the_envelope_and_a_null_finish_reason_until_the_last():
    """Case B10."""
    chunks = chat_chunks()
    events = parsed(
        b"".join(chunks.tokens(event) for event in (tokens("a"), tokens("b"), tokens("c", finish_reason="length")))
    )
    for event in events:
        assert event["id"] == "chatcmpl-1"
        assert event["object"] == "chat.completion.chunk"
        assert event["created"] == 7
        assert event["model"] == "demo"
        assert "usage" not in event
        assert "finish_reason" in event["choices"][0]
    assert [event["choices"][0]["finish_reason"] for event in events] == [None, None, None, None, "length"]
    assert events[-1]["choices"][0]["delta"] == {}


def test_usage_is_null_in_inner_chunks_and_alone_in_the_last_if_it_was_asked_for():
    """Case B8."""
    chunks = chat_chunks(include_usage=True)
    inner = parsed(chunks.tokens(tokens("a", finish_reason="stop")))
    assert all(event["usage"] is None for event in inner)
    [last] = parsed(chunks.usage({"prompt_tokens": 3}))
    assert last["choices"] == []
    assert last["usage"] == {"prompt_tokens": 3}


def test_usage_so_far_is_in_every_chunk_if_it_was_asked_for():
    chunks = chat_chunks(include_usage=True, continuous_usage_stats=True)
    first, text = parsed(chunks.tokens(tokens("a")))
    chunks.tokens(tokens(""))
    [end] = parsed(chunks.tokens(Tokens(text="", token_ids=[1, 2], finish_reason="stop")))
    assert first["usage"] == text["usage"] == {"prompt_tokens": 10, "completion_tokens": 1, "total_tokens": 11}
    assert end["usage"] == {"prompt_tokens": 10, "completion_tokens": 4, "total_tokens": 14}
    completions = CompletionChunks(
        id="cmpl-1", created=7, model="demo", tail=tail(include_usage=True, continuous_usage_stats=True)
    )
    assert [parsed(completions.tokens(tokens(text), 0))[0]["usage"]["completion_tokens"] for text in "ab"] == [1, 2]


def test_each_delta_of_a_call_has_a_chunk_of_its_own_before_the_end():
    calls = [
        CallDelta(0, id="id0", name="look"),
        CallDelta(0, arguments='{"at":'),
        CallDelta(0, arguments='"it"}'),
        CallDelta(0, is_last=True, is_whole=True),
        CallDelta(1, id="id1", name="now"),
    ]
    [_, text, *called, end] = parsed(chat_chunks().tokens(tokens("I look.", finish_reason="tool_calls"), calls))
    assert text["choices"][0]["delta"] == {"content": "I look."}
    assert {event["choices"][0]["finish_reason"] for event in called} == {None}
    assert [event["choices"][0]["delta"]["tool_calls"] for event in called] == [
        [{"index": 0, "id": "id0", "type": "function", "function": {"name": "look", "arguments": ""}}],
        [{"index": 0, "function": {"arguments": '{"at":'}}],
        [{"index": 0, "function": {"arguments": '"it"}'}}],
        [{"index": 1, "id": "id1", "type": "function", "function": {"name": "now", "arguments": ""}}],
    ]
    assert end["choices"][0]["finish_reason"] == "tool_calls"


def test_an_event_without_text_makes_no_chunk():
    chunks = chat_chunks()
    chunks.tokens(tokens("a"))
    assert chunks.tokens(tokens("")) == b""


def test_any_text_survives_the_json_and_the_event_framing():
    text = 'a "quoted"\\ line\n\ndata: [DONE]\r\n\u2028 \U0001f468\u200d\U0001f469 \x00'
    [_, event] = parsed(chat_chunks().tokens(tokens(text)))
    assert event["choices"][0]["delta"]["content"] == text


def test_choices_are_told_apart_by_index():
    """Case B19."""
    chunks = chat_chunks()
    events = parsed(b"".join(chunks.tokens(tokens("x", index=index)) for index in (1, 0, 1)))
    assert [(event["choices"][0]["index"], "role" in event["choices"][0]["delta"]) for event in events] == [
        (1, True),
        (1, False),
        (0, True),
        (0, False),
        (1, False),
    ]


def test_log_probabilities_come_with_their_text():
    """Case B17."""
    entry = TokenLogprob(token_id=1, token="a", logprob=-0.5, bytes=[97], top=[])
    [_, event] = parsed(chat_chunks().tokens(tokens("a", logprobs=[entry])))
    [content] = event["choices"][0]["logprobs"]["content"]
    assert content == {"token": "a", "logprob": -0.5, "bytes": [97], "top_logprobs": []}


def test_the_last_chunk_names_the_stop_string():
    *_, last = parsed(chat_chunks().tokens(tokens("a", finish_reason="stop", stop_reason="END")))
    assert last["choices"][0]["finish_reason"] == "stop"
    assert last["choices"][0]["stop_reason"] == "END"


def test_completion_chunks_carry_text_and_running_offsets():
    chunks = CompletionChunks(id="cmpl-1", created=7, model="demo", tail=tail())
    entry = TokenLogprob(token_id=1, token="ab", logprob=-0.5, bytes=[97, 98], top=[])
    events = parsed(
        chunks.tokens(tokens("ab", logprobs=[entry]), 3)
        + chunks.tokens(tokens("ab", logprobs=[entry], finish_reason="stop"), 3)
    )
    assert [event["choices"][0]["text"] for event in events] == ["ab", "ab"]
    assert [event["choices"][0]["index"] for event in events] == [3, 3]
    assert [event["choices"][0]["logprobs"]["text_offset"] for event in events] == [[0], [2]]
    assert [event["choices"][0]["finish_reason"] for event in events] == [None, "stop"]
    assert events[0]["object"] == "text_completion"


def test_streamed_and_whole_answers_hold_the_same_text():
    script = [tokens("Hel"), tokens(""), tokens("lo"), tokens(" world", finish_reason="stop")]
    chunks, whole = chat_chunks(), Choice()
    streamed = ""
    for event in script:
        whole.add(event)
        frames = chunks.tokens(event)
        streamed += "".join(e["choices"][0]["delta"].get("content", "") for e in parsed(frames)) if frames else ""
    assert streamed == whole.text == "Hello world"
    assert whole.finish_reason == "stop"


def test_usage_sums_over_prompts_and_keeps_the_longest_stage():
    def finished(prefill: float) -> Finished:
        return Finished(
            num_prompt_tokens=10,
            num_image_tokens=4,
            num_cached_tokens=2,
            num_generated_tokens=3,
            timings={"prefill": prefill},
        )

    usage = usage_of([finished(0.1), finished(0.3)], Trace("r"))
    assert usage["prompt_tokens"] == 20
    assert usage["completion_tokens"] == 6
    assert usage["total_tokens"] == 26
    assert usage["prompt_tokens_details"] == {"cached_tokens": 4, "image_tokens": 8}
    assert usage["timings"] == {"prefill": 0.3}


def test_an_error_frame_is_an_openai_error():
    """Case B25."""
    [event] = parsed(error_frame(UpstreamFailed("the engine broke")))
    assert event["error"]["message"] == "the engine broke"
    assert event["error"]["code"] == "upstream_failed"


def test_lines_are_put_together_across_chunks():
    lines = LineSplitter()
    assert lines.feed(b'{"a"') == []
    assert lines.feed(b":1}\n\n{") == [b'{"a":1}']
    assert lines.feed(b'"b":2}\n{"c":3}\n') == [b'{"b":2}', b'{"c":3}']


def test_a_plain_token_costs_microseconds():
    """Far below the 100 us that a streamed chunk may cost in all; loose enough for a busy machine."""
    chunks, event = chat_chunks(include_usage=True), tokens(" hello")
    chunks.tokens(event)
    best = min(_seconds(chunks, event) for _ in range(5))
    assert best / 1000 < 30e-6


def _seconds(chunks: ChatChunks, event: Tokens) -> float:
    start = time.perf_counter()
    for _ in range(1000):
        chunks.tokens(event)
    return time.perf_counter() - start
