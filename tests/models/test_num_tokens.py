"""Case C4: the rows announced from a picture's header are the rows encoded, for every size."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from PIL import Image

from services.vision_encoder.families.interface import PreparedImage
from services.vision_encoder.families.registry import load_family
from tests.conftest import CheckpointFactory

EXTREMES = [(1, 1), (1, 499), (499, 1), (500, 19), (19, 500), (2000, 3), (8192, 64), (64, 8192)]
SIZES_PER_RUN = 60


def sizes() -> list[tuple[int, int]]:
    """Extremes, everything around the patch and image sizes, and a seeded draw from 1 to 2000."""
    around = list(itertools.product((13, 14, 15, 55, 56, 57), repeat=2))
    rng = random.Random(4)
    drawn = [(rng.randint(1, 64), rng.randint(1, 64)) for _ in range(SIZES_PER_RUN)]
    drawn += [(rng.randint(65, 2000), rng.randint(65, 2000)) for _ in range(SIZES_PER_RUN // 4)]
    return EXTREMES + around + drawn


@pytest.mark.parametrize(
    "name",
    [
        *("llava_clip_llama", "llava_clip_full", "llava_clip_several_layers", "llava_siglip_qwen2"),
        *("vip_llava", "llava_next_vicuna", "llava_next_siglip", "llava_onevision", "llava_onevision_max_2"),
    ],
)
def test_announced_rows_equal_encoded_rows_for_every_size(checkpoint: CheckpointFactory, name: str):
    family = load_family(checkpoint(name))
    family.prepare_weights(torch.device("cpu"), torch.float32)
    for width, height in sizes():
        picture = Image.new("RGB", (width, height), (width % 256, height % 256, 90))
        pixels = torch.from_numpy(family.preprocessing.apply(picture))
        [rows] = family.encode([PreparedImage(pixels, width, height)])
        assert rows.shape == (family.describe(width, height).num_tokens, family.hidden_size), (width, height)
