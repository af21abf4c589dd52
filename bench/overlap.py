"""What it saves that the engine prefills picture i while picture i + 1 is being encoded: measured, and drawn.

  python -m bench.overlap [--pictures 1,2,4,8] [--rounds 9] [--encoder-threads 1] [--engine-threads 1] [--svg FILE]

One vision encoder and one text engine as processes of their own, a ViT-B/16 (196 rows a picture) and a text model of
SmolLM2-135M's shape, both with random weights, and no cache between them. This program stands in for the gateway and
asks in two orders, which take turns, each time with pictures never seen before:

  overlap   the engine is asked as soon as all pictures are admitted, as the gateway does
  wait      the engine is asked when all pictures are encoded

The figure is the time from the first picture's sending to the first token. The drawing shows one request of each order
with the largest number of pictures: decoding and encoding of each picture, every step of the engine, the first token.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import io
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import httpx
import numpy as np
import torch
import transformers
from PIL import Image

from bench.random_llava import Shape, write_checkpoint
from bench.vision import wait_until_ready
from bench.waterfall import Bar, Panel, draw
from diptych.machine import free_ports
from services.text_engine.app import run as run_engine
from services.text_engine.config import TextEngineSettings
from services.text_engine.engine import Engine
from services.text_engine.engine_io import EngineOutput
from shared.settings import load_settings
from shared.wire.common import StageSpan
from shared.wire.encoder import Encoded
from shared.wire.engine import GenerateRequest
from shared.wire.images import ImageRef

Order = Literal["overlap", "wait"]
SMOLLM2_135M = Shape(576, 1536, 30, 9, 3, 49152, image_rows=196)
SIZE = (640, 480)
QUESTION = "w1 w2 w3 w4 w5 w6 w7 w8"
CHAT_TEMPLATE = (
    "{% for message in messages %}{% for part in message['content'] %}"
    "{{ '<image>' if part['type'] == 'image' else part['text'] }}"
    "{% endfor %}{% endfor %}"
)
STOP_TIMEOUT_S = 30.0


@dataclass(slots=True)
class Request:
    """What happened, by time.monotonic(), which all processes of a machine share.

    pictures   per picture: when it was sent, and the encoder's word on its stages
    """

    order: Order
    began_at: float
    asked_at: float = 0.0
    first_token_at: float = 0.0
    ended_at: float = 0.0
    pictures: list[tuple[float, Encoded]] = field(default_factory=list)

    @property
    def first_token_s(self) -> float:
        return self.first_token_at - self.began_at


def main() -> None:
    if sys.argv[1:2] == ["engine"]:
        return _engine_process(Path(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4]))
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--pictures", default="1,2,4,8", help="per request")
    options.add_argument("--rounds", type=int, default=9)
    options.add_argument("--encoder-threads", type=int, default=1)
    options.add_argument("--engine-threads", type=int, default=1)
    options.add_argument("--svg", type=Path, help="write the drawing there")
    given = options.parse_args()
    counts = [int(count) for count in given.pictures.split(",")]
    with tempfile.TemporaryDirectory() as name:
        folder = write_model(Path(name) / "model")
        steps_file = Path(name) / "steps.jsonl"
        with (
            encoder_process(folder, given.encoder_threads) as encoder_url,
            engine_process(folder, steps_file, given.engine_threads) as engine_url,
        ):
            requests = asyncio.run(measure(encoder_url, engine_url, counts, given.rounds))
        steps = [json.loads(line) for line in steps_file.read_text().splitlines()]
    print(f"threads: encoder {given.encoder_threads}, engine {given.engine_threads}; medians of {given.rounds} rounds")
    for count in counts:
        print(summary(count, requests[count]))
    if given.svg:
        pair = typical_pair(requests[max(counts)])
        given.svg.write_text(draw([panel(request, steps) for request in pair]))
    return None


def summary(count: int, requests: Sequence[Request]) -> str:
    seconds = {order: [r.first_token_s for r in requests if r.order == order] for order in ("overlap", "wait")}
    saved = statistics.median(1 - a / b for a, b in zip(seconds["overlap"], seconds["wait"], strict=True))
    overlap, wait = (statistics.median(values) * 1000 for values in seconds.values())
    return (
        f"{count} new pictures: first token after {overlap:7.1f} ms overlapped, {wait:7.1f} ms one after the other "
        f"(median of the paired savings {saved:.0%})"
    )


def typical_pair(requests: Sequence[Request]) -> list[Request]:
    """Of each order the request with the median time."""
    pair = []
    for order in ("wait", "overlap"):
        ranked = sorted((r for r in requests if r.order == order), key=lambda request: request.first_token_s)
        pair.append(ranked[len(ranked) // 2])
    return pair


# --- requests ---------------------------------------------------------------------------------------------------------


async def measure(encoder_url: str, engine_url: str, counts: Sequence[int], rounds: int) -> dict[int, list[Request]]:
    """Per number of pictures: both orders, one after the other, in each round; who begins alternates."""
    found: dict[int, list[Request]] = {count: [] for count in counts}
    orders: tuple[Order, Order] = ("overlap", "wait")
    async with httpx.AsyncClient(timeout=120, trust_env=False) as http:
        for number in range(-1, rounds):  # the first round warms up
            for count in counts:
                for order in orders if number % 2 else orders[::-1]:
                    request = await ask(http, encoder_url, engine_url, [jpeg() for _ in range(count)], order)
                    if number >= 0:
                        found[count].append(request)
    return found


async def ask(
    http: httpx.AsyncClient, encoder_url: str, engine_url: str, images: Sequence[bytes], order: Order
) -> Request:
    request = Request(order, time.monotonic())
    refs: list[asyncio.Future[ImageRef]] = [asyncio.get_running_loop().create_future() for _ in images]
    encodes = [
        asyncio.create_task(encode(http, encoder_url, image, ref)) for image, ref in zip(images, refs, strict=True)
    ]
    admitted = await asyncio.gather(*refs)
    if order == "wait":
        await asyncio.gather(*encodes)
    request.asked_at = time.monotonic()
    content: list[dict[str, Any]] = [{"type": "image", "image": ref.model_dump()} for ref in admitted]
    content.append({"type": "text", "text": QUESTION})
    body = GenerateRequest.model_validate(
        {
            "request_id": uuid.uuid4().hex,
            "messages": [{"role": "user", "content": content}],
            "sampling": {"max_tokens": 1, "temperature": 0.0, "ignore_eos": True},
        }
    )
    async with http.stream("POST", f"{engine_url}/v1/generate", json=body.model_dump()) as response:
        async for line in response.aiter_lines():
            kind = json.loads(line).get("event")
            if kind not in ("started", "tokens", "finished"):
                raise SystemExit(f"the engine refused: {line}")
            if kind == "tokens" and not request.first_token_at:
                request.first_token_at = time.monotonic()
    request.ended_at = time.monotonic()
    request.pictures = await asyncio.gather(*encodes)
    return request


async def encode(
    http: httpx.AsyncClient, url: str, image: bytes, ref: asyncio.Future[ImageRef]
) -> tuple[float, Encoded]:
    sent_at = time.monotonic()
    async with http.stream("POST", f"{url}/v1/encode", content=image) as response:
        lines = response.aiter_lines()
        ref.set_result(ImageRef.model_validate(json.loads(await anext(lines))["image"]))
        return sent_at, Encoded.model_validate_json(await anext(lines))


def jpeg() -> bytes:
    """With the detail of a photograph; no two alike."""
    coarse = np.random.default_rng().integers(0, 256, (SIZE[1] // 16, SIZE[0] // 16, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(coarse).resize(SIZE, Image.Resampling.BICUBIC).save(buffer, "JPEG", quality=88)
    return buffer.getvalue()


# --- the drawing ------------------------------------------------------------------------------------------------------


def panel(request: Request, steps: Sequence[dict[str, float]]) -> Panel:
    num_pictures = len(request.pictures)
    lanes: list[tuple[str, list[Bar]]] = []
    for index, (sent_at, encoded) in enumerate(request.pictures):
        bars = [stage_bar(span, sent_at - request.began_at, index) for span in encoded.spans if span.stage != "store"]
        lanes.append((f"picture {index + 1}", bars))
    prefill = [
        Bar(
            step["started_at"] - request.began_at,
            step["ended_at"] - request.began_at,
            f"{step['num_tokens']:.0f}",
            min(int(step["start"] // SMOLLM2_135M.image_rows), num_pictures - 1),
        )
        for step in steps
        if request.began_at <= step["started_at"] <= request.ended_at
    ]
    lanes.append(("prefill (tokens)", prefill))
    title = {
        "overlap": f"{num_pictures} pictures, each prefilled while the next is encoded",
        "wait": f"{num_pictures} pictures, prefilled when all are encoded",
    }[request.order]
    return Panel(title, lanes, [(request.first_token_s, "first token")])


def stage_bar(span: StageSpan, offset_s: float, index: int) -> Bar:
    start = offset_s + span.start_s
    label = {"encode": "encode"}.get(span.stage, "")
    return Bar(start, start + span.duration_s, label, index if span.stage == "encode" else None, span.stage == "queue")


# --- the two panels ---------------------------------------------------------------------------------------------------


def write_model(folder: Path) -> Path:
    """The tower's and the projector's weights; the text model's are made up by the engine."""
    write_checkpoint(folder, SMOLLM2_135M)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["vision_config"] |= {
        "hidden_size": 768,
        "intermediate_size": 3072,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "image_size": 224,
        "patch_size": 16,
    }
    path.write_text(json.dumps(config))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": CHAT_TEMPLATE}))
    text = transformers.LlamaConfig(hidden_size=576, intermediate_size=64, num_hidden_layers=1, vocab_size=64)
    vision = transformers.CLIPVisionConfig(**config["vision_config"])
    model = transformers.LlavaForConditionalGeneration(
        transformers.LlavaConfig(vision_config=vision, text_config=text, image_token_index=63)
    )
    with tempfile.TemporaryDirectory() as scratch:  # its config.json is another one
        model.to(torch.bfloat16).save_pretrained(scratch)
        (Path(scratch) / "model.safetensors").rename(folder / "model.safetensors")
    transformers.CLIPImageProcessorPil(
        size={"shortest_edge": 224}, crop_size={"height": 224, "width": 224}
    ).save_pretrained(folder)
    return folder


