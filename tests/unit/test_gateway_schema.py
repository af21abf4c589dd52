"""Request bodies: what is accepted, what is refused and how the refusal reads, and what reaches the engine."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from services.gateway.body import parse
from services.gateway.messages import affinity_parts, check_contents, image_sources, to_wire
from services.gateway.schema import ChatRequest, CompletionRequest, TextContent, wire_sampling
from shared.errors import InvalidRequest, UnsupportedFeature
from shared.wire.engine import ImagePart, TextPart
from shared.wire.images import ImageRef

HELLO = [{"role": "user", "content": "hi"}]
PICTURE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}


def chat(**fields: Any) -> ChatRequest:
    return parse(orjson.dumps({"messages": HELLO, **fields}), ChatRequest)


def completion(**fields: Any) -> CompletionRequest:
    return parse(orjson.dumps(fields), CompletionRequest)


def sent(body: ChatRequest | CompletionRequest) -> dict[str, Any]:
    return wire_sampling(body.sampling())


def ref(number: int) -> ImageRef:
    return ImageRef(image_key=f"{number:064x}", num_tokens=9, width=3, height=3)


# --- JSON -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b'"text"', b"1", b"null", b"\xff", b"[" * 5000, b'{"messages"'])
def test_a_body_that_is_no_json_object_is_refused(raw: bytes):
    """Case B24."""
    with pytest.raises(InvalidRequest):
        parse(raw, ChatRequest)


@pytest.mark.parametrize("field", ["temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty"])
@pytest.mark.parametrize("value", [b"NaN", b"Infinity", b"-Infinity", b"1e400", b'"nan"', b"true", b"[]"])
def test_what_is_not_a_finite_number_is_refused(field: str, value: bytes):
    """Case D17."""
    raw = b'{"messages":[{"role":"user","content":"hi"}],"%s":%s}' % (field.encode(), value)
    with pytest.raises(InvalidRequest):
        parse(raw, ChatRequest).sampling()


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 3},
        {"temperature": -0.1},
        {"top_p": 1.01},
        {"presence_penalty": 10},
        {"frequency_penalty": -2.5},
        {"repetition_penalty": 0},
        {"top_k": -5},
        {"n": 0},
        {"n": 1000},
        {"seed": 1.5},
        {"stop": ["a", ""]},
        {"stop": 7},
        {"stop_token_ids": [-1]},
        {"allowed_token_ids": [-1]},
        {"bad_words": [""]},
        {"min_tokens": 5, "max_tokens": 4},
        {"stream": "yes"},
        {"priority": 2**40},
    ],
)
def test_values_out_of_range_name_their_field(fields: dict[str, Any]):
    with pytest.raises(InvalidRequest) as refused:
        chat(**fields).sampling()
    assert refused.value.param is not None
    assert refused.value.param.partition("[")[0] in fields


@pytest.mark.parametrize("value", [0, -1, 1.5, "5", True, 1e18])
@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
def test_limits_that_are_no_positive_whole_number_are_refused(field: str, value: Any):
    """Case D19."""
    with pytest.raises(InvalidRequest) as refused:
        chat(**{field: value}).sampling()
    assert refused.value.param == field


def test_the_largest_ints_pass_and_larger_ones_are_refused_here_not_deeper():
    assert sent(chat(max_tokens=2**31 - 1)) == {"max_tokens": 2**31 - 1}
    with pytest.raises(InvalidRequest):
        parse(b'{"messages":[{"role":"user","content":"hi"}],"top_k":' + b"9" * 30 + b"}", ChatRequest)


@pytest.mark.parametrize("bias", [{"abc": 1}, {"-1": 5}, {"5": 1000}, {"5": "x"}, {"": 1}, {"1.0": 1}, {"\u0665": 1}])
def test_logit_bias_keys_are_token_ids_and_values_bounded(bias: dict[str, Any]):
    """Case D16."""
    with pytest.raises(InvalidRequest) as refused:
        chat(logit_bias=bias).sampling()
    assert (refused.value.param or "").startswith("logit_bias")


@pytest.mark.parametrize("text", ["content", "name", "part", "url"])
def test_a_lone_surrogate_is_refused_and_a_pair_is_fine(text: str):
    """Case B30."""

    def body(escape: bytes) -> bytes:
        fields = {"content": b"hi", "name": b"bob", "part": b"hi", "url": b"data:image/png;base64,AAAA", text: escape}
        return (
            b'{"messages":[{"role":"user","name":"%(name)s","content":"%(content)s"},{"role":"user","content":'
            b'[{"type":"text","text":"%(part)s"},{"type":"image_url","image_url":{"url":"%(url)s"}}]}]}'
            % {name.encode(): value for name, value in fields.items()}
        )

    parse(body(rb"\ud83d\ude00"), ChatRequest)
    with pytest.raises(InvalidRequest) as refused:
        parse(body(rb"emoji \ud83d"), ChatRequest)
    assert "Error" not in refused.value.message


# --- messages -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "messages",
    [
        [],
        None,
        "hi",
        [{}],
        ["hi"],
        [{"role": "banana", "content": "x"}],
        [{"role": "user"}],
        [{"role": "user", "content": None}],
        [{"role": "user", "content": []}],
        [{"role": "user", "content": 5}],
        [{"role": "user", "content": [5]}],
        [{"role": "user", "content": [{"text": "x"}]}],
        [{"role": "user", "content": [{"type": "text"}]}],
        [{"role": "user", "content": [{"type": "image_url"}]}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": 5}]}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x", "detail": "ultra"}}]}],
        [{"role": "system", "content": []}],
    ],
)
def test_messages_that_say_nothing_are_refused_without_class_names(messages: Any):
    """Cases B6, B28."""
    with pytest.raises(InvalidRequest) as refused:
        check_contents(chat(messages=messages).messages)
    assert refused.value.message
    for internal in ("ChatRequest", "Message", "ImageUrl", "Content[", "instance of", "<"):
        assert internal not in refused.value.message


def test_the_path_of_a_bad_part_is_the_clients_own():
    bad = [{"role": "user", "content": [PICTURE, {"type": "image_url", "image_url": {"url": 5}}]}]
    with pytest.raises(InvalidRequest) as refused:
        chat(messages=bad)
    assert refused.value.param == "messages[0].content[1].image_url.url"


def test_an_empty_string_is_a_message():
    """Case B28: content "" is accepted and renders as nothing."""
    body = chat(messages=[{"role": "user", "content": ""}])
    check_contents(body.messages)
    assert to_wire(body.messages, [])[0].content == []


@pytest.mark.parametrize(
    "assistant",
    [{"content": ""}, {"content": None, "tool_calls": [{"id": "1"}]}, {"tool_calls": [{"id": "1"}]}, {"content": []}],
)
def test_an_assistant_may_have_said_nothing(assistant: dict[str, Any]):
    """Case B4."""
    history = [HELLO[0], {"role": "assistant", **assistant}, {"role": "tool", "tool_call_id": "1", "content": "42"}]
    body = chat(messages=history)
    check_contents(body.messages)
    assert to_wire(body.messages, [])[1].content == []


def test_a_string_and_one_text_part_are_the_same():
    """Case B2."""
    text, parts = (
        chat(messages=[{"role": "system", "content": c}]) for c in ("Be.", [{"type": "text", "text": "Be."}])
    )
    assert to_wire(text.messages, []) == to_wire(parts.messages, [])


def test_developer_is_another_word_for_system():
    """Case B6."""
    developer, system = (chat(messages=[{"role": role, "content": "x"}]) for role in ("developer", "system"))
    assert to_wire(developer.messages, []) == to_wire(system.messages, [])


def test_messages_and_parts_keep_their_order_and_literal_placeholders_stay_text():
    """Cases C1, C9."""
    parts = [{"type": "text", "text": "A <image>"}, PICTURE, {"type": "text", "text": "B"}, PICTURE]
    body = chat(messages=[{"role": "system", "content": "<image>"}, {"role": "user", "content": parts}])
    system, user = to_wire(body.messages, [ref(1), ref(2)])
    assert system.content == [TextPart(text="<image>")]
    assert user.content == [
        TextPart(text="A <image>"),
        ImagePart(image=ref(1)),
        TextPart(text="B"),
        ImagePart(image=ref(2)),
    ]
    assert [source.param for source in image_sources(body.messages)] == [
        "messages[1].content[1].image_url",
        "messages[1].content[3].image_url",
    ]


def test_an_empty_text_part_changes_nothing():
    """Case C12."""
    with_text = chat(messages=[{"role": "user", "content": [{"type": "text", "text": ""}, PICTURE]}])
    without = chat(messages=[{"role": "user", "content": [PICTURE]}])
    assert to_wire(with_text.messages, [ref(1)]) == to_wire(without.messages, [ref(1)])


def test_an_image_url_may_be_a_plain_string():
    """Case B1: accepted exactly as {"url": ...}."""
    body = chat(
        messages=[{"role": "user", "content": [{"type": "image_url", "image_url": "data:image/png;base64,AAAA"}]}]
    )
    assert image_sources(body.messages)[0].url == "data:image/png;base64,AAAA"


def test_a_text_part_may_carry_a_stray_image_url():
    """Case B1."""
    body = chat(messages=[{"role": "user", "content": [{"type": "text", "text": "x", "image_url": 7}]}])
    assert body.messages[0].content == [TextContent(type="text", text="x")]


@pytest.mark.parametrize("kind", ["input_audio", "file", "video_url"])
def test_parts_of_other_kinds_are_refused_by_name_not_dropped(kind: str):
    body = chat(messages=[{"role": "user", "content": [{"type": kind, kind: {}}]}])
    with pytest.raises(UnsupportedFeature) as refused:
        image_sources(body.messages)
    assert refused.value.param == "messages[0].content[0].type"


# --- fields ---------------------------------------------------------------------------------------------------------


def test_unknown_and_harmless_fields_are_ignored():
    """Case B23."""
    message = {
        "role": "user",
        "content": [{**PICTURE, "image_url": {"url": "data:,", "detail": "low"}, "x": 1}],
        "name": "bob",
    }
    body = chat(
        messages=[{**message, "id": "m1", "refusal": None}],
        store=True,
        user="u",
        metadata={"a": "b"},
        service_tier="auto",
        parallel_tool_calls=True,
        reasoning_effort="high",
        verbosity="low",
        prompt_cache_key="k",
        safety_identifier="s",
        foo=[1],
    )
    assert sent(body) == {}
    assert body.messages[0].name == "bob"


def test_null_is_the_same_as_absent():
    nulls = dict.fromkeys(ChatRequest.model_fields.keys() - {"messages"})
    assert chat(**nulls) == chat()


def test_every_sampling_field_reaches_the_engine():
    fields = {
        "n": 2,
        "min_tokens": 1,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 5,
        "min_p": 0.1,
        "presence_penalty": 0.2,
        "frequency_penalty": -0.2,
        "repetition_penalty": 1.1,
        "include_stop_str_in_output": True,
        "ignore_eos": True,
        "skip_special_tokens": False,
        "seed": 42,
    }
    body = chat(**fields, logit_bias={"42": 100}, stop="END", stop_token_ids=[7], logprobs=True, top_logprobs=3)
    assert sent(body) == {**fields, "logit_bias": {42: 100.0}, "stop": ("END",), "stop_token_ids": (7,), "logprobs": 3}


@pytest.mark.parametrize(
    ("fields", "param", "told"),
    [
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "top_logprobs is 21; it must be from 0 to 20"),
        ({"prompt_logprobs": 21}, "prompt_logprobs", "prompt_logprobs is 21"),
        ({"min_tokens": 9, "max_tokens": 3}, "min_tokens", "but max_tokens is only 3"),
        ({"min_tokens": 9, "max_completion_tokens": 3}, "min_tokens", "but max_completion_tokens is only 3"),
        ({"max_tokens": 0}, "max_tokens", "max_tokens is 0"),
    ],
)
def test_a_field_is_refused_under_the_name_that_a_chat_gave_it(fields: dict[str, Any], param: str, told: str):
    with pytest.raises(InvalidRequest, match=told) as refused:
        chat(**fields).sampling()
    assert refused.value.param == param


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"logprobs": 21}, "logprobs"),
        ({"echo": True, "logprobs": 21}, "logprobs"),
        ({"echo": True, "prompt_logprobs": 21, "logprobs": 1}, "prompt_logprobs"),
    ],
)
def test_a_field_is_refused_under_the_name_that_a_completion_gave_it(fields: dict[str, Any], name: str):
    with pytest.raises(InvalidRequest, match=f"^{name} is 21") as refused:
        completion(prompt="hello", **fields).sampling()
    assert refused.value.param == name


def test_max_completion_tokens_wins():
    """Case B7."""
    assert sent(chat(max_tokens=50, max_completion_tokens=5)) == {"max_tokens": 5}


@pytest.mark.parametrize(("fields", "logprobs"), [({"logprobs": True}, 0), ({"logprobs": True, "top_logprobs": 0}, 0)])
def test_logprobs_alone_asks_for_the_chosen_tokens(fields: dict[str, Any], logprobs: int):
    """Case B17."""
    assert sent(chat(**fields)) == {"logprobs": logprobs}


def test_top_logprobs_needs_logprobs():
    """Case B17."""
    with pytest.raises(InvalidRequest) as refused:
        chat(top_logprobs=2).sampling()
    assert refused.value.param == "top_logprobs"
    assert sent(chat(logprobs=False)) == {}


@pytest.mark.parametrize(
    "fields",
    [
        {"functions": [{"name": "f"}]},
        {"suffix": "."},
        {"modalities": ["text", "audio"]},
        {"audio": {"voice": "x"}},
        {"best_of": 3},
        {"truncate_prompt_tokens": 10},
        {"mm_processor_kwargs": {"num_crops": 4}},
        {"chat_template": "{{x}}"},
    ],
)
def test_a_feature_that_is_not_there_is_refused_by_name(fields: dict[str, Any]):
    with pytest.raises(UnsupportedFeature) as refused:
        chat(**fields)
    assert refused.value.param in fields
    assert refused.value.code == "unsupported_feature"


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "text"}},
        {"tool_choice": "auto"},
        {"tool_choice": "none"},
        {"modalities": ["text"]},
        {"best_of": 1},
        {"functions": None},
    ],
)
def test_asking_for_what_happens_anyway_is_fine(fields: dict[str, Any]):
    assert sent(chat(**fields)) == {}


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("a", ["a"]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [[1, 2]]),
        ([[1], [2, 3]], [[1], [2, 3]]),
        ("", [""]),
    ],
)
def test_a_prompt_is_text_or_token_ids_or_several_of_them(prompt: Any, prompts: list[Any]):
    body = completion(prompt=prompt)
    assert body.prompt == prompts
    assert sent(body) == {"max_tokens": 16}


@pytest.mark.parametrize("prompt", [[], [[]], [True], [1, "a", None], {"a": 1}, 7, [-1], [2**40], None])
def test_anything_else_is_no_prompt(prompt: Any):
    with pytest.raises(InvalidRequest) as refused:
        completion(prompt=prompt)
    assert refused.value.param == "prompt"


def test_a_million_bad_messages_cost_one_complaint():
    raw = b'{"messages":[' + b",".join([b"{}"] * 100_000) + b"]}"
    with pytest.raises(InvalidRequest) as refused:
        parse(raw, ChatRequest)
    assert refused.value.param == "messages[0].role"


def test_turns_of_one_conversation_have_one_affinity():
    first = [
        {"role": "system", "content": "Be terse."},
        {"role": "user", "content": [PICTURE, {"type": "text", "text": "?"}]},
    ]
    later = [*first, {"role": "assistant", "content": "A cat."}, {"role": "user", "content": "Sure?"}]
    other = [first[0], {"role": "user", "content": "Something else"}]

    def affinity(messages: list[Any]) -> list[bytes]:
        return list(affinity_parts(to_wire(chat(messages=messages).messages, [ref(1)])))

    assert affinity(first) == affinity(later)
    assert affinity(first) != affinity(other)
