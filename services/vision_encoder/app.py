"""The vision encoder over HTTP: thin routes around `VisionEncoderService`.

Until the model is loaded requests get 503.
"""

from __future__ import annotations

import asyncio
import math
import re
import time
from collections.abc import AsyncIterator, Coroutine, Mapping
from typing import Annotated, Any

from fastapi import Depends, FastAPI, Header, Request
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from services.vision_encoder.batcher import ANY_PLACE, Place
from services.vision_encoder.config import VisionEncoderSettings
from services.vision_encoder.encoder import Encoder
from services.vision_encoder.flight import EventStream
from services.vision_encoder.service import VisionEncoderService
from shared.errors import DiptychError, ImageTooLarge, InvalidRequest, NotReady, PayloadTooLarge, RequestAborted
from shared.http_errors import error_response
from shared.http_protocol import until_disconnected
from shared.log import configure_logging, get_logger
from shared.metrics import metrics_response
from shared.panel import panel_app, serve_panel
from shared.state import EncoderState
from shared.tracing import current_span
from shared.wire.common import DEADLINE_HEADER, NDJSON, REQUEST_ID_HEADER
from shared.wire.encoder import (
    DETAIL_HEADER,
    IMAGE_KEY_HEADER,
    IMAGE_NUMBER_HEADER,
    SAFETENSORS,
    DescribeRequest,
    DescribeResponse,
    Encoded,
    EncodeEvent,
    EncoderInfo,
    ImageSize,
)
from shared.wire.images import Detail, ImageMetadata

log = get_logger(__name__)

KEY_PATTERN = re.compile(r"[0-9a-f]{64}")
NUMBER_PATTERN = re.compile(r"[0-9]{1,9}")
MAX_DISCARDED_BYTES = 64 << 20


def create_app(settings: VisionEncoderSettings) -> FastAPI:
    """The whole service, built in the app's lifespan. A model that cannot be loaded ends the process."""
    app = panel_app("vision-encoder", settings, lambda _app, tls: VisionEncoderService(settings, tls))
    _add_routes(app)
    return app


def run(settings: VisionEncoderSettings) -> None:
    """Serve until SIGTERM; running work may finish within `drain_timeout_s`."""
    configure_logging("vision-encoder", settings.log_level, settings.log_format)
    serve_panel(create_app(settings), settings)


async def _service(request: Request) -> VisionEncoderService:
    """A coroutine, as the other dependencies are: a plain function would be called in a thread."""
    service: VisionEncoderService = request.app.state.service
    return service


async def _deadline_s(
    service: Annotated[VisionEncoderService, Depends(_service)],
    given: Annotated[str | None, Header(alias=DEADLINE_HEADER)] = None,
) -> float:
    if given is None:
        return service.settings.default_deadline_s
    try:
        seconds = float(given)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise InvalidRequest(f"{DEADLINE_HEADER} must be a positive number of seconds, not {given[:40]!r}")
    return seconds


async def _image_key(given: Annotated[str | None, Header(alias=IMAGE_KEY_HEADER)] = None) -> str | None:
    return None if given is None else _checked_key(given, IMAGE_KEY_HEADER)


def _checked_key(key: str, name: str) -> str:
    if not KEY_PATTERN.fullmatch(key):
        raise InvalidRequest(f"{name} must be 64 hexadecimal digits, not {key[:80]!r}", param=name)
    return key


async def _detail(given: Annotated[str | None, Header(alias=DETAIL_HEADER)] = None) -> Detail:
    if given not in (None, "low", "high"):
        raise InvalidRequest(f"{DETAIL_HEADER} must be low or high, not {given[:40]!r}", param=DETAIL_HEADER)
    return "low" if given == "low" else "high"


def _place(
    number: Annotated[str, Header(alias=IMAGE_NUMBER_HEADER)] = "",
    request_id: Annotated[str, Header(alias=REQUEST_ID_HEADER)] = "",
) -> Place:
    if not number or not request_id:
        return ANY_PLACE
    if not NUMBER_PATTERN.fullmatch(number):
        raise InvalidRequest(
            f"{IMAGE_NUMBER_HEADER} must be a number of a request's pictures, not {number[:40]!r}",
            param=IMAGE_NUMBER_HEADER,
        )
    return Place(request_id, int(number))


Service = Annotated[VisionEncoderService, Depends(_service)]
Deadline = Annotated[float, Depends(_deadline_s)]
ImageKey = Annotated[str | None, Depends(_image_key)]
ImageDetail = Annotated[Detail, Depends(_detail)]
ImagePlace = Annotated[Place, Depends(_place)]