@contextlib.contextmanager
def encoder_process(folder: Path, threads: int) -> Iterator[str]:
    [port] = free_ports(1)
    url = f"http://127.0.0.1:{port}"
    argv = [sys.executable, "-m", "diptych", "vision-encoder", str(folder), f"--port={port}", f"--public-url={url}"]
    with process([*argv, f"--num-threads={threads}"], threads):
        wait_until_ready(url)
        yield url


@contextlib.contextmanager
def engine_process(folder: Path, steps_file: Path, threads: int) -> Iterator[str]:
    [port] = free_ports(1)
    url = f"http://127.0.0.1:{port}"
    argv = [sys.executable, "-m", "bench.overlap", "engine", str(folder), str(steps_file), str(port)]
    with process(argv, threads):
        wait_until_ready(url)
        yield url


@contextlib.contextmanager
def process(argv: list[str], threads: int) -> Iterator[None]:
    env = os.environ | {"GOMP_SPINCOUNT": "2000", "OMP_NUM_THREADS": str(threads)}
    env.pop("REDIS_URL", None)
    child = subprocess.Popen(argv, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield
    finally:
        child.terminate()
        child.wait(STOP_TIMEOUT_S)


def _engine_process(folder: Path, steps_file: Path, port: int) -> None:
    """The text engine as it is, but for a note of each step: when it was, and which tokens it computed."""
    step = Engine.step

    with steps_file.open("w", buffering=1) as notes:

        def noted(engine: Engine) -> list[EngineOutput] | None:
            started_at = time.monotonic()
            outputs = step(engine)
            if outputs is not None:
                past = engine.past_steps[-1]
                note = {
                    "started_at": started_at,
                    "ended_at": time.monotonic(),
                    "start": past.scheduled[0].start,
                    "num_tokens": past.num_tokens,
                }
                notes.write(json.dumps(note) + "\n")
            return outputs

        Engine.step = noted  # type: ignore[method-assign]
        run_engine(load_settings(TextEngineSettings, model=folder, port=port, load_format="dummy"))


if __name__ == "__main__":
    main()
