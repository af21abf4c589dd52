"""Llama."""

from __future__ import annotations

import dataclasses

from services.text_engine.models.config import Fields, ModelConfig
from services.text_engine.models.families.interface import Family
from services.text_engine.models.families.text_config import Defaults, read_text_config

LLAMA_DEFAULTS = Defaults(intermediate_size=11008, vocab_size=32000, max_position_embeddings=2048)


def _read(fields: Fields) -> ModelConfig:
    bias = fields.boolean("attention_bias", False)
    config = read_text_config(fields, LLAMA_DEFAULTS)
    return dataclasses.replace(config, qkv_bias=bias, output_bias=bias, mlp_bias=fields.boolean("mlp_bias", False))


LLAMA = Family("llama", _read)
