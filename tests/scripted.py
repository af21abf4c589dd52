"""A text engine and a vision encoder that do what a script says: real services on real sockets, without a model.

They speak `shared.wire` as the real ones do, so that everything in front of them can be tested and measured alone. A
script may be changed while they run; it holds for requests that begin afterwards.
"""

from __future__ import annotations

import asyncio
import itertools
import socket
import ssl
import struct
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import uvicorn
from fastapi import FastAPI, Request
from pydantic import BaseModel
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from shared.errors import DiptychError, EmbeddingNotFound, NotReady, UnsupportedImageFormat
from shared.http_errors import error_response, install_error_handlers, wire_error
from shared.http_protocol import HttpProtocol
from shared.reasoning import ReasoningFormat
from shared.server import run_to_the_end
from shared.wire.common import NDJSON
from shared.wire.encoder import (
    IMAGE_KEY_HEADER,
    IMAGE_NUMBER_HEADER,
    Admitted,
    DescribeRequest,
    DescribeResponse,
    Encoded,
    EncodeFailedEvent,
    EncoderInfo,
)
from shared.wire.engine import (
    QUEUE_OPENS_HEADER,
    ChatMessage,
    Failed,
    Finished,
    GenerateRequest,
    ModelInfo,
    Started,
    TextPart,
    TokenizeRequest,
    TokenizeResponse,
    TokenLogprob,
    Tokens,
)
from shared.wire.images import ImageMetadata, ImageRef

IMAGE_TOKENS = 576
WORDS = ("The", "quick", "brown", "fox", "jumps", "over", "the", "lazy", "dog", ".")
_MAGIC = (b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff", b"GIF8", b"BM", b"RIFF")


# --- serving --------------------------------------------------------------------------------------------------------


@contextmanager
def serve(app: ASGIApp, port: int = 0, *, tls_context: ssl.SSLContext | None = None) -> Iterator[str]:
    """The app on a loopback socket, in a thread with a loop of its own; yields its base URL.

    tls_context   None: plain HTTP
    """
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(("127.0.0.1", port))
    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        ws="none",
        http=HttpProtocol,
        ssl_context_factory=None if tls_context is None else lambda _config, _default: tls_context,
        timeout_graceful_shutdown=1,
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=run_to_the_end, args=(server, [listener]), daemon=True)
    thread.start()
    while not server.started and thread.is_alive():
        time.sleep(0.005)
    if not server.started:
        raise RuntimeError("the app did not start")
    try:
        yield f"{'http' if tls_context is None else 'https'}://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(timeout=10)
        listener.close()


class EventStream(Response):
    """Sends events as NDJSON and stops when the caller leaves; an event of None cuts the connection."""

    def __init__(self, events: AsyncIterator[BaseModel | None], headers: dict[str, str] | None = None) -> None:
        self.events = events
        self.status_code = 200
        self.background = None
        self.body = b""
        given = {"content-type": NDJSON} | (headers or {})
        self.raw_headers = [(name.lower().encode(), value.encode()) for name, value in given.items()]
        self.was_aborted = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sending = asyncio.ensure_future(self._send(send))
        watching = asyncio.ensure_future(receive())
        await asyncio.wait((sending, watching), return_when=asyncio.FIRST_COMPLETED)
        for task in (sending, watching):
            task.cancel()
        await asyncio.wait((sending, watching))
        if not sending.cancelled():
            sending.result()

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        async for event in self.events:
            if event is None:
                return  # without the last, empty chunk: the HTTP server then cuts the connection
            await send(
                {"type": "http.response.body", "body": event.model_dump_json().encode() + b"\n", "more_body": True}
            )
        await send({"type": "http.response.body", "body": b"", "more_body": False})


# --- the text engine ------------------------------------------------------------------------------------------------


@dataclass
class EngineScript:
    """What to say, how fast, and what goes wrong.

    refuse       answered with its status instead of any event
    queue_opens_in_s    what it says of its queue with every answer; None: nothing, as older ones
    fail         sent as an error event after `fail_after` tokens
    cut_after    the connection breaks after so many tokens
    lose_images  how many requests with images find their embeddings gone
    text_only    serve a model that takes no images
    reasoning    how the model marks its reasoning; is_reasoning_open: the prompt has opened it
    published    fields that take the place of its own, or join them, in what it says about itself
    """

    tokens: list[str] = field(default_factory=lambda: list(WORDS))
    start_delay_s: float = 0.0
    first_token_delay_s: float = 0.0
    token_delay_s: float = 0.0
    refuse: DiptychError | None = None
    queue_opens_in_s: float | None = None
    fail: DiptychError | None = None
    fail_after: int = 0
    cut_after: int | None = None
    lose_images: int = 0
    text_only: bool = False
    reasoning: ReasoningFormat | None = None
    is_reasoning_open: bool = False
    published: dict[str, object] = field(default_factory=dict)


