"""Data URLs that are taken out of a body before it is parsed: the request means the same with and without it."""

from __future__ import annotations

import base64
import json
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gateway import cut_urls
from services.gateway.body import parse, parse_large
from services.gateway.cut_urls import CutUrl, cut_out, put_back
from services.gateway.data_urls import decode_data_url
from services.gateway.images import ImageSource
from services.gateway.messages import image_sources
from services.gateway.responses_chat import to_chat
from services.gateway.responses_schema import ResponsesRequest
from services.gateway.schema import ChatRequest, ImageContent
from shared.errors import InvalidImageUrl, InvalidRequest

HEAD = "data:image/png;base64,"
DATA = bytes(range(256)) * 300
URL = HEAD + base64.b64encode(DATA).decode()


def chat(*parts: Any, **fields: Any) -> bytes:
    return orjson.dumps({"messages": [{"role": "user", "content": list(parts)}], **fields})


def image(url: Any = URL) -> dict[str, Any]:
    return {"type": "image_url", "image_url": url}


def pictures(body: ChatRequest) -> list[bytes]:
    sources = image_sources(body.messages)
    return [decode_data_url(source.url or "") for source in sources if isinstance(source, ImageSource)]


def read(raw: bytes) -> ChatRequest:
    """What both ways of reading it give, having compared them."""
    large, small = parse_large(bytearray(raw), ChatRequest), parse(raw, ChatRequest)
    assert pictures(large) == pictures(small)
    assert beside_pictures(large) == beside_pictures(small)
    return large


def beside_pictures(body: ChatRequest) -> list[object]:
    texts = [part for message in body.messages for part in message.content if not isinstance(part, ImageContent)]
    calls = [message.tool_calls for message in body.messages]
    return [texts, calls, body.model_dump(exclude={"messages"})]


def cut_of(raw: bytes) -> tuple[bytes, dict[str, CutUrl]]:
    return cut_out(bytearray(raw))


@pytest.mark.parametrize("url", [URL, {"url": URL}, {"url": URL, "detail": "low"}])
def test_a_large_picture_comes_back_as_a_view_of_the_body(url: Any):
    body = read(chat({"type": "text", "text": "what is it"}, image(url), image(URL[:-4])))
    [source, _] = image_sources(body.messages)
    assert isinstance(source, ImageSource)
    assert isinstance(source.url, CutUrl)
    assert len(source.url) == len(HEAD)
    assert pictures(body)[0] == DATA


def test_what_is_parsed_of_a_body_with_pictures_is_small():
    rest, cut = cut_of(chat(*[image()] * 5))
    assert len(cut) == 5
    assert len(rest) < 1000


def test_a_response_has_its_pictures_as_a_chat_has():
    part = {"type": "input_image", "image_url": URL}
    raw = orjson.dumps({"input": [{"role": "user", "content": [part]}]})
    body, _ = to_chat(parse_large(bytearray(raw), ResponsesRequest))
    assert pictures(body) == [DATA]


@pytest.mark.parametrize(
    "part",
    [
        {"type": "text", "text": URL},
        {"type": "text", "text": f'it says "{URL}", see'},
        {"type": "text", "text": f'\\"{URL}'},
        {"type": "text", "text": URL + "é"},
        image({"url": "data:;base64,YWJj", "note": URL}),
        {"type": "text", "text": "x", URL: URL},
    ],
)
def test_texts_that_look_like_pictures_stay_texts(part: dict[str, Any]):
    body = read(chat(part))
    if part["type"] == "text":
        assert body.messages[0].content[0].text == part["text"]  # type: ignore[union-attr]


def test_urls_in_what_tools_say_are_whole():
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}, "image_url": URL}
    tool = {"type": "function", "function": {"name": "f", "parameters": {"image_url": {"url": URL}}}}
    raw = orjson.dumps({"messages": [{"role": "assistant", "content": "x", "tool_calls": [call]}], "tools": [tool]})
    body = read(raw)
    assert body.messages[0].tool_calls == [call]
    assert body.tools[0].function.parameters == {"image_url": {"url": URL}}


def test_a_url_with_escapes_is_left_to_the_parser():
    raw = chat(image()).replace(b"/", rb"\/")
    assert cut_of(raw)[1] == {}
    assert pictures(read(raw)) == [DATA]


def test_percent_encoding_is_undone_in_a_view_too():
    payload = URL.removeprefix(HEAD).replace("+", "%2B").replace("/", "%2f")
    assert pictures(read(chat(image(HEAD + payload)))) == [DATA]


@pytest.mark.parametrize("char", ["!", "\n", "\0", "é", "="])
def test_what_is_no_base64_or_no_json_is_refused(char: str):
    at = len(URL) // 2
    raw = json.dumps({"messages": [{"role": "user", "content": [image(URL[:at] + "@@@@" + URL[at:])]}]}).encode()
    body = parse_large(bytearray(raw.replace(b"@@@@", char.encode())), ChatRequest)
    with pytest.raises(InvalidImageUrl, match="not base64"):
        pictures(body)


@pytest.mark.parametrize("raw", [b'{"a": "%b"' % URL.encode(), b'{"a": "%b' % URL.encode(), b'"%b"' % URL.encode()])
def test_a_body_that_is_no_object_is_refused_as_ever(raw: bytes):
    with pytest.raises(InvalidRequest, match="JSON"):
        parse_large(bytearray(raw), ChatRequest)


def test_a_line_end_within_a_text_is_refused_as_ever():
    raw = chat({"type": "text", "text": URL}).replace(b"AAEC", b"AA\nC", 1)
    with pytest.raises(InvalidRequest, match="not valid JSON"):
        parse_large(bytearray(raw), ChatRequest)


def test_an_error_does_not_show_the_picture():
    with pytest.raises(InvalidRequest) as refused:
        parse_large(bytearray(chat(image({"url": URL, "file_id": "file-1"}))), ChatRequest)
    assert len(refused.value.message) < 300


_texts = st.text(alphabet='"\\data:,x/ ', max_size=30) | st.just("data:,aaaaaaaaaaaaaaaa")
_json = st.recursive(
    _texts | st.integers(), lambda inner: st.lists(inner) | st.dictionaries(_texts, inner), max_leaves=20
)


@given(body=st.dictionaries(_texts, _json), spaced=st.booleans())
def test_any_json_is_the_same_afterwards(body: dict[str, Any], *, spaced: bool):
    raw = json.dumps(body, indent=1 if spaced else None, ensure_ascii=False).encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cut_urls, "CUT_BYTES", 2)
        rest, cut = cut_of(raw)
    parsed = orjson.loads(rest)
    put_back(parsed, cut)
    assert parsed == orjson.loads(raw)
