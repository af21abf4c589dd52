"""Damaged images through admission and real decode processes: pixels or a typed refusal, and nothing is left behind.

A few hundred here; `python -m bench.mutated_images` takes any number.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest

from bench.mutated_images import MIB, Feeder, Resources
from shared.errors import ImageTooLarge, InvalidImage, UnsupportedImageFormat
from tests.mutated_images import MUTATIONS, good_images, mutated

NUM_IMAGES = 400
CODES = {error.code for error in (InvalidImage, ImageTooLarge, UnsupportedImageFormat)}


@pytest.fixture
async def feeder() -> AsyncIterator[Feeder]:
    opened = Feeder(num_workers=1, max_pixels=1_000_000)
    await opened.pool.start()
    yield opened
    await opened.pool.close()


async def test_damaged_images_are_decoded_or_refused_and_good_ones_are_the_same_afterwards(feeder: Feeder):
    good = {name: data for name, data in good_images().items() if name != "tiff"}
    expected = {name: (await feeder.decode(data)).pixels for name, data in good.items()}
    await feeder.feed(iter(range(100)))  # codecs load, buffers grow to their size
    before = Resources.of(feeder.pool)
    outcome = await feeder.feed(iter(range(100, NUM_IMAGES)))
    after = Resources.of(feeder.pool)
    assert not outcome.wrong, "\n".join(outcome.wrong)
    assert outcome.num_decoded + sum(outcome.refused.values()) == NUM_IMAGES - 100
    assert outcome.num_decoded > 0  # a byte of colour more or less is another picture, not a broken one
    assert set(outcome.refused) == CODES
    assert after.pids == before.pids
    assert after.num_files == before.num_files
    assert after.rss_bytes - before.rss_bytes < 32 * MIB
    for name, data in good.items():
        assert np.array_equal((await feeder.decode(data)).pixels, expected[name]), name


async def test_a_closed_pool_leaves_neither_processes_nor_files():
    num_files = len(os.listdir("/proc/self/fd"))
    feeder = Feeder(num_workers=2, max_pixels=1_000_000)
    await feeder.pool.start()
    pids = feeder.pool.pids
    await feeder.feed(iter(range(1000, 1020)))
    await feeder.pool.close()
    await asyncio.sleep(0)  # transports close their pipes in the loop's next turn
    assert not any(map(is_running, pids))
    assert len(os.listdir("/proc/self/fd")) == num_files


def is_running(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def test_a_seed_makes_the_same_image_again_and_every_mutation_is_used():
    files = good_images()
    stories = [mutated(files, seed) for seed in range(NUM_IMAGES)]
    again = good_images()
    assert all(story == mutated(again, seed) for seed, story in enumerate(stories))
    told = " ".join(story for story, _ in stories).split()
    assert {mutation.__name__ for mutation in MUTATIONS} <= set(told)
    assert set(files) <= set(told)
