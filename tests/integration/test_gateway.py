"""The OpenAI protocol at the gateway, over real sockets and through the official client, with a scripted engine."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from services.gateway.answer_schema import Timeline
from shared.errors import ContextTooLong, RateLimited, UpstreamFailed
from tests.gateway_stack import HELLO, Stack, assert_openai_error, data_url, eventually, question, running_stack
from tests.scripted import IMAGE_TOKENS, WORDS, EngineScript, png

ANSWER = " ".join(WORDS)


@pytest.fixture(scope="module")
def shared_stack() -> Iterator[Stack]:
    with running_stack(max_body_bytes=200_000) as running:
        yield running


@pytest.fixture
def stack(shared_stack: Stack) -> Stack:
    shared_stack.reset()
    return shared_stack


@pytest.fixture
def client(stack: Stack) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{stack.url}/v1", api_key="any", max_retries=0) as made:
        yield made


def events(response: httpx.Response) -> list[dict[str, Any]]:
    """The data of a finished stream, which must end with [DONE]."""
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    data = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert data.pop() == "[DONE]"
    return [json.loads(line) for line in data]


# --- whole answers and streams --------------------------------------------------------------------------------------


def test_the_official_client_gets_an_answer(client: openai.OpenAI):
    answer = client.chat.completions.create(model="scripted", messages=HELLO)
    assert answer.choices[0].message.content == ANSWER
    assert answer.choices[0].finish_reason == "stop"
    assert answer.model == "scripted"
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_the_official_client_streams_the_same_text(client: openai.OpenAI):
    stream = client.chat.completions.create(model="scripted", messages=HELLO, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == ANSWER


async def test_the_official_async_client_streams_the_same_text(stack: Stack):
    async with openai.AsyncOpenAI(base_url=f"{stack.url}/v1", api_key="any", max_retries=0) as client:
        stream = await client.chat.completions.create(model="scripted", messages=HELLO, stream=True)
        pieces = [chunk.choices[0].delta.content or "" async for chunk in stream]
    assert "".join(pieces) == ANSWER


def test_a_picture_is_asked_about_through_the_official_client(client: openai.OpenAI, stack: Stack):
    answer = client.chat.completions.create(model="scripted", messages=question(data_url(png(1))))  # type: ignore[arg-type]
    assert answer.choices[0].message.content == ANSWER
    assert answer.usage is not None
    assert answer.usage.prompt_tokens > IMAGE_TOKENS
    [request] = stack.engine.requests
    assert request.messages is not None
    assert [part.type for part in request.messages[0].content] == ["text", "image"]


def test_usage_tells_image_and_cached_tokens_and_the_time_of_every_stage(stack: Stack):
    stack.encoder.script.encode_delay_s = 0.0
    answer = stack.ask(data_url(png(2)))
    usage = answer.json()["usage"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 576, "image_tokens": IMAGE_TOKENS}
    for stage in ("fetch", "queue", "transfer", "prefill", "decode_tokens"):
        assert stage in usage["timings"]
        assert f"{stage};dur=" in answer.headers["server-timing"]


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_outruns_the_encoder_waits_for_its_last_word(stack: Stack, stream: bool):
    stack.encoder.script.encode_delay_s = 0.03
    options = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    answer = stack.ask(data_url(png(77 + stream)), **options)
    body = json.loads(answer.text.split("\n\n")[-3].removeprefix("data: ")) if stream else answer.json()
    assert {"decode", "preprocess", "encode"} <= body["usage"]["timings"].keys()


def test_no_answer_tells_a_key_what_another_has_sent():
    with running_stack(api_keys=("ann:sk-a", "bob:sk-b"), salt_cache_by_key=True) as stack:
        stories = []
        for key in ("sk-a", "sk-b"):
            body = {"messages": question(data_url(png(3)))}
            answer = stack.http.post("/v1/chat/completions", json=body, headers={"Authorization": f"Bearer {key}"})
            stories.append(Timeline.model_validate(answer.json()["usage"]["timeline"]))
        assert stack.num_encodes() == 1, "the embedding is shared all the same"
        assert stories[0].images == stories[1].images
        assert [(image.admitted_by, image.embedding_from) for image in stories[1].images] == [(None, None)]
        assert all(span.source is None for story in stories for span in story.spans)


def test_a_timeline_tells_who_knew_a_picture_and_where_each_stage_was(stack: Stack):
    first = Timeline.model_validate(stack.ask(data_url(png(3))).json()["usage"]["timeline"])
    again = Timeline.model_validate(stack.ask(data_url(png(3)), data_url(png(4))).json()["usage"]["timeline"])
    assert [image.admitted_by for image in first.images] == ["vision_encoder"]
    assert [image.admitted_by for image in again.images] == ["gateway", "vision_encoder"]
    assert [span.image for span in again.spans if span.stage == "fetch"] == [0, 1]
    [admit] = [span for span in again.spans if span.stage == "admit"]
    assert (admit.image, admit.where) == (1, "vision_encoder-1")
    for story in (first, again):
        assert all(0 <= span.start_ms <= span.start_ms + span.duration_ms <= story.total_ms for span in story.spans)
        assert story.spans == sorted(story.spans, key=lambda span: span.start_ms)
        assert 0 < (story.first_token_ms or 0) <= story.total_ms
    text = stack.chat().json()["usage"]["timeline"]
    assert (text["images"], [span["stage"] for span in text["spans"]]) == ([], ["receive"])


def test_the_request_id_comes_back(stack: Stack):
    answer = stack.http.get("/health", headers={"X-Request-Id": "abc-123"})
    assert answer.headers["x-request-id"] == "abc-123"
    made = stack.http.get("/health", headers={"X-Request-Id": "white space"}).headers["x-request-id"]
    assert made
    assert " " not in made


def test_a_stream_has_usage_only_if_asked(stack: Stack):
    """Case B8."""
    plain = events(stack.chat(stream=True))
    assert all(event["choices"] for event in plain)
    assert all(event.get("usage") is None for event in plain)
    *inner, last = events(stack.chat(stream=True, stream_options={"include_usage": True}))
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == len(WORDS)
    assert all(event["choices"] and event["usage"] is None for event in inner)


def test_a_stream_names_the_role_once_and_the_reason_once(stack: Stack):
    """Case B10."""
    chunks = events(stack.chat(stream=True, max_tokens=10))
    choices = [chunk["choices"][0] for chunk in chunks]
    assert [choice["delta"].get("role") for choice in choices] == ["assistant"] + [None] * (len(choices) - 1)
    assert all("finish_reason" in choice for choice in choices)
    reasons = [choice["finish_reason"] for choice in choices]
    assert reasons[:-1] == [None] * (len(reasons) - 1)
    assert reasons[-1] in ("stop", "length")


def test_finish_reason_tells_a_cut_answer_from_a_finished_one(stack: Stack):
    """Case B11."""
    cut = stack.chat(max_tokens=20, ignore_eos=True).json()
    assert cut["choices"][0]["finish_reason"] == "length"
    assert cut["usage"]["completion_tokens"] == 20
    assert stack.chat(max_tokens=20).json()["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize("fields", [{"logprobs": True}, {"logprobs": True, "top_logprobs": 0}])
def test_logprobs_have_one_entry_per_token(stack: Stack, fields: dict[str, Any]):
    """Case B17."""
    [choice] = stack.chat(**fields).json()["choices"]
    content = choice["logprobs"]["content"]
    assert len(content) == len(WORDS)
    assert all(entry["top_logprobs"] == [] and entry["logprob"] <= 0 and entry["bytes"] for entry in content)


def test_logprobs_stream_in_the_same_shape_and_are_null_if_not_asked(stack: Stack):
    """Case B17."""
    chunks = events(stack.chat(stream=True, logprobs=True, top_logprobs=2))
    entries = [e for c in chunks if c["choices"][0]["logprobs"] for e in c["choices"][0]["logprobs"]["content"]]
    assert [entry["token"] for entry in entries] == [WORDS[0], *(f" {word}" for word in WORDS[1:])]
    assert all(len(entry["top_logprobs"]) == 2 for entry in entries)
    assert_openai_error(stack.chat(top_logprobs=2), 400)
    assert stack.chat(logprobs=False).json()["choices"][0]["logprobs"] is None


def test_several_choices_keep_apart_and_count_together(stack: Stack):
    """Case B19."""
    chunks = events(stack.chat(n=2, seed=1, stream=True, stream_options={"include_usage": True}))
    texts, reasons = {0: "", 1: ""}, {0: 0, 1: 0}
    for chunk in chunks[:-1]:
        [choice] = chunk["choices"]
        texts[choice["index"]] += choice["delta"].get("content", "")
        reasons[choice["index"]] += choice["finish_reason"] is not None
    assert texts == {0: ANSWER, 1: ANSWER}
    assert reasons == {0: 1, 1: 1}
    whole = stack.chat(n=2, seed=1).json()
    assert [choice["index"] for choice in whole["choices"]] == [0, 1]
    assert whole["usage"]["completion_tokens"] == chunks[-1]["usage"]["completion_tokens"] == 2 * len(WORDS)
    assert whole["usage"]["prompt_tokens"] == 3


# --- messages -------------------------------------------------------------------------------------------------------


def test_system_and_assistant_content_may_be_lists_of_parts(stack: Stack):
    """Case B2."""
    parts = [{"type": "text", "text": "Be terse."}, {"type": "text", "text": "Use bullets."}]
    history = [{"role": "system", "content": parts}, {"role": "assistant", "content": parts}, *HELLO]
    assert stack.chat(history).status_code == 200
    sent = stack.engine.requests[0].messages
    assert sent is not None
    assert [part.text for part in sent[0].content] == ["Be terse.", "Use bullets."]  # type: ignore[union-attr]
    one, string = ([{"role": "system", "content": content}, *HELLO] for content in ([parts[0]], "Be terse."))
    used, also_used = (stack.chat(messages).json()["usage"] for messages in (one, string))
    assert used["prompt_tokens"] == also_used["prompt_tokens"]


@pytest.mark.parametrize(
    "history",
    [
        [{"role": "user", "content": "A"}, {"role": "assistant", "content": ""}, {"role": "user", "content": "B"}],
        [
            {"role": "user", "content": "A"},
            {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "type": "function"}]},
            {"role": "tool", "tool_call_id": "1", "content": "42"},
        ],
        [{"role": "user", "content": "A"}, {"role": "assistant"}, {"role": "user", "content": "B"}],
    ],
)
def test_an_assistant_turn_may_be_empty(stack: Stack, history: list[Any]):
    """Case B4."""
    assert stack.chat(history).status_code == 200


def test_developer_is_system_and_unknown_roles_are_refused(stack: Stack):
    """Case B6."""
    developer, system = (
        stack.chat([{"role": role, "content": "Be terse."}, *HELLO]) for role in ("developer", "system")
    )
    assert developer.json()["usage"]["prompt_tokens"] == system.json()["usage"]["prompt_tokens"]
    first, second = stack.engine.requests
    assert first.messages == second.messages
    assert_openai_error(stack.chat([{"role": "banana", "content": "x"}]), 400)


def test_harmless_fields_are_ignored(stack: Stack):
    """Case B23."""
    extra = {"store": True, "user": "u", "metadata": {}, "service_tier": "auto", "parallel_tool_calls": True, "foo": 1}
    message = {"role": "user", "content": "hi", "name": "bob", "id": "m", "refusal": None}
    assert stack.chat([message], **extra).status_code == 200
    for detail in ("low", "high", "auto"):
        part = {"type": "image_url", "image_url": {"url": data_url(png(3)), "detail": detail}}
        assert stack.chat([{"role": "user", "content": [part]}]).status_code == 200


def test_an_image_url_may_be_a_plain_string(stack: Stack):
    """Case B1: accepted exactly as {"url": ...}, as documented."""
    part = {"type": "image_url", "image_url": data_url(png(4))}
    answer = stack.chat([{"role": "user", "content": [part, {"type": "text", "text": "?"}]}])
    assert answer.json()["usage"]["prompt_tokens_details"]["image_tokens"] == IMAGE_TOKENS


def test_tools_are_passed_to_the_template_and_the_picture_stays(stack: Stack):
    """Case C18."""
    tools = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
    answer = stack.ask(data_url(png(5)), tools=tools)
    assert answer.json()["usage"]["prompt_tokens_details"]["image_tokens"] == IMAGE_TOKENS
    assert stack.engine.requests[0].tools == tools
    stack.ask(data_url(png(5)), tools=tools, tool_choice="none")
    assert stack.engine.requests[1].tools is None


@pytest.mark.parametrize(
    "messages",
    [[], None, "hi", [{}], [{"role": "user"}], [{"role": "user", "content": []}], [{"role": "user", "content": None}]],
)
def test_messages_that_say_nothing_are_refused_and_block_nobody(stack: Stack, messages: Any):
    """Case B28."""
    assert_openai_error(stack.chat(messages), 400)
    assert stack.chat([{"role": "user", "content": ""}]).status_code == 200
    assert stack.chat().status_code == 200


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("where", ["content", "name", "part", "url"])
def test_lone_surrogates_are_refused_in_both_modes(stack: Stack, stream: bool, where: str):
    """Case B30."""
    marks = {"content": "x", "name": "x", "part": "x", "url": data_url(png(6)), where: "\ud83d"}
    body = {
        "stream": stream,
        "messages": [
            {"role": "user", "content": marks["content"], "name": marks["name"]},
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": marks["part"]},
                    {"type": "image_url", "image_url": {"url": marks["url"]}},
                ],
            },
        ],
    }
    headers = {"Content-Type": "application/json"}
    answer = stack.http.post("/v1/chat/completions", content=json.dumps(body), headers=headers)
    error = assert_openai_error(answer, 400)
    assert "TypeError" not in error["message"]
    assert stack.chat([{"role": "user", "content": "paired \U0001f600"}]).status_code == 200


# --- errors ---------------------------------------------------------------------------------------------------------


def test_unknown_models_are_not_found_and_the_served_one_is_listed(stack: Stack, client: openai.OpenAI):
    """Case B27: a request without a model gets the first served one, as documented."""
    assert [model.id for model in client.models.list()] == ["scripted"]
    assert client.models.retrieve("scripted").id == "scripted"
    for name in ("no-such-model", "Scripted", "a/b"):
        assert assert_openai_error(stack.chat(model=name), 404, "model_not_found")["param"] == "model"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("org/no-such-model")
    assert stack.chat().json()["model"] == "scripted"
    assert_openai_error(stack.chat(model=7), 400)


def test_errors_have_the_shape_that_the_official_client_knows(stack: Stack, client: openai.OpenAI):
    """Case B24."""
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(model="scripted", messages=HELLO, temperature=9)
    assert bad.value.param == "temperature"
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="nope", messages=HELLO)
    stack.engine.script = EngineScript(refuse=RateLimited("slow down", retry_after_s=3))
    with pytest.raises(openai.RateLimitError) as limited:
        client.chat.completions.create(model="scripted", messages=HELLO)
    assert limited.value.response.headers["retry-after"] == "3"
    stack.engine.script = EngineScript(refuse=ContextTooLong("prompt has 3048 tokens; at most 2048", param="messages"))
    with pytest.raises(openai.BadRequestError) as long:
        client.chat.completions.create(model="scripted", messages=HELLO)
    assert long.value.code == "context_length_exceeded"


def test_paths_methods_and_bodies_that_are_wrong_get_error_objects(stack: Stack):
    """Case B24."""
    http = stack.http
    assert_openai_error(http.get("/v1/nothing"), 404)
    assert_openai_error(http.get("/v1/chat/completions/"), 404)
    assert_openai_error(http.get("/docs"), 404)
    assert_openai_error(http.get("/v1/chat/completions"), 405)
    assert_openai_error(http.post("/v1/models"), 405)
    assert_openai_error(http.post("/v1/chat/completions", content=b"not json", headers=_json_type()), 400)
    assert_openai_error(http.post("/v1/chat/completions", content=b"[1]", headers=_json_type()), 400)
    assert_openai_error(http.post("/v1/chat/completions", data={"messages": "hi"}), 400)
    assert_openai_error(http.post("/v1/completions", json={"prompt": "x", "max_tokens": "many"}), 400)


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", "1e400", '"nan"'])
def test_numbers_that_are_none_are_refused(stack: Stack, value: str):
    """Case D17."""
    raw = f'{{"messages":[{{"role":"user","content":"hi"}}],"temperature":{value}}}'
    assert_openai_error(stack.http.post("/v1/chat/completions", content=raw, headers=_json_type()), 400)
    assert stack.chat().status_code == 200


@pytest.mark.parametrize("encoding", ["gzip", "br", "GZIP, deflate"])
def test_a_packed_body_is_refused_by_its_encoding_and_not_as_broken_json(stack: Stack, encoding: str):
    headers = _json_type() | {"Content-Encoding": encoding}
    answer = stack.http.post("/v1/chat/completions", content=b"\x1f\x8b\x08\x00", headers=headers)
    assert encoding.lower() in assert_openai_error(answer, 400)["message"]
    body = b'{"messages":[{"role":"user","content":"hi"}]}'
    plain = stack.http.post(
        "/v1/chat/completions", content=body, headers=_json_type() | {"Content-Encoding": "identity"}
    )
    assert plain.status_code == 200


@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_above_the_limit_is_413_and_one_below_is_read(stack: Stack, chunked: bool):
    """Case A32."""

    def post(num_bytes: int) -> httpx.Response:
        start, end = b'{"messages":[{"role":"user","content":"', b'"}]}'
        raw = start + b"x" * (num_bytes - len(start) - len(end)) + end
        content = iter([raw[:50_000], raw[50_000:]]) if chunked else raw
        return stack.http.post("/v1/chat/completions", content=content, headers=_json_type())

    assert post(200_000).status_code == 200
    error = assert_openai_error(post(200_001), 413, "payload_too_large")
    assert "200000" in error["message"]
    assert_openai_error(post(5_000_000), 413)
    stack.assert_serves()


def test_errors_known_beforehand_are_plain_even_if_a_stream_was_asked_for(stack: Stack):
    """Case B25 (a), (b)."""
    for answer in (stack.chat(stream=True, temperature=9), stack.ask(data_url(b"no picture at all"), stream=True)):
        assert_openai_error(answer, 400)
        assert answer.headers["content-type"] == "application/json"


@pytest.mark.parametrize(
    "script", [EngineScript(cut_after=5), EngineScript(fail=UpstreamFailed("broke"), fail_after=5)]
)
def test_an_engine_that_breaks_midway_ends_the_stream_with_an_error_event(stack: Stack, script: EngineScript):
    """Case B25 (c)."""
    stack.engine.script = script
    answer = stack.chat(stream=True)
    data = [json.loads(line.removeprefix("data: ")) for line in answer.text.split("\n\n") if line]
    assert data[-1]["error"]["message"]
    assert all(chunk["choices"][0]["finish_reason"] is None for chunk in data[:-1])
    assert "[DONE]" not in answer.text
    assert_openai_error(stack.chat(), 502)
    stack.reset()
    stack.assert_serves()


def test_the_official_client_raises_on_an_error_event(stack: Stack, client: openai.OpenAI):
    """Case B25 (c)."""
    stack.engine.script = EngineScript(cut_after=5)
    stream = client.chat.completions.create(model="scripted", messages=HELLO, stream=True)
    with pytest.raises(openai.APIError):
        list(stream)


# --- completions and tokenize ---------------------------------------------------------------------------------------


def test_the_official_client_gets_text_completions(client: openai.OpenAI):
    answer = client.completions.create(model="scripted", prompt="one two three", max_tokens=4)
    assert answer.choices[0].text == "The quick brown fox"
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == 3


def test_completions_stream_exact_lengths_with_usage(stack: Stack):
    body = {"prompt": "a b c", "max_tokens": 25, "ignore_eos": True, "temperature": 0, "stream": True}
    *chunks, last = events(stack.http.post("/v1/completions", json={**body, "stream_options": {"include_usage": True}}))
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks).split() == [*WORDS, *WORDS, *WORDS[:5]]
    assert last["usage"]["completion_tokens"] == 25
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("stream", [False, True])
def test_several_prompts_are_answered_side_by_side(stack: Stack, stream: bool):
    body = {"prompt": ["a", "b c", "d e f"], "n": 2, "max_tokens": 3, "stream": stream}
    answer = stack.http.post("/v1/completions", json={**body, "stream_options": {"include_usage": True}})
    texts = dict.fromkeys(range(6), "")
    if stream:
        *chunks, last = events(answer)
        for chunk in chunks:
            texts[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
    else:
        last = answer.json()
        texts = {choice["index"]: choice["text"] for choice in last["choices"]}
    assert texts == dict.fromkeys(range(6), "The quick brown")
    assert last["usage"]["prompt_tokens"] == 6
    assert last["usage"]["completion_tokens"] == 18


def test_token_ids_are_a_prompt(stack: Stack):
    assert stack.http.post("/v1/completions", json={"prompt": [5, 6, 7]}).json()["usage"]["prompt_tokens"] == 3
    assert stack.engine.requests[0].prompt == [5, 6, 7]


def test_one_failing_prompt_fails_the_request_and_frees_the_others(stack: Stack):
    stack.engine.script = EngineScript(cut_after=2, token_delay_s=0.01)
    assert_openai_error(stack.http.post("/v1/completions", json={"prompt": ["a", "b"]}), 502)
    answer = stack.http.post("/v1/completions", json={"prompt": ["a", "b"], "stream": True})
    assert '"error"' in answer.text
    eventually(lambda: stack.engine.num_running == 0)


def test_tokenize_counts_text_and_pictures(stack: Stack):
    assert stack.http.post("/v1/tokenize", json={"prompt": "a b c"}).json()["count"] == 3
    counted = stack.http.post("/v1/tokenize", json={"messages": question(data_url(png(7)), text="a b")}).json()
    assert counted["count"] == IMAGE_TOKENS + 3
    assert counted["max_model_len"] == 2048
    assert counted["image_tokens"] == [IMAGE_TOKENS]
    assert_openai_error(stack.http.post("/v1/tokenize", json={}), 400)


# --- the page -------------------------------------------------------------------------------------------------------


def test_the_chat_page_needs_nothing_from_elsewhere(stack: Stack):
    page = stack.http.get("/")
    assert page.status_code == 200
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert "unsafe" not in page.headers["content-security-policy"]
    paths = re.findall(r'(?:src|href)="(/web/[^"]+)"', page.text)
    assert {Path(path).suffix for path in paths} == {".css", ".js", ".svg"}
    assert not re.search(r'(?:src|href)="(?:https?:)?//|<style|<script>| style=| on[a-z]+=', page.text)
    for path in paths:
        assert stack.http.get(path).status_code == 200
    for hidden in ("/web/index.html", "/web/..%2fapp", "/web/chat", "/web/chat/"):
        assert_openai_error(stack.http.get(hidden), 404)


def test_a_browser_that_has_a_file_is_not_sent_it_again(stack: Stack):
    for path, media_type in (
        ("/", "text/html; charset=utf-8"),
        ("/web/base.css", "text/css; charset=utf-8"),
        ("/web/chat/main.js", "text/javascript; charset=utf-8"),
        ("/web/icon.svg", "image/svg+xml"),
    ):
        first = stack.http.get(path)
        assert first.headers["content-type"] == media_type
        assert first.headers["x-content-type-options"] == "nosniff"
        known = {"If-None-Match": f'"something-else", W/{first.headers["etag"]}'}
        again = stack.http.get(path, headers=known)
        assert (again.status_code, again.content) == (304, b"")
        assert again.headers["etag"] == first.headers["etag"]
        assert stack.http.get(path, headers={"If-None-Match": '"old"'}).content == first.content


def test_samples_are_an_empty_list_without_a_folder(stack: Stack):
    assert stack.http.get("/samples/index.json").json() == []
    assert_openai_error(stack.http.get("/samples/cat.png"), 404)


def _json_type() -> dict[str, str]:
    return {"Content-Type": "application/json"}
