"""Feeds damaged images to the encoder's admission and decode processes, and says what came out and what it cost.

  python -m bench.mutated_images [--count 10000] [--seed 0] [--workers 1] [--max-pixels 4000000]

Each image takes the encoder's way: its header is read and held against the limits, then a worker process decodes and
preprocesses it. It must come out as pixels or as a refusal of the error tree. The exit status is 1 if one did not, if a
process died or was replaced, or if a good image is another one afterwards. Every image can be made again from its seed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from services.vision_encoder.admission import ImageLimits
from services.vision_encoder.decode_pool import DecodedImage, DecodePool
from services.vision_encoder.decode_worker import WorkerConfig
from services.vision_encoder.preprocessing.single_tile import SingleTile
from shared.errors import DiptychError, InvalidImage
from tests.mutated_images import good_images, mutated

PREPROCESSING = SingleTile(
    pad_colour=None,
    shortest_edge=56,
    resize_to=None,
    crop_to=(56, 56),
    resample=3,
    rescale_factor=1 / 255,
    mean=(0.5, 0.5, 0.5),
    std=(0.5, 0.5, 0.5),
)
WHITE = (255, 255, 255)
TIMEOUT_S = 20.0
WARM_UP = 100  # images before memory is looked at: codecs load and buffers grow to their size
MIB = 1 << 20


@dataclass(slots=True)
class Outcome:
    """What came of a number of images.

    refused    error code -> count
    wrong      neither pixels nor a refusal: what was done to the image, and what happened
    """

    num_decoded: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Resources:
    """Of the serving process and its workers, added up."""

    rss_bytes: int
    num_files: int
    pids: tuple[int, ...]

    @classmethod
    def of(cls, pool: DecodePool) -> Resources:
        pids = (os.getpid(), *sorted(pool.pids))
        pages = sum(int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in pids)
        num_files = sum(len(os.listdir(f"/proc/{pid}/fd")) for pid in pids)
        return cls(pages * os.sysconf("SC_PAGE_SIZE"), num_files, pids)


class Feeder:
    """One pool with its limits; any number of images through it."""

    def __init__(self, *, num_workers: int, max_pixels: int) -> None:
        config = WorkerConfig({"high": PREPROCESSING, "low": PREPROCESSING}, WHITE, max_pixels)
        self.pool = DecodePool(config, num_workers=num_workers, timeout_s=TIMEOUT_S)
        self._num_workers = num_workers
        self._limits = ImageLimits(max_bytes=20 * MIB, max_pixels=max_pixels, max_aspect_ratio=1000.0)

    async def decode(self, data: bytes) -> DecodedImage:
        """Raises the DiptychError that its sender would be told."""
        self._limits.check_size(len(data))
        return await self.pool.decode(data, self._limits.admit(data, PREPROCESSING))

    async def feed(self, seeds: Iterator[int]) -> Outcome:
        """As many at once as there are workers, and one more that waits."""
        files, outcome = good_images(), Outcome()

        async def take_turns() -> None:
            for seed in seeds:
                await self._one(*mutated(files, seed), outcome)

        await asyncio.gather(*(take_turns() for _ in range(self._num_workers + 1)))
        return outcome

    async def _one(self, story: str, data: bytes, outcome: Outcome) -> None:
        try:
            decoded = await self.decode(data)
        except InvalidImage as error:
            outcome.refused[error.code] += 1
        except DiptychError as error:  # the fault would be ours: a worker that died, or took too long
            outcome.wrong.append(f"{story}: {error.code}: {error.message}")
        except Exception as error:  # noqa: BLE001 - whatever it is, it is a finding
            outcome.wrong.append(f"{story}: {error!r}")
        else:
            if decoded.pixels.shape != (1, 3, *PREPROCESSING.size):
                outcome.wrong.append(f"{story}: pixels of shape {decoded.pixels.shape}")
            outcome.num_decoded += 1


async def run(num_images: int, first_seed: int, num_workers: int, max_pixels: int) -> bool:
    """Prints the figures; returns whether all is well."""
    feeder = Feeder(num_workers=num_workers, max_pixels=max_pixels)
    await feeder.pool.start()
    try:
        good = {name: data for name, data in good_images().items() if name != "tiff"}
        before_images = {name: (await feeder.decode(data)).pixels for name, data in good.items()}
        seeds = iter(range(first_seed, first_seed + num_images))
        warm = await feeder.feed(iter([next(seeds) for _ in range(min(WARM_UP, num_images))]))
        before, begun = Resources.of(feeder.pool), time.monotonic()
        outcome = await feeder.feed(seeds)
        seconds, after = time.monotonic() - begun, Resources.of(feeder.pool)
        changed = [
            name
            for name, data in good.items()
            if not np.array_equal((await feeder.decode(data)).pixels, before_images[name])
        ]
    finally:
        await feeder.pool.close()
    wrong = warm.wrong + outcome.wrong
    figures = {
        "images": num_images,
        "seconds": round(seconds, 1),
        "decoded": warm.num_decoded + outcome.num_decoded,
        "refused": dict(warm.refused + outcome.refused),
        "wrong": len(wrong),
        "rss_mib": [round(each.rss_bytes / MIB, 1) for each in (before, after)],
        "files": [before.num_files, after.num_files],
        "processes": [len(before.pids), len(after.pids)],
        "replaced_processes": len(set(before.pids) - set(after.pids)),
        "good_images_changed": changed,
    }
    print(json.dumps(figures, indent=2))
    print("\n".join(wrong))
    return not wrong and not changed and before.pids == after.pids


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--count", type=int, default=10_000)
    options.add_argument("--seed", type=int, default=0, help="of the first image; the others follow")
    options.add_argument("--workers", type=int, default=1)
    options.add_argument("--max-pixels", type=int, default=4_000_000)
    given = options.parse_args()
    if not asyncio.run(run(given.count, given.seed, given.workers, given.max_pixels)):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