async def _while_connected(request: Request, work: Coroutine[Any, Any, bytes]) -> bytes:
    """What `work` gives; it is cancelled when the client leaves, for which there is nobody to answer."""
    working, leaving = asyncio.create_task(work), asyncio.create_task(until_disconnected(request.receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise RequestAborted("the client has left")
        return working.result()
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


def _add_routes(app: FastAPI) -> None:
    @app.post("/v1/encode")
    async def encode(
        request: Request,
        service: Service,
        claimed_key: ImageKey,
        deadline_s: Deadline,
        detail: ImageDetail,
        place: ImagePlace,
    ) -> Response:
        try:
            service.refuse_new_work()
            encoder = service.encoder
            with encoder.receiving(_declared_bytes(request), claimed_key):
                data = await _body(request, encoder.limits.max_bytes)
                if request.headers.get("content-type") == SAFETENSORS:
                    stream = await encoder.adopt(data, claimed_key)
                else:
                    stream = await encoder.encode(data, claimed_key, deadline_s, detail, place)
        except DiptychError:
            await _discard(request)
            raise
        headers = {name: value for name in (REQUEST_ID_HEADER,) if (value := request.headers.get(name))}
        return EventsResponse(stream, headers)

    @app.post("/v1/describe")
    async def describe(request: DescribeRequest, service: Service) -> DescribeResponse:
        described = [_described(service.encoder, size, index) for index, size in enumerate(request.images)]
        return DescribeResponse(images=described)

    @app.get("/v1/embeddings/{key}")
    async def embedding(request: Request, key: str, service: Service, deadline_s: Deadline) -> Response:
        blob = await _while_connected(request, service.encoder.embedding(_checked_key(key, "key"), deadline_s))
        return Response(blob, media_type="application/octet-stream")

    @app.get("/v1/info")
    async def info(service: Service) -> EncoderInfo:
        return service.info

    @app.get("/v1/state")
    async def state(service: Service) -> EncoderState:
        return service.state()

    @app.get("/health")
    async def health(service: Service) -> Response:
        if service.load_error is None:
            return JSONResponse({"status": "ok"})
        return error_response(NotReady(f"the model could not be loaded: {service.load_error}"))

    @app.get("/ready")
    async def ready(service: Service) -> Response:
        reason = service.why_not_ready()
        if reason is None:
            return JSONResponse({"status": "ready"})
        return error_response(NotReady(reason, retry_after_s=2.0))

    @app.get("/metrics")
    async def metrics(service: Service) -> Response:
        return metrics_response(service.metrics.registry)


def _described(encoder: Encoder, size: ImageSize, index: int) -> ImageMetadata:
    try:
        return encoder.describe(size)
    except ImageTooLarge as error:
        raise ImageTooLarge(error.message, param=f"images[{index}]") from error


class EventsResponse(StreamingResponse):
    """A line of JSON per event; closes the stream however the response ends, even before its first line."""

    def __init__(self, stream: EventStream, headers: Mapping[str, str]) -> None:
        super().__init__(_lines(stream.events), media_type=NDJSON, headers=headers)
        self._stream = stream

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._stream.close()


async def _lines(events: AsyncIterator[EncodeEvent]) -> AsyncIterator[str]:
    async for event in events:
        if isinstance(event, Encoded) and event.spans and (span := current_span()) is not None:
            took_s = max(stage.start_s + stage.duration_s for stage in event.spans)
            span.stages(event.spans, began_at=time.monotonic() - took_s)
        yield event.model_dump_json(exclude_none=True) + "\n"


def _declared_bytes(request: Request) -> int:
    """What the caller says it will send; 0 if it does not say, and then `_body` counts."""
    declared = request.headers.get("content-length", "")
    return int(declared) if declared.isdecimal() else 0


async def _body(request: Request, max_bytes: int) -> bytes:
    body = bytearray()
    try:
        async for chunk in request.stream():
            body += chunk
            if len(body) > max_bytes:
                raise PayloadTooLarge(f"the image has more than {max_bytes} bytes; this server takes at most that")
    except ClientDisconnect:
        raise RequestAborted("the caller went away while it was sending the image") from None
    return bytes(body)


async def _discard(request: Request) -> None:
    """Read on without keeping: a client that is still sending would otherwise see a reset instead of the answer."""
    num_bytes = 0
    try:
        async for chunk in request.stream():
            num_bytes += len(chunk)
            if num_bytes > MAX_DISCARDED_BYTES:
                return
    except (ClientDisconnect, RuntimeError):  # gone, or there was nothing left to read
        return
