"""HTTP paths: parse, hand over, answer. Everything that is decided is decided elsewhere."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any

import orjson
from fastapi import APIRouter, Depends, Request
from prometheus_client import CollectorRegistry
from starlette.responses import Response

from services.gateway.auth import Keyring
from services.gateway.balancer import Pool
from services.gateway.body import read_json
from services.gateway.chat import Chat
from services.gateway.completions import Completions
from services.gateway.generation import Generator
from services.gateway.lifecycle import Lifecycle
from services.gateway.middleware import trace_of
from services.gateway.schema import ChatRequest, CompletionRequest, TokenizeBody
from services.gateway.streaming import AnswerStream, SseResponse
from shared.metrics import metrics_response
from shared.wire import EncoderInfo, ModelInfo


def api_routes(
    chat: Chat,
    completions: Completions,
    keyring: Keyring,
    lifecycle: Lifecycle,
    max_body_bytes: int,
) -> APIRouter:
    router = APIRouter(prefix="/v1", dependencies=[_needs_key(keyring)])

    async def whole(request: Request, work: Coroutine[Any, Any, dict[str, Any]]) -> Response:
        body = await lifecycle.attend(request.receive, work)
        return _json(body, {"Server-Timing": trace_of(request).server_timing()})

    async def streamed(request: Request, work: Coroutine[Any, Any, AnswerStream]) -> Response:
        return SseResponse(await lifecycle.attend(request.receive, work), lifecycle, trace_of(request))

    @router.post("/chat/completions")
    async def chat_completions(request: Request) -> Response:
        body = await read_json(request, ChatRequest, max_body_bytes)
        if body.stream:
            return await streamed(request, chat.stream(body, trace_of(request)))
        return await whole(request, chat.complete(body, trace_of(request)))

    @router.post("/completions")
    async def text_completions(request: Request) -> Response:
        body = await read_json(request, CompletionRequest, max_body_bytes)
        if body.stream:
            return await streamed(request, completions.stream(body, trace_of(request)))
        return await whole(request, completions.complete(body, trace_of(request)))

    @router.post("/tokenize")
    async def tokenize(request: Request) -> Response:
        body = await read_json(request, TokenizeBody, max_body_bytes)
        answer = await lifecycle.attend(request.receive, chat.tokenize(body, trace_of(request)))
        return _json(answer.model_dump())

    return router


def model_routes(generator: Generator, keyring: Keyring) -> APIRouter:
    router = APIRouter(prefix="/v1/models", dependencies=[_needs_key(keyring)])

    @router.get("")
    async def list_models() -> Response:
        return _json({"object": "list", "data": [_model_body(info) for info in generator.models()]})

    @router.get("/{model_id:path}")
    async def retrieve_model(model_id: str) -> Response:
        name = generator.model(model_id)
        return _json(next(_model_body(info) for info in generator.models() if info.id == name))

    return router


def operator_routes(
    engines: Pool[ModelInfo], encoders: Pool[EncoderInfo], lifecycle: Lifecycle, registry: CollectorRegistry
) -> APIRouter:
    router = APIRouter()

    @router.get("/health")
    async def health() -> Response:
        """Live: this process answers."""
        return _json({"status": "ok"})

    @router.get("/ready")
    async def ready() -> Response:
        """Ready: a text engine is. Encoders are only reported: without them text is still answered, images get 503."""
        is_ready = bool(engines.available()) and not lifecycle.is_draining
        state = {
            "status": "draining" if lifecycle.is_draining else "ready" if is_ready else "not ready",
            "text_engines": {"ready": len(engines.available()), "known": len(engines.replicas)},
            "vision_encoders": {"ready": len(encoders.available()), "known": len(encoders.replicas)},
        }
        return _json(state, status=200 if is_ready else 503)

    @router.get("/metrics")
    async def metrics() -> Response:
        return metrics_response(registry)

    return router


def _needs_key(keyring: Keyring) -> Any:
    async def check(request: Request) -> None:
        keyring.check(request.headers.get("authorization"))

    return Depends(check)


def _json(body: dict[str, Any], headers: dict[str, str] | None = None, status: int = 200) -> Response:
    return Response(orjson.dumps(body), status_code=status, headers=headers, media_type="application/json")


def _model_body(info: ModelInfo) -> dict[str, Any]:
    return {
        "id": info.id,
        "object": "model",
        "created": info.created,
        "owned_by": "diptych",
        "max_model_len": info.max_model_len,
        "supports_images": info.supports_images,
    }