class ScriptedEngine:
    def __init__(self, model: str = "scripted", script: EngineScript | None = None) -> None:
        self.model = model
        self.script = script or EngineScript()
        self.requests: list[GenerateRequest] = []
        self.num_running = 0
        self.num_aborted = 0
        self.is_ready = True
        self.app = self._create_app()

    def _create_app(self) -> FastAPI:
        app = FastAPI(openapi_url=None)
        install_error_handlers(app)

        @app.post("/v1/generate")
        async def generate(request: Request) -> Response:
            try:
                return await self._generate(GenerateRequest.model_validate_json(await request.body()))
            except ClientDisconnect:
                return Response(status_code=499)

        @app.post("/v1/tokenize")
        async def tokenize(request: Request) -> Response:
            asked = TokenizeRequest.model_validate_json(await request.body())
            count, _ = count_tokens(asked.messages, asked.prompt)
            answer = TokenizeResponse(count=count, max_model_len=2048, tokens=list(range(count)))
            return Response(answer.model_dump_json(), media_type="application/json")

        @app.get("/v1/model")
        async def model() -> Response:
            info = self._info().model_dump(mode="json") | self.script.published
            return JSONResponse(info)

        @app.get("/ready")
        async def ready() -> Response:
            return Response("ok" if self.is_ready else "", status_code=200 if self.is_ready else 503)

        return app

    def _info(self) -> ModelInfo:
        return ModelInfo(
            id=self.model,
            max_model_len=2048,
            vocab_size=1000,
            hidden_size=64,
            dtype="float32",
            num_kv_blocks=100,
            block_size=16,
            supports_images=not self.script.text_only,
            reasoning_format=self.script.reasoning,
            created=1_700_000_000,
        )

    async def _generate(self, request: GenerateRequest) -> Response:
        script = self.script
        self.requests.append(request)
        await asyncio.sleep(script.start_delay_s)
        if not self.is_ready:
            return error_response(NotReady("the engine is not ready", retry_after_s=1))
        queue = {} if script.queue_opens_in_s is None else {QUEUE_OPENS_HEADER: f"{script.queue_opens_in_s:g}"}
        if script.refuse is not None:
            refusal = error_response(script.refuse)
            refusal.headers.update(queue)
            return refusal
        _, num_images = count_tokens(request.messages, request.prompt)
        if num_images and script.lose_images:
            script.lose_images -= 1
            return error_response(EmbeddingNotFound("no encoder has this embedding"))
        return EventStream(self._events(request, script), queue)

    async def _events(self, request: GenerateRequest, script: EngineScript) -> AsyncIterator[BaseModel | None]:
        self.num_running += 1
        try:
            num_prompt_tokens, num_image_tokens = count_tokens(request.messages, request.prompt)
            yield Started(
                num_prompt_tokens=num_prompt_tokens,
                num_image_tokens=num_image_tokens,
                is_reasoning_open=script.is_reasoning_open,
            )
            await asyncio.sleep(script.first_token_delay_s)
            num_generated = 0
            for event in _answer(request, script.tokens):
                if script.cut_after is not None and num_generated >= script.cut_after:
                    yield None
                    return
                if script.fail is not None and num_generated >= script.fail_after:
                    yield Failed(error=wire_error(script.fail))
                    return
                yield event
                num_generated += 1
                if script.token_delay_s:
                    await asyncio.sleep(script.token_delay_s)
            yield Finished(
                num_prompt_tokens=num_prompt_tokens,
                num_image_tokens=num_image_tokens,
                num_cached_tokens=max(0, num_prompt_tokens - 1) // 16 * 16,
                num_generated_tokens=num_generated,
                timings={"queue": 0.001, "transfer": 0.002, "prefill": 0.003, "decode_tokens": 0.004},
            )
        except (asyncio.CancelledError, GeneratorExit):
            self.num_aborted += 1
            raise
        finally:
            self.num_running -= 1


def _answer(request: GenerateRequest, script: list[str]) -> Iterator[Tokens]:
    """The script, cut to `max_tokens` (or repeated up to it where the end is ignored), for every choice in turns."""
    sampling = request.sampling
    limit = min(sampling.get("max_tokens") or 2048, 2048)
    words: Iterator[str] = itertools.cycle(script) if sampling.get("ignore_eos") else iter(script)
    texts = [word if index == 0 else f" {word}" for index, word in enumerate(itertools.islice(words, limit))]
    reason = "length" if len(texts) == limit and (sampling.get("ignore_eos") or len(script) > limit) else "stop"
    for position, text in enumerate(texts):
        for choice in range(sampling.get("n", 1)):
            is_last = position == len(texts) - 1
            yield Tokens(
                index=choice,
                text=text,
                token_ids=[position],
                logprobs=_logprobs(text, sampling["logprobs"]) if "logprobs" in sampling else None,
                finish_reason=reason if is_last else None,
            )


