"""HTTP paths: parse, hand over, answer. Everything that is decided is decided elsewhere."""

from __future__ import annotations

from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any

import orjson
from fastapi import APIRouter, Depends, Request
from prometheus_client import CollectorRegistry
from starlette.responses import Response

from services.gateway import answer_schema as answers
from services.gateway.auth import Keyring, needs_key
from services.gateway.balancer import Pool
from services.gateway.body import read_json
from services.gateway.chat import Chat
from services.gateway.completions import Completions
from services.gateway.counting import Counting
from services.gateway.file_store import FileInfo, FileStore
from services.gateway.files import FileQuery, Files, parse_query, upload_schema
from services.gateway.generation import Generator, ServedModel
from services.gateway.key_limits import KeyLimits
from services.gateway.lifecycle import Lifecycle
from services.gateway.middleware import trace_of
from services.gateway.openapi import GENERATION_ERRORS, READING_ERRORS, UPLOAD_ERRORS, operation
from services.gateway.responses import Responses
from services.gateway.responses_schema import ResponsesRequest
from services.gateway.schema import ChatRequest, CompletionRequest, TokenizeBody
from services.gateway.streaming import AnswerStream, SseResponse
from shared.metrics import metrics_response
from shared.wire.encoder import EncoderInfo
from shared.wire.engine import ModelInfo


@dataclass(frozen=True, slots=True)
class Handlers:
    """What can be asked for, each told in a file of its own."""

    chat: Chat
    completions: Completions
    responses: Responses
    counting: Counting


def api_routes(
    handlers: Handlers,
    keyring: Keyring,
    limits: KeyLimits,
    lifecycle: Lifecycle,
    max_body_bytes: int,
) -> APIRouter:
    router = APIRouter(prefix="/v1", dependencies=[_counts_for_its_key(keyring, limits)])

    async def whole(request: Request, work: Coroutine[Any, Any, dict[str, Any]]) -> Response:
        body = await lifecycle.attend(request.receive, work)
        return _json(body, {"Server-Timing": trace_of(request).server_timing()})

    async def streamed(request: Request, work: Coroutine[Any, Any, AnswerStream]) -> Response:
        return SseResponse(await lifecycle.attend(request.receive, work), lifecycle, trace_of(request))

    @router.post(
        "/chat/completions",
        **operation(
            "Answer a conversation",
            body=ChatRequest,
            answer=answers.ChatCompletion,
            stream=answers.ChatCompletionChunk,
            errors=GENERATION_ERRORS,
        ),
    )
    async def chat_completions(request: Request) -> Response:
        body = await read_json(request, ChatRequest, max_body_bytes)
        if body.stream:
            return await streamed(request, handlers.chat.stream(body, trace_of(request)))
        return await whole(request, handlers.chat.complete(body, trace_of(request)))

    @router.post(
        "/completions",
        **operation(
            "Continue one or several texts",
            body=CompletionRequest,
            answer=answers.Completion,
            stream=answers.Completion,
            errors=GENERATION_ERRORS,
        ),
    )
    async def text_completions(request: Request) -> Response:
        body = await read_json(request, CompletionRequest, max_body_bytes)
        if body.stream:
            return await streamed(request, handlers.completions.stream(body, trace_of(request)))
        return await whole(request, handlers.completions.complete(body, trace_of(request)))

    @router.post(
        "/responses",
        **operation(
            "Answer in the words of the Responses API",
            body=ResponsesRequest,
            answer=answers.ResponseAnswer,
            stream=answers.ResponseEvent,
            errors=GENERATION_ERRORS,
        ),
    )
    async def create_response(request: Request) -> Response:
        body = await read_json(request, ResponsesRequest, max_body_bytes)
        if body.stream:
            return await streamed(request, handlers.responses.stream(body, trace_of(request)))
        return await whole(request, handlers.responses.complete(body, trace_of(request)))

    @router.post(
        "/tokenize",
        **operation(
            "Count a prompt's tokens, pictures included",
            body=TokenizeBody,
            answer=answers.TokenCount,
            errors=GENERATION_ERRORS,
        ),
    )
    async def tokenize(request: Request) -> Response:
        body = await read_json(request, TokenizeBody, max_body_bytes)
        return await whole(request, handlers.counting.count(body, trace_of(request)))

    return router


def model_routes(generator: Generator, keyring: Keyring) -> APIRouter:
    router = APIRouter(prefix="/v1/models", dependencies=[needs_key(keyring)])

    @router.get("", **operation("List the served models", answer=answers.ModelList, errors=READING_ERRORS))
    async def list_models() -> Response:
        return _json({"object": "list", "data": [_model_body(served) for served in generator.models()]})

    @router.get("/{model_id:path}", **operation("Describe a model", answer=answers.Model, errors=READING_ERRORS))
    async def retrieve_model(model_id: str) -> Response:
        name = generator.model(model_id)
        return _json(_model_body(generator.served(name)))

    return router


