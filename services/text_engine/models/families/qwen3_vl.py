"""Qwen3-VL, dense and with experts: Qwen 3 with rotary positions in three coordinates, and pictures that its first
layers meet again (DeepStack).
"""

from __future__ import annotations

import dataclasses

from services.text_engine.models.config import Fields, ModelConfig
from services.text_engine.models.families.interface import Family
from services.text_engine.models.families.qwen import read_moe
from services.text_engine.models.families.text_config import Defaults, merge_token_ids, read_dtype, read_text_config
from services.text_engine.models.rope_config import read_sectioned_rope

QWEN3_VL_DEFAULTS = Defaults(
    intermediate_size=22016, vocab_size=151936, max_position_embeddings=128_000, num_kv_heads=32, head_dim=128
)
QWEN3_VL_MOE_DEFAULTS = Defaults(
    hidden_size=2048,
    intermediate_size=5632,
    num_layers=24,
    num_heads=16,
    num_kv_heads=16,
    vocab_size=151936,
    max_position_embeddings=128_000,
)
DEFAULT_THETA = 500_000.0
DEFAULT_SECTIONS = (24, 20, 20)
DEFAULT_DEEPSTACK_LAYERS = frozenset((8, 16, 24))


def _read_dense(fields: Fields) -> ModelConfig:
    return _read(fields, QWEN3_VL_DEFAULTS)


def _read_moe(fields: Fields) -> ModelConfig:
    config = _read(fields, QWEN3_VL_MOE_DEFAULTS)
    moe = read_moe(
        fields.nested("text_config"),
        config.num_layers,
        num_experts=60,
        num_experts_per_token=4,
        intermediate_size=1408,
    )
    # Whatever norm_topk_prob says: the reference does not read it.
    return dataclasses.replace(config, moe=dataclasses.replace(moe, normalizes=True))


def _read(fields: Fields, defaults: Defaults) -> ModelConfig:
    text, vision = fields.nested("text_config"), fields.nested("vision_config")
    bias = text.boolean("attention_bias", False)
    rope = read_sectioned_rope(text, DEFAULT_THETA, DEFAULT_SECTIONS, interleaved=True)
    config = read_text_config(text, defaults, rope)
    is_stated = "deepstack_visual_indexes" in vision
    layers = vision.layer_numbers("deepstack_visual_indexes") if is_stated else DEFAULT_DEEPSTACK_LAYERS
    return dataclasses.replace(
        config,
        qkv_bias=bias,
        output_bias=bias,
        qk_norm=True,
        num_deepstack_layers=len(layers),
        tie_word_embeddings=config.tie_word_embeddings or fields.boolean("tie_word_embeddings", False),
        image_token_id=fields.integer("image_token_id", 151655, minimum=0),
        eos_token_ids=merge_token_ids(fields.token_ids("eos_token_id"), config.eos_token_ids),
        dtype=read_dtype(fields) or config.dtype,
    )


QWEN3_VL = Family(
    "qwen3_vl",
    _read_dense,
    prefixes=(("model.language_model.", ""), ("lm_head.", "lm_head.")),
    ignored=("model.visual.",),
)
QWEN3_VL_MOE = dataclasses.replace(QWEN3_VL, model_type="qwen3_vl_moe", read_config=_read_moe)