def _logprobs(text: str, num_top: int) -> list[TokenLogprob]:
    def entry(token: str, logprob: float) -> TokenLogprob:
        return TokenLogprob(token_id=1, token=token, logprob=logprob, bytes=list(token.encode()))

    top = [entry(text if rank == 0 else f"other{rank}", -0.5 - rank) for rank in range(num_top)]
    return [entry(text, -0.5).model_copy(update={"top": top})]


def count_tokens(messages: list[ChatMessage] | None, prompt: str | list[int] | None) -> tuple[int, int]:
    """Prompt and image tokens as this engine counts them: a token per word, one per message, images as announced."""
    if messages is None:
        return (len(prompt.split()) if isinstance(prompt, str) else len(prompt or ())), 0
    parts = [part for message in messages for part in message.content]
    num_image_tokens = sum(part.image.num_tokens for part in parts if not isinstance(part, TextPart))
    num_words = sum(len(part.text.split()) for part in parts if isinstance(part, TextPart))
    return len(messages) + num_words + num_image_tokens, num_image_tokens


# --- the vision encoder ---------------------------------------------------------------------------------------------


@dataclass
class EncoderScript:
    """refuse      answered with its status instead of admitting
    fail           sent after admission instead of `encoded`
    cut            the connection breaks after admission
    """

    admit_delay_s: float = 0.0
    encode_delay_s: float = 0.0
    refuse: DiptychError | None = None
    fail: DiptychError | None = None
    cut: bool = False


class ScriptedEncoder:
    def __init__(self, fingerprint: str = "f" * 64, script: EncoderScript | None = None) -> None:
        self.fingerprint = fingerprint
        self.script = script or EncoderScript()
        self.keys: list[str] = []
        self.numbers: dict[str, str] = {}  # of the pictures in their requests, by key
        self.num_running = 0
        self.num_aborted = 0
        self.is_ready = True
        self.app = self._create_app()

    def _create_app(self) -> FastAPI:
        app = FastAPI(openapi_url=None)
        install_error_handlers(app)

        @app.post("/v1/encode")
        async def encode(request: Request) -> Response:
            try:
                key = request.headers[IMAGE_KEY_HEADER]
                self.numbers[key] = request.headers.get(IMAGE_NUMBER_HEADER, "")
                return await self._encode(key, await request.body())
            except ClientDisconnect:
                return Response(status_code=499)

        @app.post("/v1/describe")
        async def describe(request: Request) -> Response:
            asked = DescribeRequest.model_validate_json(await request.body())
            if self.script.refuse is not None:
                return error_response(self.script.refuse)
            images = [ImageMetadata(num_tokens=IMAGE_TOKENS, **size.model_dump()) for size in asked.images]
            return Response(DescribeResponse(images=images).model_dump_json(), media_type="application/json")

        @app.get("/v1/info")
        async def info() -> Response:
            answer = EncoderInfo(
                model="scripted",
                fingerprint=self.fingerprint,
                dtype="float32",
                hidden_size=64,
                max_image_bytes=8 * 2**20,
                max_image_pixels=50_000_000,
                supported_formats=["PNG", "JPEG"],
            )
            return Response(answer.model_dump_json(), media_type="application/json")

        @app.get("/ready")
        async def ready() -> Response:
            return Response("ok" if self.is_ready else "", status_code=200 if self.is_ready else 503)

        return app

    async def _encode(self, image_key: str, image: bytes) -> Response:
        script = self.script
        self.keys.append(image_key)
        await asyncio.sleep(script.admit_delay_s)
        if script.refuse is not None:
            return error_response(script.refuse)
        if not image.startswith(_MAGIC):
            return error_response(UnsupportedImageFormat("these bytes are no image in a supported format: PNG, JPEG"))
        return EventStream(self._events(image_key, image, script))

    async def _events(self, image_key: str, image: bytes, script: EncoderScript) -> AsyncIterator[BaseModel | None]:
        self.num_running += 1
        try:
            width, height = struct.unpack(">II", image[16:24]) if image.startswith(_MAGIC[0]) else (640, 480)
            ref = ImageRef(image_key=image_key, num_tokens=IMAGE_TOKENS, width=width, height=height)
            yield Admitted(image=ref)
            await asyncio.sleep(script.encode_delay_s)
            if script.cut:
                yield None
            elif script.fail is not None:
                yield EncodeFailedEvent(error=wire_error(script.fail))
            else:
                yield Encoded(stored=True, timings={"decode": 0.001, "preprocess": 0.002, "encode": 0.003})
        except (asyncio.CancelledError, GeneratorExit):
            self.num_aborted += 1
            raise
        finally:
            self.num_running -= 1


def png(seed: int = 0, width: int = 8, height: int = 8) -> bytes:
    """Bytes that look like a PNG to whoever reads only its header; other seeds give other bytes."""
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return _MAGIC[0] + struct.pack(">I", 13) + b"IHDR" + header + struct.pack(">I", seed) + bytes(16)
