"""Every parser of bytes that somebody else chose, each with inputs that come close to good ones.

A target returns for what it takes and raises one of its `refusals` for what it does not; nothing else may come out of
it, and neither time nor memory may be out of proportion to what went in. `run` holds it to that.
"""

from __future__ import annotations

import asyncio
import base64
import io
import time
import tracemalloc
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any, Final, get_args

import httpx
import orjson
import torch
from hypothesis import strategies as st
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from PIL import Image
from pydantic import SecretStr, ValidationError
from safetensors.torch import save
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import PlainTextResponse

from services.gateway.auth import Keyring
from services.gateway.backends import _encode_events, _generate_events, _upstream_errors
from services.gateway.body import parse
from services.gateway.fetch import _check_answer, _fields
from services.gateway.file_store import FileStore
from services.gateway.files import FileLimits, Files
from services.gateway.images import decode_data_url, decode_embedding
from services.gateway.messages import check_contents, image_sources
from services.gateway.net_guard import parse_url
from services.gateway.output_schema import ToolFunction
from services.gateway.picture_cache import PictureCache
from services.gateway.reasoning import ReasoningParser
from services.gateway.responses_schema import ResponsesRequest
from services.gateway.schema import ChatRequest, CompletionRequest, TokenizeBody
from services.gateway.tool_calls.parser import ToolCallParser
from services.text_engine.embedding_fetcher import EmbeddingFetcher
from services.vision_encoder.given_embeddings import read_embedding
from shared import tensor_blob
from shared.embedding_cache import EmbeddingCache, _parse_metadata
from shared.errors import (
    DiptychError,
    EncodeFailed,
    InvalidEmbedding,
    InvalidImage,
    InvalidImageUrl,
    Unauthorized,
)
from shared.image_header import read_header
from shared.log import MAX_VALUE_CHARS, redact
from shared.redis_link import RedisLink
from shared.request_id import request_id_of
from shared.row_codec import quantize_rows
from shared.service_token import RequireServiceToken
from shared.torch_io import tensor_to_blob
from shared.wire.engine import Finished, GenerateRequest, Started, Tokens, ToolFormat
from shared.wire.images import ImageMetadata, ImageRef
from tests.fuzz.inputs import bodies, byte_texts, damaged, texts

# Far above what any target needs, far below what quadratic time or memory comes to for inputs of some 200 kB.
MOST_CPU_S: Final = 2.0
MOST_CPU_S_PER_MB: Final = 4.0
MOST_BYTES: Final = 8 << 20
MOST_BYTES_PER_BYTE: Final = 120  # the worst are bodies such as [[],[],…]: a Python object for every second byte
HIDDEN_SIZE: Final = 5

Take = Callable[[Any], object]


@dataclass(frozen=True, slots=True)
class Target:
    """take   the parser; what it does with bytes in the real system, from arrival to the value"""

    name: str
    inputs: st.SearchStrategy[Any]
    take: Take
    refusals: tuple[type[Exception], ...]


def run(target: Target, given: Any) -> None:
    """Raises whatever is no refusal, and AssertionError for an answer that cost too much."""
    size = len(given) if isinstance(given, bytes | str) else sum(map(len, given))
    said = ""
    began_at = time.thread_time()
    tracemalloc.start()
    try:
        target.take(given)
    except target.refusals as refusal:
        said = refusal.message if isinstance(refusal, DiptychError) else ""
    finally:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    took_s = time.thread_time() - began_at
    assert len(said) < MAX_VALUE_CHARS, "a refusal does not repeat what it refuses"
    assert took_s < MOST_CPU_S + MOST_CPU_S_PER_MB * size / 1e6, f"{took_s:.1f} s for {size} bytes"
    assert peak < MOST_BYTES + MOST_BYTES_PER_BYTE * size, f"{peak} bytes of memory for {size} bytes"


# --- what travels between services ------------------------------------------------------------------------------------


