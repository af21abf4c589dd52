"""The engines' KV caches, for who runs them: numbers, reset, sleep and wake. Only where admin keys are set.

API keys do not open it, and admin keys open nothing else.
"""

from __future__ import annotations

from typing import Any, Final

from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from services.gateway.auth import Keyring
from services.gateway.backends import EngineClient
from services.gateway.balancer import Pool, Replica
from services.gateway.body import read_json
from services.gateway.engine_admin import EngineNumber, ask_engines
from services.gateway.lifecycle import Lifecycle
from shared.wire.engine import ModelInfo
from shared.wire.engine_admin import SleepRequest

MAX_BODY_BYTES: Final = 4096


class CacheAdmin:
    """Asks one engine, or all at once, and puts their words side by side."""

    def __init__(self, engines: Pool[ModelInfo], client: EngineClient) -> None:
        self._engines = engines
        self._client = client

    async def ask(self, method: str, path: str, engine: int | None, body: bytes = b"") -> Response:

        async def ask_one(replica: Replica[ModelInfo]) -> dict[str, Any]:
            state = await self._client.control_cache(method, f"{replica.url}{path}", body)
            if state.state == "asleep":
                replica.unreachable()  # until a probe finds it awake: nobody need try it first
            return state.model_dump()

        return await ask_engines(self._engines, engine, ask_one)


def cache_routes(admin: CacheAdmin, keyring: Keyring, lifecycle: Lifecycle) -> APIRouter:
    """keyring   must not be empty: an empty one lets everybody in"""

    async def check(request: Request) -> None:
        keyring.check(request.headers.get("authorization"))

    router = APIRouter(prefix="/v1", dependencies=[Depends(check)], include_in_schema=False)

    @router.get("/cache")
    async def numbers(engine: EngineNumber = None) -> Response:
        return await admin.ask("GET", "/v1/cache", engine)

    @router.post("/cache/reset")
    async def reset(engine: EngineNumber = None) -> Response:
        return await admin.ask("POST", "/v1/cache/reset", engine)

    @router.post("/sleep")
    async def sleep(request: Request, engine: EngineNumber = None) -> Response:
        body = await read_json(request, SleepRequest, MAX_BODY_BYTES, if_empty=SleepRequest())
        asking = admin.ask("POST", "/v1/sleep", engine, body.model_dump_json().encode())
        return await lifecycle.attend(request.receive, asking)

    @router.post("/wake")
    async def wake(engine: EngineNumber = None) -> Response:
        return await admin.ask("POST", "/v1/wake", engine)

    return router
