"""config.json of vision-language models as the hub has them: what they leave out is what transformers assumes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import pytest
import torch
import transformers

from services.text_engine.models.config import ConfigError, LinearScaling, ModelConfig
from services.text_engine.models.load_config import load_model_config

# Only what differs from transformers' defaults is written there.
CONFIGS: Final[dict[str, dict[str, Any]]] = {
    "gemma-3-4b-it": {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "boi_token_index": 255999,
        "eoi_token_index": 256000,
        "eos_token_id": [1, 106],
        "image_token_index": 262144,
        "mm_tokens_per_image": 256,
        "model_type": "gemma3",
        "text_config": {
            "hidden_size": 2560,
            "intermediate_size": 10240,
            "model_type": "gemma3_text",
            "num_hidden_layers": 34,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
            "sliding_window": 1024,
        },
        "torch_dtype": "bfloat16",
        "vision_config": {
            "hidden_size": 1152,
            "image_size": 896,
            "intermediate_size": 4304,
            "model_type": "siglip_vision_model",
            "num_attention_heads": 16,
            "num_hidden_layers": 27,
            "patch_size": 14,
            "vision_use_head": False,
        },
    },
    "qwen2.5-vl-7b-instruct": {
        "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        "bos_token_id": 151643,
        "eos_token_id": 151645,
        "image_token_id": 151655,
        "hidden_act": "silu",
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "max_position_embeddings": 128000,
        "max_window_layers": 28,
        "model_type": "qwen2_5_vl",
        "num_attention_heads": 28,
        "num_hidden_layers": 28,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-06,
        "rope_theta": 1000000.0,
        "sliding_window": 32768,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "use_sliding_window": False,
        "vision_config": {"depth": 32, "hidden_size": 1280, "in_chans": 3, "out_hidden_size": 3584, "patch_size": 14},
        "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
        "vocab_size": 152064,
    },
    "pixtral-12b": {
        "architectures": ["LlavaForConditionalGeneration"],
        "image_seq_length": 1,
        "image_token_index": 10,
        "model_type": "llava",
        "text_config": {
            "head_dim": 128,
            "hidden_size": 5120,
            "intermediate_size": 14336,
            "max_position_embeddings": 1024000,
            "model_type": "mistral",
            "num_hidden_layers": 40,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-05,
            "rope_theta": 1000000000.0,
            "sliding_window": None,
            "vocab_size": 131072,
        },
        "torch_dtype": "bfloat16",
        "vision_config": {"head_dim": 64, "hidden_act": "silu", "image_size": 1024, "model_type": "pixtral"},
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": "full",
    },
    "mistral-small-3.1-24b": {
        "architectures": ["Mistral3ForConditionalGeneration"],
        "image_token_index": 10,
        "model_type": "mistral3",
        "spatial_merge_size": 2,
        "text_config": {
            "head_dim": 128,
            "hidden_size": 5120,
            "intermediate_size": 32768,
            "max_position_embeddings": 131072,
            "model_type": "mistral",
            "num_attention_heads": 32,
            "num_hidden_layers": 40,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-05,
            "rope_theta": 1000000000.0,
            "sliding_window": None,
            "vocab_size": 131072,
        },
        "torch_dtype": "bfloat16",
        "vision_config": {"head_dim": 64, "hidden_act": "silu", "image_size": 1540, "model_type": "pixtral"},
        "vision_feature_layer": -1,
    },
    "smolvlm-256m-instruct": {
        "architectures": ["Idefics3ForConditionalGeneration"],
        "image_token_id": 49190,
        "model_type": "idefics3",
        "scale_factor": 4,
        "text_config": {
            "head_dim": 64,
            "hidden_size": 576,
            "intermediate_size": 1536,
            "max_position_embeddings": 8192,
            "model_type": "llama",
            "num_attention_heads": 9,
            "num_hidden_layers": 30,
            "num_key_value_heads": 3,
            "rms_norm_eps": 1e-05,
            "rope_theta": 100000,
            "vocab_size": 49280,
        },
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "vision_config": {"hidden_size": 768, "image_size": 512, "model_type": "idefics3", "patch_size": 16},
    },
}


def loaded(folder: Path, fields: dict[str, Any]) -> ModelConfig:
    (folder / "config.json").write_text(json.dumps(fields))
    return load_model_config(folder)


@pytest.mark.parametrize("name", CONFIGS)
def test_every_shape_is_the_one_that_transformers_reads(tmp_path: Path, name: str):
    fields = CONFIGS[name]
    ours = loaded(tmp_path, fields)
    reference = transformers.AutoConfig.from_pretrained(tmp_path)
    text = reference.get_text_config()
    assert ours.dtype == "bfloat16"
    assert ours.image_token_id == reference.image_token_id
    for our_name, their_name in (
        ("hidden_size", "hidden_size"),
        ("intermediate_size", "intermediate_size"),
        ("num_layers", "num_hidden_layers"),
        ("num_heads", "num_attention_heads"),
        ("num_kv_heads", "num_key_value_heads"),
        ("vocab_size", "vocab_size"),
        ("rms_norm_eps", "rms_norm_eps"),
        ("max_position_embeddings", "max_position_embeddings"),
    ):
        assert getattr(ours, our_name) == getattr(text, their_name), our_name
    assert ours.head_dim == (getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads)
    layer_types = getattr(text, "layer_types", None) or ["full_attention"] * text.num_hidden_layers
    windows = [text.sliding_window if kind == "sliding_attention" else None for kind in layer_types]
    assert list(ours.sliding_windows) == windows


def test_gemma_has_two_bases_of_which_one_is_scaled(tmp_path: Path):
    ours = loaded(tmp_path, CONFIGS["gemma-3-4b-it"])
    assert (ours.rope.theta, ours.rope.scaling) == (1_000_000.0, LinearScaling(8.0))
    assert ours.local_rope is not None
    assert (ours.local_rope.theta, ours.local_rope.scaling) == (10_000.0, None)
    assert ours.tie_word_embeddings
    assert ours.eos_token_ids == (1, 106)
    assert (ours.attention_scale, ours.embedding_scale, ours.image_mark_id) == (256**-0.5, 2560**0.5, 255999)


def test_qwen2_5_vl_has_three_sections(tmp_path: Path):
    ours = loaded(tmp_path, CONFIGS["qwen2.5-vl-7b-instruct"])
    assert (ours.rope.theta, ours.rope.scaling, ours.rope.sections) == (1_000_000.0, None, (16, 24, 24))
    assert ours.qkv_bias
    assert not ours.tie_word_embeddings


@pytest.mark.parametrize(
    ("name", "change", "reason"),
    [
        ("qwen2.5-vl-7b-instruct", {"rope_scaling": {"type": "yarn", "factor": 4.0}}, "supported rope types"),
        ("qwen2.5-vl-7b-instruct", {"rope_scaling": {"type": "mrope", "mrope_section": [16, 24]}}, "mrope_section"),
        ("gemma-3-4b-it", {"text_config": {"final_logit_softcapping": 30.0}}, "final_logit_softcapping"),
        ("gemma-3-4b-it", {"text_config": {"sliding_window": 128}}, "mm_tokens_per_image"),
    ],
)
def test_what_the_decoder_does_not_do_stops_the_start(tmp_path: Path, name: str, change: dict[str, Any], reason: str):
    with pytest.raises(ConfigError, match=reason):
        loaded(tmp_path, CONFIGS[name] | change)


def test_a_tower_of_published_size_is_as_transformers_builds_it(tmp_path: Path):
    """The encoder's defaults, where vision_config is silent."""
    from services.vision_encoder.families import pixtral, qwen2_5_vl, smolvlm

    (tmp_path / "config.json").write_text(json.dumps({"model_type": "pixtral"}))
    for defaults, config in (
        (pixtral.TOWER_DEFAULTS, transformers.PixtralVisionConfig()),
        (qwen2_5_vl.TOWER_DEFAULTS, transformers.Qwen2_5_VLConfig().vision_config),
        (smolvlm.TOWER_DEFAULTS, transformers.SmolVLMConfig().vision_config),
        (smolvlm.TOWER_DEFAULTS, transformers.Idefics3Config().vision_config),
    ):
        for field, value in defaults.items():
            assert getattr(config, field) == value, (type(config).__name__, field)


def test_positions_of_published_tiles_are_the_references():
    """Where a tile has as many patches as there are positions, fp32 rounding decides which one each patch gets."""
    from services.vision_encoder.families.smolvlm import position_ids

    for side, grid in ((26, 26), (27, 27), (32, 32), (70, 26)):
        config = transformers.SmolVLMConfig().vision_config
        config.image_size, config.patch_size, config.hidden_size = side * 14, 14, 8
        embeddings = transformers.models.smolvlm.modeling_smolvlm.SmolVLMVisionEmbeddings(config)
        with torch.no_grad():
            embeddings.patch_embedding.weight.zero_()
            embeddings.patch_embedding.bias.zero_()
            pixels = torch.zeros(1, 3, grid * 14, grid * 14)
            rows = embeddings(pixels, torch.ones(1, grid, grid, dtype=torch.bool))[0]
            assert torch.equal(rows, embeddings.position_embedding.weight[position_ids(grid, side)])
