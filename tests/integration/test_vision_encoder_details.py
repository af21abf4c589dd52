"""A vision encoder asked for low detail, and given embeddings in place of pictures, over HTTP."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
import torch
from safetensors.torch import save

from shared.hashing import embedding_key, image_key
from shared.row_codec import dequantize_rows
from shared.torch_io import blob_to_tensor
from shared.wire.encoder import DETAIL_HEADER, IMAGE_KEY_HEADER, SAFETENSORS
from tests.conftest import CheckpointFactory
from tests.encoders import NUM_TOKENS, Replica, png, refusal, running

SLIVERS = [(1, 1), (3, 1), (1, 3), (499, 1), (1, 499), (3, 3), (500, 19), (19, 500), (2000, 3), (8192, 64)]
LOW_ROWS = 4 * 4 + 1


@pytest.fixture
async def replica(checkpoint: CheckpointFactory) -> AsyncIterator[Replica]:
    async with running(checkpoint("llava_next_vicuna"), accept_embeddings=True) as opened:
        yield opened


async def embedding(replica: Replica, key: str) -> torch.Tensor:
    response = await replica.http.get(f"/v1/embeddings/{key}")
    assert response.status_code == 200, response.text
    return blob_to_tensor(bytearray(response.content))


async def test_pixels_and_slivers_get_as_many_rows_as_any_picture(checkpoint: CheckpointFactory) -> None:
    """Cases A7, A8; a sliver beyond the stated ratio is refused by name, and the next picture is served."""
    async with running(checkpoint("llava_clip_llama"), max_aspect_ratio=700) as replica:
        for seed, size in enumerate(SLIVERS):
            admitted, last = await replica.encode(data := png(seed, size))
            assert last["event"] == "encoded", (size, last)
            assert admitted["image"]["num_tokens"] == NUM_TOKENS
            rows = await replica.embedding(data)
            assert rows.shape == (NUM_TOKENS, 64)
            assert torch.isfinite(rows).all()
        response = await replica.http.post("/v1/encode", content=png(99, (1403, 2)))
        assert refusal(response) == (400, "image_too_large")
        assert "at most 700 times" in response.text
        await replica.encoded(png(100))


async def test_each_detail_has_a_key_of_its_own(replica: Replica) -> None:
    """Case E5."""
    info = (await replica.http.get("/v1/info")).json()
    data = png(1, (190, 60))
    keys = {"high": image_key(data, info["fingerprint"]), "low": image_key(data, info["low_detail_fingerprint"])}
    for detail, key in keys.items():
        headers = {DETAIL_HEADER: detail, IMAGE_KEY_HEADER: key}
        for _ in range(2):
            admitted, last = await replica.encode(data, **headers)
            assert last["event"] == "encoded"
            assert admitted["image"]["image_key"] == key
        assert len(await embedding(replica, key)) == admitted["image"]["num_tokens"]
        assert (admitted["image"]["num_tokens"] == LOW_ROWS) == (detail == "low")
    assert keys["low"] != keys["high"]
    sizes = [{"width": 190, "height": 60, "detail": detail} for detail in ("low", "high", "auto")]
    described = (await replica.http.post("/v1/describe", json={"images": sizes})).json()["images"]
    high = len(await embedding(replica, keys["high"]))
    assert [image["num_tokens"] for image in described] == [LOW_ROWS, high, high]
    response = await replica.http.post("/v1/encode", content=data, headers={DETAIL_HEADER: "medium"})
    assert refusal(response) == (400, "invalid_value")


async def test_a_model_with_one_reading_says_so_and_gives_both_details_the_same(checkpoint: CheckpointFactory) -> None:
    async with running(checkpoint("llava_clip_llama")) as replica:
        assert (await replica.http.get("/v1/info")).json()["low_detail_fingerprint"] is None
        low, _ = await replica.encode(png(1), **{DETAIL_HEADER: "low"})
        high, _ = await replica.encode(png(1))
        assert low == high


@pytest.mark.parametrize("storage", ["exact", "int8"])
async def test_a_given_embedding_is_kept_as_if_it_were_made_here(checkpoint: CheckpointFactory, storage: str) -> None:
    async with running(checkpoint("llava_next_vicuna"), accept_embeddings=True, embedding_storage=storage) as replica:
        rows = torch.randn(LOW_ROWS, 64, generator=torch.Generator().manual_seed(3))
        file = save({"image_embeds": rows}, metadata={"width": "5", "height": "3", "detail": "low"})
        key = embedding_key(file, replica.fingerprint)
        passes = replica.num_tower_passes
        admitted, last = await replica.encode(file, **{"content-type": SAFETENSORS, IMAGE_KEY_HEADER: key})
        assert admitted["image"] == {
            "num_tokens": LOW_ROWS,
            "width": 5,
            "height": 3,
            "layout": [],
            "attention": "causal",
            "image_key": key,
        }
        assert last["event"] == "encoded"
        kept = await embedding(replica, key)
        if storage == "exact":
            assert torch.equal(kept, rows)
        else:
            assert (dequantize_rows(kept) - rows).abs().max() < rows.abs().max() / 200
        assert replica.num_tower_passes == passes
        assert replica.metric("encoder_images_total", outcome="given") == 1
        # The same bytes as a picture are none, whatever lies under the embedding's key.
        assert refusal(await replica.http.post("/v1/encode", content=file)) == (400, "unsupported_image_format")


async def test_embeddings_are_refused_unless_they_are_turned_on(checkpoint: CheckpointFactory) -> None:
    async with running(checkpoint("llava_clip_llama")) as replica:
        assert not (await replica.http.get("/v1/info")).json()["accepts_embeddings"]
        file = save({"image_embeds": torch.zeros(NUM_TOKENS, 64)})
        response = await replica.http.post("/v1/encode", content=file, headers={"content-type": SAFETENSORS})
        assert refusal(response) == (400, "unsupported_feature")
        assert "DIPTYCH_ENCODER_ACCEPT_EMBEDDINGS=true" in response.text


@pytest.mark.parametrize("end", [0, 1, 7, 8, 9, 60, 200, -1])
async def test_a_cut_embedding_is_refused_and_the_next_one_is_served(replica: Replica, end: int) -> None:
    rows: dict[str, Any] = {"image_embeds": torch.ones(LOW_ROWS, 64)}
    file = save(rows, metadata={"detail": "low"})
    headers = {"content-type": SAFETENSORS}
    response = await replica.http.post("/v1/encode", content=file[:end], headers=headers)
    assert refusal(response) == (400, "invalid_embedding")
    _, last = await replica.encode(file, **headers)
    assert last["event"] == "encoded"