def file_routes(files: Files, store: FileStore, keyring: Keyring, limits: KeyLimits) -> APIRouter:
    """store   the one of `files`"""
    router = APIRouter(prefix="/v1/files", dependencies=[_counts_for_its_key(keyring, limits)])

    @router.post(
        "",
        **operation("Upload a picture", form=upload_schema(), answer=answers.File, errors=UPLOAD_ERRORS),
    )
    async def upload_file(request: Request) -> Response:
        return _json(_file_body(await files.upload(request, _owner_of(request))))

    @router.get("", **operation("List the own files", query=FileQuery, answer=answers.FileList, errors=READING_ERRORS))
    async def list_files(request: Request) -> Response:
        infos, has_more = await files.page(parse_query(request), _owner_of(request))
        data = [_file_body(info) for info in infos]
        ends = {"first_id": data[0]["id"], "last_id": data[-1]["id"]} if data else {"first_id": None, "last_id": None}
        return _json({"object": "list", "data": data, "has_more": has_more, **ends})

    @router.get("/{file_id}", **operation("Describe a file", answer=answers.File, errors=READING_ERRORS))
    async def retrieve_file(file_id: str) -> Response:
        return _json(_file_body(await store.info(file_id)))

    @router.get(
        "/{file_id}/content",
        **operation("Read a file's bytes", answer="application/octet-stream", errors=READING_ERRORS),
    )
    async def file_content(file_id: str) -> Response:
        # Somebody else's bytes: a browser must neither guess their type nor show them as a page of ours.
        headers = {"X-Content-Type-Options": "nosniff", "Content-Disposition": "attachment"}
        return Response(await store.read(file_id), headers=headers, media_type="application/octet-stream")

    @router.delete("/{file_id}", **operation("Delete a file", answer=answers.FileDeleted, errors=READING_ERRORS))
    async def delete_file(request: Request, file_id: str) -> Response:
        await store.delete(file_id, _owner_of(request))
        return _json({"id": file_id, "object": "file", "deleted": True})

    return router


def operator_routes(
    engines: Pool[ModelInfo], encoders: Pool[EncoderInfo], lifecycle: Lifecycle, registry: CollectorRegistry
) -> APIRouter:
    router = APIRouter()

    @router.get("/health", **operation("Live", answer=answers.Health))
    async def health() -> Response:
        """Live: this process answers."""
        return _json({"status": "ok"})

    @router.get("/ready", **operation("Ready", answer=answers.Readiness, also={503: answers.Readiness}))
    async def ready() -> Response:
        """Ready: a text engine is. Encoders are only reported: without them text is still answered, images get 503."""
        is_ready = bool(engines.available()) and not lifecycle.is_draining
        state = {
            "status": "draining" if lifecycle.is_draining else "ready" if is_ready else "not ready",
            "text_engines": {"ready": len(engines.available()), "known": len(engines.replicas)},
            "vision_encoders": {"ready": len(encoders.available()), "known": len(encoders.replicas)},
        }
        return _json(state, status=200 if is_ready else 503)

    @router.get("/metrics", **operation("Prometheus metrics", answer="text/plain"))
    async def metrics() -> Response:
        return metrics_response(registry)

    return router


def document_routes(described: dict[str, Any]) -> APIRouter:
    router = APIRouter(include_in_schema=False)
    body = orjson.dumps(described)

    @router.get("/openapi.json")
    async def openapi_document() -> Response:
        return Response(body, media_type="application/json")

    return router


def _counts_for_its_key(keyring: Keyring, limits: KeyLimits) -> Any:
    async def check(request: Request) -> None:
        trace = trace_of(request)
        trace.key_name = keyring.check(request.headers.get("authorization"))
        limits.enter(trace.key_name)
        trace.is_counted = True  # RequestScope gives the place back when the request ends

    return Depends(check)


def _json(body: dict[str, Any], headers: dict[str, str] | None = None, status: int = 200) -> Response:
    return Response(orjson.dumps(body), status_code=status, headers=headers, media_type="application/json")


def _owner_of(request: Request) -> str:
    """In whose list a file is: everyone whose API key has the same name."""
    name = trace_of(request).key_name
    assert name is not None, "files are for those who were let in"
    return name


def _file_body(info: FileInfo) -> dict[str, Any]:
    return {
        "id": info.id,
        "object": "file",
        "bytes": info.size_bytes,
        "created_at": info.created_at,
        "expires_at": info.expires_at,
        "filename": info.filename,
        "purpose": info.purpose,
        "status": "processed",
        **({} if info.uuid is None else {"uuid": info.uuid}),
    }


def _model_body(served: ServedModel) -> dict[str, Any]:
    info, adapter = served.info, served.adapter
    return {
        "id": served.id,
        "object": "model",
        "created": info.created if adapter is None else adapter.created,
        "owned_by": "diptych",
        "root": info.id if adapter is None else adapter.root,
        "parent": None if adapter is None else info.id,
        "max_model_len": info.max_model_len,
        "supports_images": info.supports_images,
    }
