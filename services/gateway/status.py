"""The control room: what every replica is doing, looked at only while somebody watches, and once for all who do.

Shows numbers and shapes; no prompt, no key, no address passes here. Where API keys are set it asks for one.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from typing import Annotated, Any, Final, TypeVar

import httpx
import orjson
from fastapi import APIRouter, Query
from pydantic import ValidationError
from starlette.requests import Request
from starlette.responses import Response

from services.gateway.assets import SAFE_HEADERS, Assets
from services.gateway.auth import Keyring, needs_key
from services.gateway.balancer import Pool, Replica
from services.gateway.lifecycle import Lifecycle
from services.gateway.metrics import GatewayMetrics
from services.gateway.vision import Vision
from shared.embedding_cache import EmbeddingCache
from shared.state import EncoderState, EngineState
from shared.wire.common import WireModel
from shared.wire.encoder import EncoderInfo
from shared.wire.engine import ModelInfo

STATE_TIMEOUT_S: Final = 1.0
MAX_STATE_BYTES: Final = 1 << 20
MAX_REPLICAS: Final = 64
# What only one engine is shown with: a page draws one block map at a time.
DETAILS: Final = ("blocks", "sequences", "steps")
State = TypeVar("State", bound=WireModel)
Seen = tuple[Replica[Any], dict[str, Any] | None]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One look at all replicas.

    taken_at   by the clock that `ControlRoom` was given
    """

    taken_at: float
    engines: list[Seen]
    encoders: list[Seen]


class ControlRoom:
    """interval_s   a snapshot is shown for so long before another is taken"""

    def __init__(
        self,
        engines: Pool[ModelInfo],
        encoders: Pool[EncoderInfo],
        http: httpx.AsyncClient,
        *,
        gateway: Callable[[], dict[str, Any]],
        interval_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engines = engines
        self._encoders = encoders
        self._http = http
        self._gateway = gateway
        self._interval_s = interval_s
        self._clock = clock
        self._snapshot: asyncio.Task[Snapshot] | None = None
        self.num_snapshots = 0

    async def data(self, engine: int | None = None) -> dict[str, Any]:
        """engine   the number of the one to show in detail; None, or one that is not there: the first that can be"""
        snapshot = await self._latest()
        numbers = [replica.number for replica, state in snapshot.engines if state is not None]
        chosen = engine if engine in numbers else next(iter(numbers), None)
        return {
            "version": version("diptych"),
            "interval_s": self._interval_s,
            "taken_at": snapshot.taken_at,
            "engine": chosen,
            "gateway": self._gateway(),
            "replicas": [
                *(self._shown("text_engine", seen, detailed=seen[0].number == chosen) for seen in snapshot.engines),
                *(self._shown("vision_encoder", seen, detailed=True) for seen in snapshot.encoders),
            ],
        }

    async def _latest(self) -> Snapshot:
        task = self._snapshot
        if task is None or (task.done() and self._is_old(task)):
            task = self._snapshot = asyncio.create_task(self._take())
        return await asyncio.shield(task)

    def _is_old(self, task: asyncio.Task[Snapshot]) -> bool:
        """A look that failed is shown to those who waited for it, and to nobody later."""
        if task.cancelled() or task.exception() is not None:
            return True
        return self._clock() - task.result().taken_at >= self._interval_s

    async def _take(self) -> Snapshot:
        self.num_snapshots += 1
        engines, encoders = await asyncio.gather(
            self._look_at(self._engines.replicas, EngineState), self._look_at(self._encoders.replicas, EncoderState)
        )
        return Snapshot(self._clock(), engines, encoders)

    async def _look_at(self, replicas: list[Replica[Any]], kind: type[State]) -> list[Seen]:
        some = replicas[:MAX_REPLICAS]
        states = await asyncio.gather(*(self._state(replica, kind) for replica in some))
        return list(zip(some, states, strict=True))

    async def _state(self, replica: Replica[Any], kind: type[State]) -> dict[str, Any] | None:
        """None: it is not ready, did not answer in time, or is of a version that says nothing."""
        if not replica.ready:
            return None
        try:
            async with asyncio.timeout(STATE_TIMEOUT_S):
                answer = await self._http.get(f"{replica.url}/v1/state")
            if answer.status_code != httpx.codes.OK or len(answer.content) > MAX_STATE_BYTES:
                return None
            return kind.model_validate_json(answer.content).model_dump(mode="json")
        except (TimeoutError, httpx.HTTPError, ValidationError):
            return None

    def _shown(self, service: str, seen: Seen, *, detailed: bool) -> dict[str, Any]:
        replica, state = seen
        if state is not None and not detailed:
            few = {"blocks": {name: value for name, value in state["blocks"].items() if name != "cells"}}
            state = {name: value for name, value in state.items() if name not in DETAILS} | few
        return {
            "service": service,
            "number": replica.number,
            "ready": replica.ready,
            "problem": replica.problem,
            "reason": replica.reason,
            "ejected": replica.ejected_until > self._clock(),
            "outstanding": replica.outstanding,
            "state": state,
        }


def gateway_state(
    metrics: GatewayMetrics, lifecycle: Lifecycle, vision: Vision, cache: EmbeddingCache
) -> dict[str, Any]:
    """What the gateway knows of itself."""
    return {
        "num_in_flight": lifecycle.num_in_flight,
        "num_encodes": vision.num_in_flight,
        "is_draining": lifecycle.is_draining,
        "cache_is_up": cache.enabled and not cache.breaker_open,
        "images": dict(vision.sources),
        "outcomes": metrics.outcomes,
        "first_token": metrics.recent_first_token.percentiles(),
    }


def status_routes(room: ControlRoom, assets: Assets, keyring: Keyring) -> APIRouter:
    router = APIRouter(include_in_schema=False)

    @router.get("/status")
    async def page(request: Request) -> Response:
        return assets.answer("status.html", request)

    @router.get("/status/data", dependencies=[needs_key(keyring)])
    async def data(engine: Annotated[int | None, Query(ge=1, le=10**6)] = None) -> Response:
        headers = {**SAFE_HEADERS, "Cache-Control": "no-store"}
        return Response(orjson.dumps(await room.data(engine)), media_type="application/json", headers=headers)

    return router
