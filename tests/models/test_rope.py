"""The tables of cosines and sines equal transformers' to the last bit."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from services.text_engine.models.config import Fields
from services.text_engine.models.rope import cos_sin_table
from services.text_engine.models.rope_config import read_rope
from tests.checkpoints import LINEAR_ROPE, LLAMA3_ROPE, YARN_ROPE

CPU = torch.device("cpu")
MAX_POSITIONS = 512


@pytest.mark.parametrize("head_dim", [16, 64, 128])
@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default", "rope_theta": 10000.0},
        {"rope_type": "default", "rope_theta": 1000000.0},
        LINEAR_ROPE,
        LLAMA3_ROPE,
        LLAMA3_ROPE | {"factor": 32.0, "rope_theta": 500000.0, "original_max_position_embeddings": 256},
        YARN_ROPE,
        YARN_ROPE | {"beta_fast": 16.0, "beta_slow": 2.0, "truncate": False},
        YARN_ROPE | {"attention_factor": 1.5},
        YARN_ROPE | {"mscale": 0.7, "mscale_all_dim": 1.3},
    ],
)
def test_the_table_is_transformers(rope: dict, head_dim: int):
    oracle = LlamaRotaryEmbedding(
        LlamaConfig(
            hidden_size=4 * head_dim,
            num_attention_heads=4,
            max_position_embeddings=MAX_POSITIONS,
            rope_parameters=dict(rope),
        )
    )
    cos, sin = oracle(torch.zeros(1), torch.arange(MAX_POSITIONS)[None])
    want = torch.cat((cos[0, :, : head_dim // 2], sin[0, :, : head_dim // 2]), dim=-1)
    fields = Fields({"rope_parameters": rope}, "config.json: ")
    table = cos_sin_table(read_rope(fields, MAX_POSITIONS), head_dim, MAX_POSITIONS, CPU)
    assert table.dtype == torch.float32
    torch.testing.assert_close(table, want, rtol=0, atol=0)
