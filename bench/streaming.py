"""What a streamed token costs beside its computing: CPU of the engine's event loop, and of the gateway.

  python -m bench.streaming [--streams 32] [--choices 1] [--step 0.03] [--seconds 10] [--logprobs]

A real engine with a tiny model whose steps are held back to `--step` seconds, so that the tokens of all streams come at
once, as a real model's do; a real gateway before it; both in processes of their own. Counted from when all streams run.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx

from bench.gateway import client, cpu_s, gateway, served

MAX_MODEL_LEN = 4096


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--streams", type=int, default=32, help="streams open at a time")
    options.add_argument("--choices", type=int, default=1, help="answers that each stream carries")
    options.add_argument("--step", type=float, default=0.03, help="seconds that the engine takes for a step, at least")
    options.add_argument("--seconds", type=float, default=10.0, help="how long to count")
    options.add_argument("--logprobs", action="store_true", help="ask for log-probabilities, five a token")
    given = options.parse_args()
    with (
        tempfile.TemporaryDirectory() as folder,
        served(serve_engine, folder, given.step) as engine_url,
        gateway(engine_url) as (url, gateway_pid),
    ):
        print(asyncio.run(measure(url, gateway_pid, engine_url, given)))


async def measure(url: str, gateway_pid: int, engine_url: str, given: argparse.Namespace) -> str:
    body: dict[str, Any] = {
        "messages": [{"role": "user", "content": "hi"}],
        "stream": True,
        "max_tokens": MAX_MODEL_LEN - 512,
        "ignore_eos": True,
        "temperature": 1.0,
        "n": given.choices,
    }
    if given.logprobs:
        body |= {"logprobs": True, "top_logprobs": 5}
    async with client(url) as http, client(engine_url) as engine_http:
        streams = [Stream(http, body) for _ in range(given.streams)]
        readers = [asyncio.create_task(stream.read()) for stream in streams]
        await asyncio.gather(*(stream.has_begun.wait() for stream in streams))
        counts = []
        for pause_s in (given.seconds, 0.0):
            num_frames = sum(stream.num_frames for stream in streams)
            engine_cpu_s = (await engine_http.get("/event_loop_cpu")).json()
            counts.append((num_frames, engine_cpu_s, cpu_s(gateway_pid)))
            await asyncio.sleep(pause_s)
        for reader in readers:
            reader.cancel()
        await asyncio.wait(readers)
    num_frames, engine_cpu_s, gateway_cpu_s = (after - before for before, after in zip(*counts, strict=True))
    return (
        f"{num_frames / given.seconds:.0f} tokens/s; CPU for each: engine's event loop "
        f"{engine_cpu_s / num_frames * 1e6:.1f} us, gateway {gateway_cpu_s / num_frames * 1e6:.1f} us"
    )


class Stream:
    """num_frames   that have come; nearly all of them are a token each"""

    def __init__(self, http: httpx.AsyncClient, body: dict[str, Any]) -> None:
        self.num_frames = 0
        self.has_begun = asyncio.Event()
        self._http = http
        self._body = body

    async def read(self) -> None:
        async with self._http.stream("POST", "/v1/chat/completions", json=self._body) as response:
            response.raise_for_status()
            async for chunk in response.aiter_raw():
                self.num_frames += chunk.count(b"\n\n")
                self.has_begun.set()


def serve_engine(port: int, folder: str, step_s: float) -> None:
    from services.text_engine.app import create_app  # late: whoever only measures needs none of it
    from services.text_engine.config import TextEngineSettings
    from shared.panel import serve_panel
    from tests.checkpoints import TINY_TEXT, write_checkpoint

    TINY_TEXT["max_position_embeddings"] = MAX_MODEL_LEN
    settings = TextEngineSettings(
        model=str(write_checkpoint("llama", Path(folder))),
        device="cpu",
        dtype="float32",
        kv_cache_memory="256MiB",
        num_threads=1,
        max_num_seqs=256,
        port=port,
        redis_url=None,
        log_level="warning",
    )
    app = create_app(settings)

    @app.get("/event_loop_cpu")
    async def event_loop_cpu() -> float:
        hold_back(app.state.service._built.engine, step_s)
        return time.thread_time()

    serve_panel(app, settings)


def hold_back(engine: Any, step_s: float) -> None:
    """Make every step take so long, from the first call on."""
    if "step" in vars(engine):
        return
    step = engine.step

    def slow_step() -> Any:
        began_at = time.monotonic()
        outputs = step()
        time.sleep(max(0.0, began_at + step_s - time.monotonic()))
        return outputs

    engine.step = slow_step


if __name__ == "__main__":
    main()
