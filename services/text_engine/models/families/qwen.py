"""Qwen 2 and Qwen 3, dense and with experts."""

from __future__ import annotations

import dataclasses

from services.text_engine.models.config import Fields, ModelConfig, MoeConfig
from services.text_engine.models.families.interface import Family
from services.text_engine.models.families.text_config import Defaults, layer_windows, read_num_experts, read_text_config

QWEN2_DEFAULTS = Defaults(intermediate_size=22016, vocab_size=151936, max_position_embeddings=32768, num_kv_heads=32)
QWEN3_DEFAULTS = dataclasses.replace(QWEN2_DEFAULTS, head_dim=128)
QWEN2_MOE_DEFAULTS = Defaults(
    hidden_size=2048,
    intermediate_size=5632,
    num_layers=24,
    num_heads=16,
    num_kv_heads=16,
    vocab_size=151936,
    max_position_embeddings=32768,
)
QWEN3_MOE_DEFAULTS = dataclasses.replace(QWEN2_MOE_DEFAULTS, intermediate_size=6144, num_heads=32, num_kv_heads=4)


def _read_qwen2(fields: Fields) -> ModelConfig:
    config = read_text_config(fields, QWEN2_DEFAULTS)
    return dataclasses.replace(config, qkv_bias=True, sliding_windows=qwen_windows(fields, config.num_layers))


def _read_qwen3(fields: Fields) -> ModelConfig:
    bias = fields.boolean("attention_bias", False)
    config = read_text_config(fields, QWEN3_DEFAULTS)
    windows = qwen_windows(fields, config.num_layers)
    return dataclasses.replace(config, qkv_bias=bias, output_bias=bias, qk_norm=True, sliding_windows=windows)


def _read_qwen2_moe(fields: Fields) -> ModelConfig:
    config = read_text_config(fields, QWEN2_MOE_DEFAULTS)
    moe = read_moe(fields, config.num_layers, num_experts=60, num_experts_per_token=4, intermediate_size=1408)
    shared = fields.integer("shared_expert_intermediate_size", 5632)
    return dataclasses.replace(
        config,
        qkv_bias=fields.boolean("qkv_bias", True),
        moe=dataclasses.replace(moe, shared_intermediate_size=shared),
        sliding_windows=_qwen2_moe_windows(fields, config.num_layers),
    )


def _read_qwen3_moe(fields: Fields) -> ModelConfig:
    bias = fields.boolean("attention_bias", False)
    config = read_text_config(fields, QWEN3_MOE_DEFAULTS)
    return dataclasses.replace(
        config,
        qkv_bias=bias,
        output_bias=bias,
        qk_norm=True,
        moe=read_moe(fields, config.num_layers, num_experts=128, num_experts_per_token=8, intermediate_size=768),
        sliding_windows=(_qwen_window(fields),) * config.num_layers,
    )


def read_moe(
    fields: Fields, num_layers: int, *, num_experts: int, num_experts_per_token: int, intermediate_size: int
) -> MoeConfig:
    """The numbers are the family's defaults."""
    step = fields.integer("decoder_sparse_step", 1)
    ordinary = fields.layer_numbers("mlp_only_layers")
    return MoeConfig(
        layers=tuple(layer not in ordinary and (layer + 1) % step == 0 for layer in range(num_layers)),
        num_experts=read_num_experts(fields, num_experts),
        num_experts_per_token=fields.integer("num_experts_per_tok", num_experts_per_token),
        intermediate_size=fields.integer("moe_intermediate_size", intermediate_size),
        normalizes=fields.boolean("norm_topk_prob", False),
    )


def qwen_windows(fields: Fields, num_layers: int) -> tuple[int | None, ...]:
    """Only with `use_sliding_window`, and by default only from layer `max_window_layers` on."""
    first_layer = fields.integer("max_window_layers", 28, minimum=0)
    return layer_windows(fields, _qwen_window(fields), num_layers, first_layer)


def _qwen2_moe_windows(fields: Fields, num_layers: int) -> tuple[int | None, ...]:
    """By default every second layer below `max_window_layers`, the first one among them."""
    window = _qwen_window(fields)
    if "layer_types" in fields:
        return layer_windows(fields, window, num_layers, first_layer=0)
    end = fields.integer("max_window_layers", 28, minimum=0)
    return tuple(window if layer < end and layer % 2 == 0 else None for layer in range(num_layers))


def _qwen_window(fields: Fields) -> int | None:
    used = fields.boolean("use_sliding_window", False) and not fields.is_null("sliding_window")
    return fields.integer("sliding_window", 4096) if used else None


QWEN2 = Family("qwen2", _read_qwen2)
QWEN3 = Family("qwen3", _read_qwen3)
QWEN2_MOE = Family("qwen2_moe", _read_qwen2_moe)
QWEN3_MOE = Family("qwen3_moe", _read_qwen3_moe)
