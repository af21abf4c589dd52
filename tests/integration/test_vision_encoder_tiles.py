"""A vision encoder whose pictures have tiles: turned ones, and many shapes at once, over HTTP."""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncIterator

import pytest
import torch
from PIL import Image

from services.vision_encoder.families.interface import Family, PreparedImage
from services.vision_encoder.families.registry import load_family
from shared.wire.images import ImageRef
from tests.conftest import CheckpointFactory
from tests.encoders import Replica, png, running

SIZES = [(61, 47), (47, 61), (60, 190), (190, 60), (112, 56), (111, 57), (1, 1), (500, 19), (640, 480), (480, 640)]
TURNED_RIGHT = 6


@pytest.fixture
async def replica(checkpoint: CheckpointFactory) -> AsyncIterator[Replica]:
    async with running(checkpoint("llava_next_vicuna")) as opened:
        yield opened


@pytest.fixture(scope="module")
def family(checkpoint: CheckpointFactory) -> Family:
    loaded = load_family(checkpoint("llava_next_vicuna"))
    loaded.prepare_weights(torch.device("cpu"), torch.float32)
    return loaded


def rows_of(family: Family, data: bytes) -> torch.Tensor:
    image = Image.open(io.BytesIO(data))
    [rows] = family.encode([PreparedImage(torch.from_numpy(family.preprocessing.apply(image)), *image.size)])
    return rows


def with_orientation(data: bytes, orientation: int) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = orientation
    buffer = io.BytesIO()
    Image.open(io.BytesIO(data)).save(buffer, "PNG", exif=exif)
    return buffer.getvalue()


async def announced(replica: Replica, data: bytes) -> ImageRef:
    admitted, last = await replica.encode(data)
    assert last["event"] == "encoded", last
    return ImageRef.model_validate(admitted["image"])


async def test_pictures_of_many_shapes_at_once_each_get_their_own_rows(replica: Replica, family: Family):
    pictures = [png(seed, size) for seed, size in enumerate(SIZES)]
    with replica.held_tower():  # so that they all wait together and batches form
        refs = asyncio.gather(*(announced(replica, data) for data in pictures))
        await asyncio.sleep(0.5)
    for data, size, ref in zip(pictures, SIZES, await refs, strict=True):
        rows = await replica.embedding(data)
        assert (ref.num_tokens, ref.width, ref.height) == (len(rows), *size)
        assert (rows - rows_of(family, data)).abs().max() < 1e-4


async def test_a_turned_picture_is_cut_into_tiles_as_it_is_seen(replica: Replica, family: Family):
    """Case A1: the tiles and the rows announced are those of the upright picture."""
    stored = png(3, (190, 60))
    ref = await announced(replica, turned := with_orientation(stored, TURNED_RIGHT))
    assert (ref.width, ref.height) == (60, 190)
    buffer = io.BytesIO()
    Image.open(io.BytesIO(stored)).transpose(Image.Transpose.ROTATE_270).save(buffer, "PNG")
    rows = await replica.embedding(turned)
    assert ref.num_tokens == len(rows)
    assert (rows - rows_of(family, buffer.getvalue())).abs().max() < 1e-4
