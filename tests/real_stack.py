"""A real gateway before real text engines with tiny models, all in this process on loopback sockets."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from fastapi import FastAPI

from services.gateway.app import create_app as create_gateway
from services.gateway.config import GatewaySettings
from services.text_engine.app import create_app as create_engine
from services.text_engine.config import TextEngineSettings
from services.text_engine.engine import Engine
from tests.gateway_stack import eventually
from tests.scripted import serve


@dataclass
class RealStack:
    """http   to the gateway"""

    http: httpx.Client
    engine_urls: list[str]
    engine_apps: list[FastAPI]

    def engine(self, index: int = 0) -> Engine:
        engine: Engine = self.engine_apps[index].state.service._built.engine
        return engine

    def num_ready_engines(self) -> int:
        count: int = self.http.get("/ready").json()["text_engines"]["ready"]
        return count


@contextmanager
def real_stack(
    folder: Path, *, num_engines: int = 1, engine: dict[str, Any] | None = None, **gateway: Any
) -> Iterator[RealStack]:
    options: dict[str, Any] = {
        "model": folder,
        "served_model_name": "tiny",
        "device": "cpu",
        "dtype": "float32",
        "kv_cache_memory": "8MiB",
        "num_threads": 1,
        "log_level": "warning",
        "redis_url": None,
    }
    with ExitStack() as stack:
        apps = [create_engine(TextEngineSettings(**(options | (engine or {})))) for _ in range(num_engines)]
        urls = [stack.enter_context(serve(app)) for app in apps]
        settings = GatewaySettings(text_engines=tuple(urls), vision_encoders=(), probe_interval_s=0.1, **gateway)
        url = stack.enter_context(serve(create_gateway(settings)))
        http = stack.enter_context(httpx.Client(base_url=url, timeout=30, trust_env=False))
        running = RealStack(http, urls, apps)
        eventually(lambda: running.num_ready_engines() == num_engines, within_s=60)
        yield running
