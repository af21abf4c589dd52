"""The vision encoder's processes: decode workers that die, start, drain and end of the service."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import numpy as np
import pytest

from services.vision_encoder.app import create_app
from services.vision_encoder.config import VisionEncoderSettings
from tests.conftest import CheckpointFactory
from tests.encoders import NUM_TOKENS, Replica, png, refusal, running, wait_until
from tests.ports import free_port
from tests.scripted import serve


@pytest.fixture
def folder(checkpoint: CheckpointFactory) -> Path:
    return checkpoint("llava_clip_llama")


@pytest.fixture
async def replica(folder: Path) -> AsyncIterator[Replica]:
    """Without Redis."""
    async with running(folder) as opened:
        yield opened


# --- decode workers ---------------------------------------------------------------------------------------------------


async def test_a_decode_worker_that_died_idle_is_replaced_without_failing_an_image(replica: Replica) -> None:
    [pid] = replica.encoder._pool.pids
    os.kill(pid, signal.SIGKILL)
    await asyncio.sleep(0.2)
    await replica.encoded(png(11))
    assert replica.encoder._pool.pids != [pid]


async def test_a_decode_worker_that_dies_or_hangs_fails_its_one_image(folder: Path) -> None:
    async with running(folder, decode_timeout_s=0.5) as replica:
        for seed, sent in enumerate((signal.SIGSTOP, signal.SIGKILL), start=4000):
            [pid] = replica.encoder._pool.pids
            os.kill(pid, signal.SIGSTOP)
            encoding = asyncio.create_task(replica.encode(png(seed)))
            await asyncio.sleep(0.2)
            os.kill(pid, sent)
            _, failed = await encoding
            assert failed["error"]["code"] == "encode_failed"
            await replica.encoded(png(seed))
            await wait_until(lambda old=pid: replica.encoder._pool.pids not in ([], [old]))


async def test_health_answers_quickly_while_large_images_are_decoded(replica: Replica) -> None:
    large = [png(seed, size=(1536, 2170)) for seed in range(6)]
    encodes = [asyncio.create_task(replica.encoded(data)) for data in large]
    waits = []
    while not all(task.done() for task in encodes):
        started = time.monotonic()
        assert (await replica.http.get("/health")).status_code == 200
        waits.append(time.monotonic() - started)
        await asyncio.sleep(0.02)
    await asyncio.gather(*encodes)
    assert np.percentile(waits, 95) < 0.3


# --- start and end ----------------------------------------------------------------------------------------------------


async def test_a_model_that_cannot_be_loaded_is_said_by_every_probe(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["OtherModel"]}')
    app = create_app(VisionEncoderSettings(model=tmp_path))
    with serve(app) as url:
        async with httpx.AsyncClient(base_url=url) as http:
            await wait_until(lambda: app.state.service.load_error is not None)
            for path in ("/ready", "/health"):
                response = await http.get(path)
                assert response.status_code == 503
                assert "OtherModel is not supported; supported: LlavaForConditionalGeneration" in response.text
            response = await http.post("/v1/encode", content=png())
            assert refusal(response) == (503, "not_ready")


async def test_while_draining_new_images_are_refused_and_running_ones_finish(replica: Replica) -> None:
    data = png(14)
    with replica.held_tower():
        encoding = asyncio.create_task(replica.encoded(data))
        await wait_until(lambda: len(replica.encoder._flights) == 1)
        replica.app.state.service.is_draining = True
        response = await replica.http.get("/ready")
        assert response.status_code == 503
        assert int(response.headers["Retry-After"]) >= 1
        assert refusal(await replica.http.post("/v1/encode", content=png(15))) == (503, "not_ready")
    await encoding
    assert (await replica.embedding(data)).shape == (NUM_TOKENS, 64)


async def test_a_tower_pass_that_does_not_end_turns_readiness_off_and_gives_its_pictures_up(folder: Path) -> None:
    async with running(folder, stall_timeout_s=1.0) as replica:
        with replica.held_tower():
            encodes = [asyncio.create_task(replica.encode(png(seed))) for seed in (16, 17)]
            await wait_until(lambda: replica.encoder.num_flights == 2)
            fetching = asyncio.create_task(replica.http.get(f"/v1/embeddings/{replica.key(png(16))}"))
            await wait_until(lambda: replica.app.state.service.why_not_ready() is not None)
            response = await replica.http.get("/ready")
            assert response.status_code == 503
            assert "pass of the tower" in response.text
            for admitted, failed in await asyncio.gather(*encodes):
                assert admitted["event"] == "admitted"
                assert failed["error"]["code"] == "not_ready"
                assert "pass of the tower" in failed["error"]["message"]
            assert refusal(await fetching) == (503, "not_ready")
            assert replica.metric("encoder_queued_images") == 0
        await wait_until(lambda: replica.app.state.service.why_not_ready() is None)
        await replica.encoded(png(16))


async def test_of_a_requests_pictures_the_tower_takes_earlier_ones_first(folder: Path) -> None:
    order: list[str] = []

    async with running(folder, max_batch_size=1) as replica:

        async def encode(name: str, data: bytes, **headers: str) -> None:
            await replica.encode(data, **headers)
            order.append(name)

        with replica.held_tower():
            asking = [asyncio.create_task(encode("before", png(30)))]
            await wait_until(lambda: replica.encoder.busy_s > 0)
            for number in (2, 0, 1):
                headers = {"X-Request-ID": "one", "X-Image-Number": str(number)}
                asking.append(asyncio.create_task(encode(f"picture {number}", png(31 + number), **headers)))
                await wait_until(lambda: replica.encoder._batcher.num_waiting == len(asking) - 1)
        await asyncio.gather(*asking)
        assert order == ["before", "picture 0", "picture 1", "picture 2"]
        headers = {"X-Request-ID": "one", "X-Image-Number": "-1"}
        assert refusal(await replica.http.post("/v1/encode", content=png(), headers=headers)) == (400, "invalid_value")


SERVE = """
import sys
from services.vision_encoder.app import run
from services.vision_encoder.config import VisionEncoderSettings
run(VisionEncoderSettings(model=sys.argv[1], port=int(sys.argv[2]), num_decode_workers=1, num_threads=1))
"""


@asynccontextmanager
async def process(folder: Path) -> AsyncIterator[tuple[asyncio.subprocess.Process, httpx.AsyncClient]]:
    """The service as it runs in production: a process of its own, under `run`."""
    port = free_port()
    child = await asyncio.create_subprocess_exec(sys.executable, "-c", SERVE, str(folder), str(port))
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=30) as http:
        try:
            yield child, http
        finally:
            if child.returncode is None:
                child.kill()
            await child.wait()


def children(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


async def status(http: httpx.AsyncClient, path: str) -> int | None:
    try:
        return (await http.get(path)).status_code
    except httpx.TransportError:
        return None


async def test_sigterm_lets_the_running_encode_finish_and_leaves_no_process_behind(folder: Path) -> None:
    async with process(folder) as (child, http):
        while await status(http, "/ready") != 200:  # noqa: ASYNC110 - another process's state
            await asyncio.sleep(0.05)
        workers = children(child.pid)
        assert workers
        encoding = asyncio.create_task(http.post("/v1/encode", content=png(0, size=(3000, 2000))))
        await asyncio.sleep(0.05)
        child.send_signal(signal.SIGTERM)
        response = await encoding
        assert [json.loads(line)["event"] for line in response.text.splitlines()] == ["admitted", "encoded"]
        assert await asyncio.wait_for(child.wait(), timeout=15) == 0
        await wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in workers))


async def test_a_process_whose_model_cannot_be_loaded_ends_with_status_1(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["OtherModel"]}')
    async with process(tmp_path) as (child, _):
        assert await asyncio.wait_for(child.wait(), timeout=30) == 1


async def test_decode_workers_end_with_a_service_that_was_killed(folder: Path) -> None:
    async with process(folder) as (child, http):
        while await status(http, "/ready") != 200:  # noqa: ASYNC110 - another process's state
            await asyncio.sleep(0.05)
        workers = children(child.pid)
        child.kill()
        await wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in workers))
