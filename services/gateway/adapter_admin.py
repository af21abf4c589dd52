"""LoRA adapters of the engines, for who runs them: loaded and unloaded by vLLM's paths. Only where admin keys are set.

API keys do not open it. What an engine may load from is its own setting.
"""

from __future__ import annotations

from typing import Any, Final

from fastapi import APIRouter, Depends, Request
from pydantic import BaseModel
from starlette.responses import Response

from services.gateway.auth import Keyring
from services.gateway.backends import EngineClient
from services.gateway.balancer import Pool, Replica
from services.gateway.body import read_json
from services.gateway.engine_admin import EngineNumber, ask_engines
from shared.wire.engine import ModelInfo
from shared.wire.engine_admin import LoadAdapterRequest, UnloadAdapterRequest

MAX_BODY_BYTES: Final = 4096


class AdapterAdmin:
    def __init__(self, engines: Pool[ModelInfo], client: EngineClient) -> None:
        self._engines = engines
        self._client = client

    async def change(self, path: str, body: BaseModel, engine: int | None) -> Response:
        """What each engine asked serves afterwards. Requests may name it at once, before any probe."""

        async def ask_one(replica: Replica[ModelInfo]) -> dict[str, Any]:
            info = await self._client.change_adapters(f"{replica.url}{path}", body.model_dump_json().encode())
            replica.info = info
            return {"id": info.id, "adapters": [adapter.model_dump() for adapter in info.adapters]}

        return await ask_engines(self._engines, engine, ask_one)


def adapter_routes(admin: AdapterAdmin, keyring: Keyring) -> APIRouter:
    """keyring   must not be empty: an empty one lets everybody in"""

    async def check(request: Request) -> None:
        keyring.check(request.headers.get("authorization"))

    router = APIRouter(prefix="/v1", dependencies=[Depends(check)], include_in_schema=False)

    @router.post("/load_lora_adapter")
    async def load(request: Request, engine: EngineNumber = None) -> Response:
        body = await read_json(request, LoadAdapterRequest, MAX_BODY_BYTES)
        return await admin.change("/v1/load_lora_adapter", body, engine)

    @router.post("/unload_lora_adapter")
    async def unload(request: Request, engine: EngineNumber = None) -> Response:
        body = await read_json(request, UnloadAdapterRequest, MAX_BODY_BYTES)
        return await admin.change("/v1/unload_lora_adapter", body, engine)

    return router
