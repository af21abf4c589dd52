"""One wish of an operator, at one text engine or at all of them at once, and their answers side by side."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Annotated, Any

import orjson
from fastapi import Query
from starlette.responses import Response

from services.gateway.balancer import Pool, Replica
from shared.errors import DiptychError, NotFound
from shared.wire.engine import ModelInfo

EngineNumber = Annotated[int | None, Query(ge=1, le=10**6)]


async def ask_engines(
    engines: Pool[ModelInfo], engine: int | None, ask: Callable[[Replica[ModelInfo]], Awaitable[dict[str, Any]]]
) -> Response:
    """engine   its number, as the status page has it; None: every one

    One engine's refusal keeps nobody from acting: it stands in its place, and its status is the answer's.
    """
    replicas = [each for each in engines.replicas if engine in (None, each.number)]
    if not replicas:
        raise NotFound(f"there is no text engine {engine}" if engine else "no text engine is known", param="engine")

    async def answer(replica: Replica[ModelInfo]) -> tuple[dict[str, Any], int]:
        try:
            return {"engine": replica.number, **await ask(replica)}, 200
        except DiptychError as error:
            return {"engine": replica.number, **error.to_body()}, error.status

    answers = await asyncio.gather(*map(answer, replicas))
    data = [body for body, _ in answers]
    status = max(status for _, status in answers)
    return Response(orjson.dumps({"object": "list", "data": data}), status, media_type="application/json")
