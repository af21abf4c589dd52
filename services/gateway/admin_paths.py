"""The operators' paths of a gateway without admin keys: they do not exist, and say what would make them."""

from __future__ import annotations

from typing import Final

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from shared.errors import NotFound

_PATHS: Final = ("/cache", "/cache/reset", "/sleep", "/wake", "/load_lora_adapter", "/unload_lora_adapter")
_METHODS: Final = ["DELETE", "GET", "HEAD", "PATCH", "POST", "PUT"]


def closed_admin_routes() -> APIRouter:
    router = APIRouter(prefix="/v1", include_in_schema=False)

    async def closed(request: Request) -> Response:
        raise NotFound(
            f"there is no {request.method} {request.url.path} here: this gateway has no admin keys "
            "(DIPTYCH_GATEWAY_ADMIN_KEYS), and only they open it"
        )

    for path in _PATHS:
        router.add_api_route(path, closed, methods=_METHODS)
    return router
