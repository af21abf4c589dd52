"""The operators' routes: the engines' KV caches (numbers, reset, sleep, wake) and their LoRA adapters (load, unload).

Each asks one engine or all of them at once, and answers with what they say, side by side. Admin keys open these routes
and nothing else, API keys do not. Adapters have vLLM's paths; what an engine may load from is a setting of its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Annotated, Any, Final

import orjson
from fastapi import APIRouter, Query, Request
from fastapi.routing import APIRoute
from starlette.responses import Response

from services.gateway.auth import Keyring, needs_key
from services.gateway.backends import EngineClient
from services.gateway.balancer import Pool, Replica
from services.gateway.body import read_json
from services.gateway.lifecycle import Lifecycle
from shared.errors import DiptychError, NotFound
from shared.wire.common import WireModel
from shared.wire.engine import ModelInfo
from shared.wire.engine_admin import LoadAdapterRequest, SleepRequest, UnloadAdapterRequest

MAX_BODY_BYTES: Final = 4096
_METHODS: Final = ["DELETE", "GET", "HEAD", "PATCH", "POST", "PUT"]
EngineNumber = Annotated[int | None, Query(ge=1, le=10**6)]


def admin_routes(
    engines: Pool[ModelInfo], client: EngineClient, lifecycle: Lifecycle, keyring: Keyring | None
) -> APIRouter:
    """keyring   None: there are no admin keys, so every route is 404 and says what would open it. Never an empty one,
    which would let everybody in
    """
    router = APIRouter(include_in_schema=False, dependencies=[] if keyring is None else [needs_key(keyring)])
    _add_cache_routes(router, engines, client, lifecycle)
    _add_adapter_routes(router, engines, client)
    return _closed(router) if keyring is None else router


def _add_cache_routes(router: APIRouter, engines: Pool[ModelInfo], client: EngineClient, lifecycle: Lifecycle) -> None:
    async def ask(method: str, path: str, engine: int | None, body: WireModel | None = None) -> Response:
        async def ask_one(replica: Replica[ModelInfo]) -> dict[str, Any]:
            state = await client.control_cache(method, replica.url, path, body)
            if state.state == "asleep":
                replica.unreachable()  # until a probe finds it awake: no request need try it first
            return state.model_dump()

        return await _ask_engines(engines, engine, ask_one)

    @router.get("/v1/cache")
    async def numbers(engine: EngineNumber = None) -> Response:
        return await ask("GET", "/v1/cache", engine)

    @router.post("/v1/cache/reset")
    async def reset(engine: EngineNumber = None) -> Response:
        return await ask("POST", "/v1/cache/reset", engine)

    @router.post("/v1/sleep")
    async def sleep(request: Request, engine: EngineNumber = None) -> Response:
        body = await read_json(request, SleepRequest, MAX_BODY_BYTES, if_empty=SleepRequest())
        return await lifecycle.attend(request.receive, ask("POST", "/v1/sleep", engine, body))

    @router.post("/v1/wake")
    async def wake(engine: EngineNumber = None) -> Response:
        return await ask("POST", "/v1/wake", engine)


def _add_adapter_routes(router: APIRouter, engines: Pool[ModelInfo], client: EngineClient) -> None:
    async def change(path: str, engine: int | None, body: WireModel) -> Response:
        """What each engine serves afterwards. Requests may name it at once, before any probe."""

        async def ask_one(replica: Replica[ModelInfo]) -> dict[str, Any]:
            replica.info = info = await client.change_adapters(replica.url, path, body)
            return {"id": info.id, "adapters": [adapter.model_dump() for adapter in info.adapters]}

        return await _ask_engines(engines, engine, ask_one)

    @router.post("/v1/load_lora_adapter")
    async def load(request: Request, engine: EngineNumber = None) -> Response:
        body = await read_json(request, LoadAdapterRequest, MAX_BODY_BYTES)
        return await change("/v1/load_lora_adapter", engine, body)

    @router.post("/v1/unload_lora_adapter")
    async def unload(request: Request, engine: EngineNumber = None) -> Response:
        body = await read_json(request, UnloadAdapterRequest, MAX_BODY_BYTES)
        return await change("/v1/unload_lora_adapter", engine, body)


async def _ask_engines(
    engines: Pool[ModelInfo], number: int | None, ask: Callable[[Replica[ModelInfo]], Awaitable[dict[str, Any]]]
) -> Response:
    """One engine's refusal stops no other: it stands in that engine's place, and its status is the answer's.

    number   the engine's, as the status page has it; None: every engine
    """
    replicas = [each for each in engines.replicas if number in (None, each.number)]
    if not replicas:
        raise NotFound(f"there is no text engine {number}" if number else "no text engine is known", param="engine")

    async def answer(replica: Replica[ModelInfo]) -> tuple[dict[str, Any], int]:
        try:
            return {"engine": replica.number, **await ask(replica)}, 200
        except DiptychError as error:
            return {"engine": replica.number, **error.to_body()}, error.status

    answers = await asyncio.gather(*map(answer, replicas))
    data = [body for body, _ in answers]
    status = max(status for _, status in answers)
    return Response(orjson.dumps({"object": "list", "data": data}), status, media_type="application/json")


def _closed(router: APIRouter) -> APIRouter:
    """The same paths, where nothing is done and no body is read."""

    async def closed(request: Request) -> Response:
        raise NotFound(
            f"there is no {request.method} {request.url.path} here: this gateway has no admin keys "
            "(DIPTYCH_GATEWAY_ADMIN_KEYS), and only they open it"
        )

    closed_router = APIRouter(include_in_schema=False)
    for route in router.routes:
        assert isinstance(route, APIRoute)
        closed_router.add_api_route(route.path, closed, methods=_METHODS)
    return closed_router
