"""Running vision encoders for tests: real sockets, real decode processes, a tiny checkpoint."""

from __future__ import annotations

import asyncio
import io
import json
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import torch
from fastapi import FastAPI
from PIL import Image

from services.vision_encoder.app import create_app
from services.vision_encoder.config import VisionEncoderSettings
from services.vision_encoder.encoder import Encoder
from shared.hashing import image_key
from shared.torch_io import blob_to_tensor
from tests.scripted import serve

NUM_TOKENS = 16  # of every picture, with the checkpoint "llava_clip_llama"


def png(seed: int = 0, size: tuple[int, int] = (60, 44)) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG", compress_level=1)
    return buffer.getvalue()


class Replica:
    """One running vision encoder and a client of it."""

    def __init__(self, app: FastAPI, url: str) -> None:
        self.app = app
        self.http = httpx.AsyncClient(base_url=url, timeout=30, limits=httpx.Limits(max_connections=None))

    @property
    def encoder(self) -> Encoder:
        encoder: Encoder = self.app.state.service.encoder
        return encoder

    @property
    def fingerprint(self) -> str:
        return self.encoder.fingerprint

    def key(self, data: bytes) -> str:
        return image_key(data, self.fingerprint)

    async def encode(self, data: bytes, **headers: str) -> list[dict[str, Any]]:
        response = await self.http.post("/v1/encode", content=data, headers=headers)
        assert response.status_code == 200, response.text
        return [json.loads(line) for line in response.text.splitlines()]

    async def encoded(self, data: bytes) -> dict[str, Any]:
        admitted, last = await self.encode(data)
        assert admitted["event"] == "admitted"
        assert last["event"] == "encoded", last
        return last

    async def embedding(self, data: bytes) -> torch.Tensor:
        response = await self.http.get(f"/v1/embeddings/{self.key(data)}")
        assert response.status_code == 200, response.text
        return blob_to_tensor(bytearray(response.content))

    def metric(self, name: str, **labels: str) -> float:
        return self.app.state.service.metrics.registry.get_sample_value(f"diptych:{name}", labels or None) or 0.0

    @property
    def num_tower_passes(self) -> float:
        return self.metric("encoder_tower_passes_total")

    @contextmanager
    def held_tower(self) -> Iterator[None]:
        """Keeps the tower's thread busy, so that a test decides when images are encoded."""
        gate, is_held = threading.Event(), threading.Event()

        def hold() -> None:
            is_held.set()
            gate.wait(30)

        self.encoder._batcher._thread.submit(hold)
        is_held.wait(10)
        try:
            yield
        finally:
            gate.set()


@asynccontextmanager
async def running(folder: Path, redis_url: str | None = None, **settings: Any) -> AsyncIterator[Replica]:
    fields = {"dtype": "float32", "num_threads": 1, "num_decode_workers": 1} | settings
    app = create_app(VisionEncoderSettings(model=folder, redis_url=redis_url, **fields))
    with serve(app) as url:
        replica = Replica(app, url)
        async with replica.http:
            await wait_until(lambda: app.state.service.why_not_ready() is None)
            yield replica


async def wait_until(condition: Callable[[], bool], timeout_s: float = 20.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110 - the condition is another thread's or process's
            await asyncio.sleep(0.01)


def refusal(response: httpx.Response) -> tuple[int, str]:
    return response.status_code, response.json()["error"]["code"]
