"""Mistral, and Mixtral, whose layers have experts."""

from __future__ import annotations

import dataclasses

from services.text_engine.models.config import Fields, ModelConfig, MoeConfig
from services.text_engine.models.families.interface import Family
from services.text_engine.models.families.text_config import Defaults, layer_windows, read_num_experts, read_text_config
from services.text_engine.models.rope_config import read_rope

MISTRAL_DEFAULTS = Defaults(
    intermediate_size=14336, vocab_size=32000, max_position_embeddings=4096 * 32, num_kv_heads=8
)
MIXTRAL_DEFAULTS = dataclasses.replace(MISTRAL_DEFAULTS, rms_norm_eps=1e-5)
MIXTRAL_NAMES = (
    (".block_sparse_moe.", ".mlp."),
    (".w1.", ".gate_proj."),
    (".w3.", ".up_proj."),
    (".w2.", ".down_proj."),
)


def _read_mistral(fields: Fields) -> ModelConfig:
    config = read_text_config(fields, MISTRAL_DEFAULTS)
    window = None if fields.is_null("sliding_window") else fields.integer("sliding_window", 4096)
    return dataclasses.replace(config, sliding_windows=layer_windows(fields, window, config.num_layers, first_layer=0))


def _read_mixtral(fields: Fields) -> ModelConfig:
    max_positions = fields.integer("max_position_embeddings", MIXTRAL_DEFAULTS.max_position_embeddings)
    config = read_text_config(fields, MIXTRAL_DEFAULTS, read_rope(fields, max_positions, default_theta=1e6))
    window = fields.integer("sliding_window") if "sliding_window" in fields else None
    moe = MoeConfig(
        layers=(True,) * config.num_layers,
        num_experts=read_num_experts(fields, 8),
        num_experts_per_token=fields.integer("num_experts_per_tok", 2),
        intermediate_size=config.intermediate_size,
        normalizes=True,
    )
    return dataclasses.replace(config, moe=moe, sliding_windows=(window,) * config.num_layers)


MISTRAL = Family("mistral", _read_mistral)
MIXTRAL = Family("mixtral", _read_mixtral, renamed=MIXTRAL_NAMES)
