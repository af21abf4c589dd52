"""The text engine over HTTP: thin routes around `TextEngineService`.

Until the model is loaded requests get 503.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncGenerator
from functools import partial
from typing import Annotated

from fastapi import Depends, FastAPI, Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from services.text_engine.config import TextEngineSettings
from services.text_engine.runner.tensor_parallel import end_without_cleanup
from services.text_engine.service import TextEngineService
from shared.errors import NotReady, Overloaded
from shared.http_errors import error_response
from shared.http_protocol import until_disconnected
from shared.log import configure_logging, get_logger
from shared.metrics import metrics_response
from shared.panel import give_up, panel_app, serve_panel
from shared.state import EngineState
from shared.tls import Tls
from shared.wire.common import NDJSON
from shared.wire.engine import (
    QUEUE_OPENS_HEADER,
    AbortRequest,
    GenerateRequest,
    ModelInfo,
    TokenizeRequest,
    TokenizeResponse,
)
from shared.wire.engine_admin import CacheState, LoadAdapterRequest, SleepRequest, UnloadAdapterRequest

log = get_logger(__name__)
_ENGINE_DIED = "the engine cannot go on; the log says why"


def create_app(settings: TextEngineSettings) -> FastAPI:
    """The whole service, built in the app's lifespan. A model that cannot be loaded ends the process."""

    def make_service(app: FastAPI, tls: Tls) -> TextEngineService:
        return TextEngineService(settings, on_death=partial(give_up, app, _ENGINE_DIED), tls=tls)

    app = panel_app("text-engine", settings, make_service)
    _add_routes(app)
    return app


def run(settings: TextEngineSettings) -> None:
    """Serve until SIGTERM; running answers may finish within `drain_timeout_s`. A step that hangs even then is left
    behind: the process ends with status 1."""
    configure_logging("text-engine", settings.log_level, settings.log_format)
    # The engine's thread must get the interpreter back soon after each kernel; the default lets the event loop keep it
    # for 5 ms, which is a tenth of a step.
    sys.setswitchinterval(0.0005)
    app = create_app(settings)
    try:
        serve_panel(app, settings)
    finally:
        service = getattr(app.state, "service", None)
        is_hanging = service is not None and service.is_hanging
        if is_hanging or (settings.tensor_parallel_size > 1 and getattr(app.state, "failed", False)):
            end_without_cleanup(1)  # a thread may be waiting, for good, for a device or a process that shared the model


class _EventStream(Response):
    """NDJSON, lines as they come. Their source is closed however the response ends, so that an abort is sure.

    Sends by itself: Starlette's streaming response costs several times as much a token.
    """

    media_type = NDJSON

    def __init__(self, first: bytes, rest: AsyncGenerator[bytes], headers: dict[str, str]) -> None:
        self._first = first
        self._rest = rest
        super().__init__(headers=headers)
        del self.headers["content-length"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sending = asyncio.create_task(self._send_lines(send))
        leaving = asyncio.create_task(until_disconnected(receive))
        try:
            await asyncio.wait({sending, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                sending.result()
        finally:
            for task in (sending, leaving):
                task.cancel()
            await asyncio.gather(sending, leaving, return_exceptions=True)
            await self._rest.aclose()

    async def _send_lines(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": self._first, "more_body": True})
        async for lines in self._rest:
            await send({"type": "http.response.body", "body": lines, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def _queue_header(service: TextEngineService, body: GenerateRequest) -> dict[str, str]:
    return {QUEUE_OPENS_HEADER: f"{service.queue_opens_in_s(body.priority):.4g}"}


async def _service(request: Request) -> TextEngineService:
    """A coroutine, for a plain function would be called in a thread: two waits for the interpreter a request."""
    service: TextEngineService = request.app.state.service
    return service


Service = Annotated[TextEngineService, Depends(_service)]


def _add_routes(app: FastAPI) -> None:
    @app.post("/v1/generate")
    async def generate(body: GenerateRequest, service: Service) -> Response:
        lines = service.generate(body)
        try:
            first = await anext(lines)  # what is wrong with the request is an HTTP error, not an event
        except Overloaded as error:
            refusal = error_response(error)
            refusal.headers.update(_queue_header(service, body))
            return refusal
        return _EventStream(first, lines, _queue_header(service, body))

    @app.post("/v1/abort")
    async def abort(body: AbortRequest, service: Service) -> Response:
        service.abort(body.request_id)
        return JSONResponse({"request_id": body.request_id})

    @app.post("/v1/tokenize")
    async def tokenize(body: TokenizeRequest, service: Service) -> TokenizeResponse:
        return await service.tokenize(body)

    @app.get("/v1/model")
    async def model(service: Service) -> ModelInfo:
        return service.info

    @app.get("/v1/state", response_model=EngineState)
    async def state(service: Service) -> Response:
        return Response((await service.state()).model_dump_json(), media_type="application/json")

    @app.post("/v1/load_lora_adapter")
    async def load_adapter(body: LoadAdapterRequest, service: Service) -> ModelInfo:
        await service.adapter_control.load(body)
        return service.info

    @app.post("/v1/unload_lora_adapter")
    async def unload_adapter(body: UnloadAdapterRequest, service: Service) -> ModelInfo:
        await service.adapter_control.unload(body.lora_name)
        return service.info

    @app.get("/v1/cache")
    async def cache(service: Service) -> CacheState:
        return await service.cache_control.numbers()

    @app.post("/v1/cache/reset")
    async def reset_cache(service: Service) -> CacheState:
        await service.cache_control.reset()
        return await service.cache_control.numbers()

    @app.post("/v1/sleep")
    async def sleep(service: Service, body: SleepRequest = SleepRequest()) -> CacheState:  # noqa: B008 - frozen
        return await service.sleep(body)

    @app.post("/v1/wake")
    async def wake(service: Service) -> CacheState:
        await service.cache_control.wake()
        return await service.cache_control.numbers()

    @app.get("/health")
    async def health(service: Service) -> Response:
        if service.is_live:
            return JSONResponse({"status": "ok"})
        return error_response(NotReady(f"restart this service: {service.why_not_ready()}"))

    @app.get("/ready")
    async def ready(service: Service) -> Response:
        reason = service.why_not_ready()
        if reason is None:
            return JSONResponse({"status": "ready"})
        return error_response(NotReady(reason, retry_after_s=2.0))

    @app.get("/metrics")
    async def metrics(service: Service) -> Response:
        return metrics_response(service.metrics.registry)
