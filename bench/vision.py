"""Images per second of the vision encoder: the whole service against its tower alone and against a transformers loop.

  python -m bench.vision [--images 96] [--size 640x480] [--threads 1] [--dtype bfloat16]

One random ViT-B/16 with a LLaVA projector (or --model FOLDER), JPEG pictures that are all different, and three ways:

  transformers   open, preprocess, encode, one picture after the other, as its documentation shows; and in batches
  tower          the encoder's own tower on pictures that are decoded already: what no pipeline can beat
  service        a vision encoder process behind HTTP with 32 pictures under way: decoding in worker processes, batching

The tower has the same threads everywhere. Every figure is the median of the rounds; the three take turns.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import io
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import numpy as np
import torch
import transformers
from PIL import Image

from diptych.machine import free_ports
from services.vision_encoder.families.interface import Family, PreparedImage
from services.vision_encoder.families.registry import load_family

BATCH_SIZE = 16
UNDER_WAY = 32
START_TIMEOUT_S = 90.0
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--model", type=Path, help="a LLaVA folder instead of the random one")
    options.add_argument("--images", type=int, default=96)
    options.add_argument("--size", default="640x480")
    options.add_argument("--threads", type=int, default=1, help="of the tower")
    options.add_argument("--workers", type=int, default=1, help="decode processes of the service")
    options.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    options.add_argument("--rounds", type=int, default=3)
    given = options.parse_args()
    torch.set_num_threads(given.threads)
    width, height = map(int, given.size.split("x"))
    with contextlib.ExitStack() as stack:
        folder = given.model or random_llava(Path(stack.enter_context(tempfile.TemporaryDirectory())))
        url = stack.enter_context(service(folder, given.threads, given.workers, given.dtype))
        ways: dict[str, Callable[[list[bytes]], object]] = {
            "transformers, one by one": transformers_loop(folder, given.dtype, batch_size=1),
            f"transformers, batches of {BATCH_SIZE}": transformers_loop(folder, given.dtype, batch_size=BATCH_SIZE),
            f"tower alone, batches of {BATCH_SIZE}": tower_alone(folder, given.dtype),
            "service": lambda images: asyncio.run(through_service(url, images)),
        }
        rates: dict[str, list[float]] = {name: [] for name in ways}
        for number in range(given.rounds):
            for name, way in ways.items():
                images = jpegs(given.images, width, height, seed=1000 * number + len(rates[name]))
                begun = time.perf_counter()
                decoding_s = way(images) or 0.0
                rates[name].append(given.images / (time.perf_counter() - begun - float(decoding_s)))  # type: ignore[arg-type]
    print(f"{given.images} JPEG pictures of {given.size}, tower in {given.dtype} on {given.threads} thread(s)")
    for name, values in rates.items():
        print(f"{name:32} {statistics.median(values):7.1f} images/s   ({', '.join(f'{v:.1f}' for v in values)})")
    one_by_one, _, alone, whole = (statistics.median(values) for values in rates.values())
    print(f"service / tower alone: {whole / alone:.2f}; service / transformers one by one: {whole / one_by_one:.2f}")


def jpegs(count: int, width: int, height: int, seed: int) -> list[bytes]:
    """Pictures with the detail of photographs, about 0.15 bytes a pixel, no two alike."""
    generator = np.random.default_rng(seed)
    pictures = []
    for _ in range(count):
        coarse = generator.integers(0, 256, (height // 16, width // 16, 3), dtype=np.uint8)
        image = Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)
        buffer = io.BytesIO()
        image.save(buffer, "JPEG", quality=88)
        pictures.append(buffer.getvalue())
    return pictures


# --- the three ways ---------------------------------------------------------------------------------------------------


def transformers_loop(folder: Path, dtype: str, batch_size: int) -> Callable[[list[bytes]], None]:
    processor = transformers.AutoImageProcessor.from_pretrained(folder, backend="pil")
    model = transformers.LlavaForConditionalGeneration.from_pretrained(folder, dtype=DTYPES[dtype]).eval()

    @torch.inference_mode()
    def run(images: list[bytes]) -> None:
        for start in range(0, len(images), batch_size):
            batch = [Image.open(io.BytesIO(data)).convert("RGB") for data in images[start : start + batch_size]]
            pixels = processor(batch, return_tensors="pt")["pixel_values"].to(DTYPES[dtype])
            model.get_image_features(pixel_values=pixels)

    return run


def tower_alone(folder: Path, dtype: str) -> Callable[[list[bytes]], float]:
    family = load_family(folder)
    family.prepare_weights(torch.device("cpu"), DTYPES[dtype])

    def run(images: list[bytes]) -> float:
        """Returns the seconds spent on decoding, which do not count."""
        begun = time.perf_counter()
        prepared = [prepare(family, data) for data in images]
        decoding_s = time.perf_counter() - begun
        for start in range(0, len(prepared), BATCH_SIZE):
            family.encode(prepared[start : start + BATCH_SIZE])
        return decoding_s

    return run


def prepare(family: Family, data: bytes) -> PreparedImage:
    picture = Image.open(io.BytesIO(data)).convert("RGB")
    return PreparedImage(torch.from_numpy(family.preprocessing.apply(picture)), *picture.size)


async def through_service(url: str, images: list[bytes]) -> None:
    waiting = iter(images)
    limits = httpx.Limits(max_connections=None)

    async with httpx.AsyncClient(base_url=url, timeout=120, trust_env=False, limits=limits) as http:

        async def take_turns() -> None:
            for data in waiting:
                response = await http.post("/v1/encode", content=data)
                assert '"event":"encoded"' in response.text, response.text

        await asyncio.gather(*(take_turns() for _ in range(UNDER_WAY)))


# --- what is measured -------------------------------------------------------------------------------------------------


def random_llava(folder: Path) -> Path:
    """ViT-B/16 at 224 x 224 and a projector to 2048, with a text model that is there for the format only."""
    config = transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(
            hidden_size=768, intermediate_size=3072, num_hidden_layers=12, num_attention_heads=12, patch_size=16
        ),
        text_config=transformers.LlamaConfig(
            hidden_size=2048, intermediate_size=64, num_hidden_layers=1, num_attention_heads=16, vocab_size=64
        ),
        image_token_index=63,
    )
    transformers.LlavaForConditionalGeneration(config).to(torch.bfloat16).save_pretrained(folder)
    transformers.CLIPImageProcessorPil(
        size={"shortest_edge": 224}, crop_size={"height": 224, "width": 224}
    ).save_pretrained(folder)
    return folder


@contextlib.contextmanager
def service(folder: Path, threads: int, workers: int, dtype: str) -> Iterator[str]:
    [port] = free_ports(1)
    argv = [
        sys.executable,
        "-m",
        "diptych",
        "vision-encoder",
        str(folder),
        f"--port={port}",
        f"--dtype={dtype}",
    ]
    argv += [f"--num-threads={threads}", f"--num-decode-workers={workers}", f"--max-batch-size={BATCH_SIZE}"]
    env = os.environ | {"GOMP_SPINCOUNT": "2000", "OMP_NUM_THREADS": str(threads)}
    env.pop("REDIS_URL", None)
    process = subprocess.Popen(argv, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"
    try:
        wait_until_ready(url)
        yield url
    finally:
        process.terminate()
        process.wait(30)


def wait_until_ready(url: str) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(f"{url}/ready", trust_env=False).status_code == 200:
                return
        time.sleep(0.2)
    raise SystemExit(f"the vision encoder did not become ready within {START_TIMEOUT_S:g} s")


if __name__ == "__main__":
    main()