_ROWS: Final = torch.arange(15, dtype=torch.float32).reshape(3, HIDDEN_SIZE)
_BLOBS: Final = [
    tensor_to_blob(_ROWS),
    tensor_to_blob(_ROWS.to(torch.bfloat16)),
    tensor_to_blob(quantize_rows(_ROWS)),
    tensor_blob.pack("int8", (27,), bytes(27)),  # whole, and no rows
    tensor_blob.pack("int8", (27, 1), bytes(27)),
    tensor_blob.pack("int8", (1, 3, 9), bytes(27)),
    tensor_blob.pack("float32", (1, 1, 3, 5), bytes(60)),
]
_REF: Final = ImageRef(image_key="0" * 64, num_tokens=3, width=9, height=9)


def _take_embedding(blob: bytes) -> object:
    fetcher = EmbeddingFetcher(EmbeddingCache(None), httpx.AsyncClient(), hidden_size=HIDDEN_SIZE, timeout_s=1)
    rows = fetcher._checked(blob, _REF)
    assert rows.shape == (3, HIDDEN_SIZE)
    return rows


@st.composite
def _resealed(draw: st.DrawFn) -> bytes:
    """With a checksum that is right, so that what is behind it is reached."""
    itemsizes = {"float32": 4, "float16": 2, "bfloat16": 2, "int8": 1}
    dtype = draw(st.sampled_from(list(itemsizes)))
    shape = tuple(draw(st.lists(st.integers(1, 9), min_size=1, max_size=4)))
    num_bytes = itemsizes[dtype] * int(torch.tensor(shape).prod())
    data = draw(st.binary(min_size=1, max_size=16)) * num_bytes
    return tensor_blob.pack(dtype, shape, data[:num_bytes])


def _take_events(events: Callable[[httpx.Response], AsyncIterator[Any]]) -> Take:
    async def read(stream: bytes) -> list[Any]:
        async def chunks() -> AsyncIterator[bytes]:
            step = max(1, min(7, len(stream) // 100))  # small pieces, and a few large ones
            for start in range(0, min(len(stream), 2000), step):
                yield stream[start : min(start + step, 2000)]
            for start in range(2000, len(stream), 512):
                yield stream[start : start + 512]

        with _upstream_errors("service"):
            return [event async for event in events(httpx.Response(200, content=chunks()))]

    return lambda stream: asyncio.run(read(stream))


_EVENTS: Final = [
    event.model_dump_json(exclude_none=True).encode() + b"\n"
    for event in (
        Started(num_prompt_tokens=3, num_image_tokens=0),
        Tokens(index=0, text="a\u2028b", token_ids=[5]),
        Finished(num_prompt_tokens=3, num_image_tokens=0, num_cached_tokens=0, num_generated_tokens=1, timings={}),
    )
]
_ENCODE_EVENTS: Final = [
    b'{"event":"admitted","image":' + _REF.model_dump_json().encode() + b"}\n",
    b'{"event":"encoded","stored":true}\n',
    b'{"event":"failed","error":{"status":400,"message":"m","type":"t","code":"invalid_image","param":null}}\n',
]
_GENERATE: Final = {
    "request_id": "1",
    "model": "m",
    "messages": [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "a"},
                {"type": "image", "image": _REF.model_dump(mode="json")},
            ],
        }
    ],
    "sampling": {"max_tokens": 5},
}


def _take_wire_request(raw: bytes) -> object:
    request = GenerateRequest.model_validate_json(raw)
    return [part for message in request.messages or [] for part in message.content]


_METADATA: Final = [
    ImageMetadata(num_tokens=3, width=9, height=9).model_dump_json().encode(),
    ImageMetadata(num_tokens=6, width=9, height=9, layout=("<a>", 2, "b", 4), grid=(1, 2, 3))
    .model_dump_json()
    .encode(),
    b'{"num_tokens":1000000000000,"width":9,"height":9}',
]


def _take_metadata(raw: bytes) -> object:
    found = _parse_metadata(raw)
    assert found is None or found.num_tokens <= 2**20, "a prompt of so many places is no prompt"
    return found


# --- what clients send ------------------------------------------------------------------------------------------------


