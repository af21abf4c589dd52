"""Gemma 3, its text model."""

from __future__ import annotations

import dataclasses

from services.text_engine.models.config import Fields, ModelConfig
from services.text_engine.models.families.interface import Family
from services.text_engine.models.families.text_config import Defaults, layer_windows, read_text_config
from services.text_engine.models.rope_config import read_layered_rope

GEMMA3_DEFAULTS = Defaults(
    hidden_size=2304,
    intermediate_size=9216,
    num_layers=26,
    num_heads=8,
    num_kv_heads=4,
    head_dim=256,
    vocab_size=262_208,
    max_position_embeddings=131_072,
)
# Gemma's names say what a norm follows; ours, what it is for.
GEMMA_NORMS = (
    (".post_attention_layernorm.", ".self_attn.output_norm."),
    (".pre_feedforward_layernorm.", ".post_attention_layernorm."),
    (".post_feedforward_layernorm.", ".mlp.output_norm."),
)


def _read(fields: Fields) -> ModelConfig:
    if fields.raw("hidden_activation") not in (None, "gelu_pytorch_tanh"):
        raise fields.error("hidden_activation", "supported: gelu_pytorch_tanh")
    for cap in ("attn_logit_softcapping", "final_logit_softcapping"):
        if cap in fields:
            raise fields.error(cap, "a cap on logits is not supported")
    if fields.boolean("use_bidirectional_attention", False):
        raise fields.error("use_bidirectional_attention", "an embedding model generates no text")
    bias = fields.boolean("attention_bias", False)
    max_positions = fields.integer("max_position_embeddings", GEMMA3_DEFAULTS.max_position_embeddings)
    rope, local_rope = read_layered_rope(fields, max_positions)
    config = read_text_config(fields, GEMMA3_DEFAULTS, rope)
    return dataclasses.replace(
        config,
        qkv_bias=bias,
        output_bias=bias,
        qk_norm=True,
        local_rope=local_rope,
        sliding_windows=_gemma_windows(fields, config.num_layers),
        output_norms=True,
        norm_offset=1.0,
        activation="gelu_tanh",
        embedding_scale=config.hidden_size**0.5,
        attention_scale=fields.number("query_pre_attn_scalar", 256) ** -0.5,
        tie_word_embeddings=fields.boolean("tie_word_embeddings", True),
    )


def _gemma_windows(fields: Fields, num_layers: int) -> tuple[int | None, ...]:
    """By default every sixth layer sees everything."""
    window = fields.integer("sliding_window", 4096)
    if "layer_types" in fields:
        return layer_windows(fields, window, num_layers, first_layer=0)
    period = fields.integer("sliding_window_pattern", 6)
    return tuple(None if (layer + 1) % period == 0 else window for layer in range(num_layers))


GEMMA3_TEXT = Family("gemma3_text", _read, renamed=GEMMA_NORMS)
