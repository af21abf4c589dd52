"""Passes of the tower as graphs, with a stand-in for CUDA's: padding changes nothing, outputs are not shared."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from PIL import Image

from services.vision_encoder.families.interface import PreparedImage
from services.vision_encoder.families.registry import load_family
from services.vision_encoder.pass_graphs import SIZES
from tests.conftest import CheckpointFactory


def noise(width: int, height: int, seed: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


class Rerun:
    """A `Capture` for any device: runs the function again, into the same memory, as a graph would."""

    def __init__(self) -> None:
        self.replayed: list[int] = []

    def record(self, run: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        output = run().clone()

        def replay() -> torch.Tensor:
            self.replayed.append(len(output))
            return output.copy_(run())

        return replay


@pytest.mark.parametrize("name", ["llava_clip_llama", "llava_next_vicuna", "gemma3", "smolvlm", "internvl"])
def test_graphs_give_the_rows_of_plain_passes(checkpoint: CheckpointFactory, name: str):
    family = load_family(checkpoint(name))
    family.prepare_weights(torch.device("cpu"), torch.float32)
    height, width = family.preprocessing.size
    one = family.preprocessing.apply(noise(width, height, seed=0))
    images = [
        PreparedImage(torch.from_numpy(family.preprocessing.apply(noise(width, height, seed))), width, height)
        for seed in range(11 // len(one) + 1)
    ]
    expected = {count: family.encode(images[:count]) for count in (1, len(images))}
    capture = Rerun()
    family.record_graphs(capture)
    for count, rows in expected.items():
        for actual, wanted in zip(family.encode(images[:count]), rows, strict=True):
            torch.testing.assert_close(actual, wanted, rtol=1e-5, atol=1e-5)
    assert capture.replayed[0] == next(size for size in SIZES if size >= len(one))


def test_a_later_pass_leaves_the_rows_of_an_earlier_one_alone(checkpoint: CheckpointFactory):
    family = load_family(checkpoint("llava_clip_llama"))
    family.prepare_weights(torch.device("cpu"), torch.float32)
    family.record_graphs(Rerun())
    height, width = family.preprocessing.size
    first, second = (
        PreparedImage(torch.from_numpy(family.preprocessing.apply(noise(width, height, seed))), width, height)
        for seed in (1, 2)
    )
    [rows] = family.encode([first])
    kept = rows.clone()
    family.encode([second])
    assert torch.equal(rows, kept)