_CHAT: Final[dict[str, Any]] = {
    "model": "m",
    "messages": [
        {"role": "system", "content": "be brief"},
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "what"},
                {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA", "detail": "low"}},
                {"type": "image_embeds", "image_embeds": "AAAA"},
            ],
        },
        {
            "role": "assistant",
            "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
        },
        {"role": "tool", "tool_call_id": "1", "content": "2"},
    ],
    "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}],
    "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}},
    "logit_bias": {"5": -100},
    "stop": ["a"],
}
_RESPONSES: Final[dict[str, Any]] = {
    "model": "m",
    "instructions": "be brief",
    "input": [
        {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_image", "image_url": "b"}]},
        {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": "2"},
    ],
    "tools": [{"type": "function", "name": "f", "parameters": {"type": "object"}}],
    "text": {"format": {"type": "json_schema", "name": "a", "schema": {"type": "object"}}},
}
_BOUNDARY: Final = "x1y2"
_FORM: Final = (
    f'--{_BOUNDARY}\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nuser_data\r\n'
    f'--{_BOUNDARY}\r\nContent-Disposition: form-data; name="file"; filename="a.png"\r\n'
    f"Content-Type: image/png\r\n\r\nBYTES\r\n--{_BOUNDARY}--\r\n"
).encode()
_FORM_TYPES: Final = st.sampled_from(
    [f"multipart/form-data; boundary={_BOUNDARY}"] * 5
    + [
        "multipart/form-data",
        "multipart/form-data; boundary=",
        'multipart/form-data; boundary="',
        f"multipart/form-data; boundary={'y' * 5000}",
        f"multipart/form-data; charset=no-such; boundary={_BOUNDARY}",
        f"multipart/form-data; charset=utf-16; boundary={_BOUNDARY}",
        f"multipart/form-data; charset=base64; boundary={_BOUNDARY}",
    ]
)


def _take_upload(given: tuple[str, bytes]) -> object:
    content_type, body = given
    files = Files(
        FileStore(RedisLink(None, op_timeout_s=1, subject="files"), max_memory_bytes=2**20),
        FileLimits(max_bytes=2**20, ttl_s=5, max_ttl_s=9),
    )
    chunks = [body[start : start + 4096] for start in range(0, len(body), 4096)] or [b""]

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": chunks.pop(0), "more_body": bool(chunks)}

    scope = {"type": "http", "method": "POST", "headers": [(b"content-type", content_type.encode())]}
    info = asyncio.run(files.upload(Request(scope, receive), "owner"))
    assert 0 < info.size_bytes <= len(body)
    return info


def _take_body(model: type[Any]) -> Take:
    def take(raw: bytes) -> object:
        body = parse(raw, model)
        if isinstance(body, ChatRequest):
            check_contents(body.messages)
            image_sources(body.messages)
        if isinstance(body, ChatRequest | CompletionRequest):
            body.sampling()
        return body

    return take


_DATA_URL_PIECES: Final = (
    "data:",
    "image/png",
    ";",
    "base64",
    ",",
    "AAAA",
    "AA==",
    "%3D",
    "%",
    "=",
    " ",
    "\n",
    "é",
    "A",
)


def _take_data_url(url: str) -> object:
    data = decode_data_url(url)
    assert 0 < len(data) <= len(url)
    return data


def _take_base64(payload: str) -> object:
    data = decode_embedding(payload)
    assert base64.b64encode(data).rstrip(b"=") or not data
    return data


def _saved(format_name: str, **options: Any) -> bytes:
    file = io.BytesIO()
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.new("RGB", (13, 7), "red").save(file, format_name, **({"exif": exif} | options))
    return file.getvalue()


_IMAGES: Final = [_saved("PNG"), _saved("JPEG"), _saved("WebP"), _saved("GIF"), _saved("BMP")]


def _take_image(data: bytes) -> object:
    header = read_header(data)
    assert min(header.upright_size) > 0
    assert 1 <= header.orientation <= 8
    return header


def _empty_tensor(*shape: int) -> bytes:
    """A file that safetensors takes, since all is well with its offsets."""
    tensor = {"dtype": "F32", "shape": shape, "data_offsets": [0, 0]}
    header = orjson.dumps({"image_embeds": tensor})
    return len(header).to_bytes(8, "little") + header


_SAFETENSORS: Final = [
    *(_empty_tensor(rows, 0) for rows in (2**31, 2**63 - 1, 2**63, 2**64 - 1)),
    save({"image_embeds": _ROWS}, {"width": "9", "height": "9", "detail": "low"}),
    save({"image_embeds": _ROWS.half()}),
    save({"image_embeds": _ROWS.long()}),
    save({"other": _ROWS}),
]


def _take_given_embedding(data: bytes) -> object:
    def describe(size: Any) -> ImageMetadata:
        return ImageMetadata(num_tokens=3, width=size.width, height=size.height)

    return read_embedding(data, row_size=HIDDEN_SIZE, dtype=torch.float32, describe=describe)


_HEADER_VALUES: Final = st.text(st.characters(max_codepoint=255), max_size=80)
_TRACE: Final = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


def _take_headers(given: tuple[str, str, str]) -> object:
    """What middlewares read of every request, before anything else has looked at it."""
    names = (b"traceparent", b"tracestate", b"x-request-id")
    headers = [(name, value.encode("latin-1", "replace")) for name, value in zip(names, given, strict=True)]
    scope = {"type": "http", "path": "/v1/info", "headers": headers}
    request_id = request_id_of(scope)
    assert request_id.isascii()
    assert request_id.isprintable()
    return TraceContextTextMapPropagator().extract(Headers(scope=scope))


_TOKEN: Final = "t" * 20


def _latin(data: bytes) -> str:
    return data.decode("latin-1")


def _take_authorization(given: bytes) -> object:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        raise AssertionError("nothing is read of a request that is refused")

    guarded = RequireServiceToken(PlainTextResponse("in"), [SecretStr(_TOKEN)])
    scope = {"type": "http", "path": "/v1/info", "method": "GET", "headers": [(b"authorization", given)]}
    asyncio.run(guarded(scope, receive, send))
    is_right = given.lower().startswith(b"bearer ") and given[7:].strip() == _TOKEN.encode()
    assert (sent[0]["status"] == 200) == is_right
    return Keyring([SecretStr(_TOKEN)]).check(given.decode("latin-1"))


# --- what others answer ---------------------------------------------------------------------------------------------


_FIELD: Final = st.tuples(
    st.sampled_from(
        b"Content-Length Cache-Control Age Date Expires ETag Last-Modified Retry-After Content-Encoding Vary".split()
    ),
    st.one_of(
        st.binary(max_size=20),
        st.sampled_from(
            [b"9" * 5000, b"\xb2", b"max-age=" + b"9" * 5000, b"max-age=\xb2", b"no-store,,=", b"-1", b"5"]
        ),
        st.sampled_from([b"Tue, 99 Foo 2020 25:61:61 GMT", b"Tue, 01 Jan 0000 00:00:00 +9999", b"max-age=5"]),
    ),
)


def _take_answer(raw: list[tuple[bytes, bytes]]) -> object:
    fields = _fields(raw)
    for status in (200, 429, 503):
        try:
            _check_answer(parse_url("http://a.example/b"), status, fields, 1000)
        except DiptychError:
            continue
    cache = PictureCache(10_000)
    cache.put("http://a.example/b", b"picture", fields)
    cache.renew("http://a.example/b", fields)
    stored = cache.get("http://a.example/b")
    return stored and cache.is_fresh(stored)


def _take_url(url: str) -> object:
    target = parse_url(url)
    assert target.host
    assert not set(target.path_and_query + target.host_header) & set(" \r\n\t")
    return target


def _take_logged(text: str) -> object:
    shown = redact(text)
    assert len(shown) < MAX_VALUE_CHARS + 50
    return shown


def _take_answer_text(text: str) -> object:
    schema: Any = {"properties": {"a": {"type": "string"}}}
    functions = [ToolFunction(name="f", parameters=schema)]
    for form in get_args(ToolFormat):
        calls = ToolCallParser(form, functions)
        for start in range(0, len(text), 1024):
            calls.feed(text[start : start + 1024])
        calls.finish()
    thoughts = ReasoningParser("think", is_open=False)
    for start in range(0, len(text), 1024):
        thoughts.feed(text[start : start + 1024])
    return thoughts.finish()


# --- all of them ----------------------------------------------------------------------------------------------------

_EVENT_STREAMS: Final = [b"".join(_EVENTS), _EVENTS[0] + _EVENTS[1] * 3, _EVENTS[2]]
_ENCODE_STREAMS: Final = [_ENCODE_EVENTS[0] + _ENCODE_EVENTS[1], _ENCODE_EVENTS[0] + _ENCODE_EVENTS[2]]

TARGETS: Final = (
    Target(
        "tensor blob", st.one_of(damaged(_BLOBS), _resealed()), _take_embedding, (tensor_blob.BlobError, EncodeFailed)
    ),
    Target("engine events", damaged(_EVENT_STREAMS), _take_events(_generate_events), (DiptychError,)),
    Target("encoder events", damaged(_ENCODE_STREAMS), _take_events(_encode_events), (DiptychError,)),
    Target("request between services", bodies(_GENERATE), _take_wire_request, (ValidationError,)),
    Target("cached metadata", damaged(_METADATA), _take_metadata, ()),
    Target("upload", st.tuples(_FORM_TYPES, damaged([_FORM])), _take_upload, (DiptychError,)),
    Target("chat body", bodies(_CHAT), _take_body(ChatRequest), (DiptychError,)),
    Target(
        "completion body",
        bodies({"prompt": [[1, 2]], "n": 2, "echo": True}),
        _take_body(CompletionRequest),
        (DiptychError,),
    ),
    Target("responses body", bodies(_RESPONSES), _take_body(ResponsesRequest), (DiptychError,)),
    Target(
        "tokenize body",
        bodies({"images": [{"width": 5, "height": 7}], **_CHAT}),
        _take_body(TokenizeBody),
        (DiptychError,),
    ),
    Target("data URL", texts(*_DATA_URL_PIECES).map("data:".__add__), _take_data_url, (InvalidImageUrl,)),
    Target("base64", texts(*_DATA_URL_PIECES), _take_base64, (InvalidEmbedding,)),
    Target("image header", damaged(_IMAGES), _take_image, (InvalidImage,)),
    Target("given embedding", damaged(_SAFETENSORS), _take_given_embedding, (InvalidEmbedding,)),
    Target(
        "request headers",
        st.tuples(_HEADER_VALUES | damaged([_TRACE.encode()]).map(_latin), _HEADER_VALUES, _HEADER_VALUES),
        _take_headers,
        (),
    ),
    Target("authorization", byte_texts("Bearer ", "bearer", _TOKEN, " ", "\t"), _take_authorization, (Unauthorized,)),
    Target("picture server's answer", st.lists(_FIELD, max_size=6), _take_answer, ()),
    Target(
        "image URL",
        texts(
            "http://",
            "https:",
            "//",
            "[",
            "::1",
            "]",
            "127.1",
            "a.example",
            ":",
            "80",
            "@",
            "%",
            "/",
            "?",
            "#",
            "..",
            "\\",
        ),
        _take_url,
        (InvalidImageUrl,),
    ),
    Target(
        "logged text",
        texts("://", ":", "@", "?", "a?", "=", "bearer ", " ", "A" * 159, "'", "basic\t"),
        _take_logged,
        (),
    ),
    Target(
        "model's text",
        texts(
            "<tool_call>",
            "</tool_call>",
            "[TOOL_CALLS]",
            "<|python_tag|>",
            "<|python_start|>",
            "<function=f>",
            "<parameter=a>",
            "</parameter>",
            "f<arg_key>a</arg_key><arg_value>",
            "</arg_value>",
            "<｜tool▁call▁begin｜>f<｜tool▁sep｜>{",
            "<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{",
            "[f(a=",
            "f[ARGS]{",
            '{"name":"f",',
            '"arguments":{}}',
            "{",
            "[",
            '"',
            "\\",
            "<think>",
            "</think>",
            "\n",
        ),
        _take_answer_text,
        (),
    ),
)
