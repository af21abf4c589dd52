"""config.json of vision-language models as the hub has them: what they leave out is what transformers assumes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import pytest
import torch
import transformers

from services.text_engine.models.config import ConfigError, LinearScaling, ModelConfig, MoeConfig, RopeConfig
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
    "internvl3-8b-hf": {
        "architectures": ["InternVLForConditionalGeneration"],
        "downsample_ratio": 0.5,
        "image_seq_length": 256,
        "image_token_id": 151667,
        "model_type": "internvl",
        "projector_hidden_act": "gelu",
        "text_config": {
            "architectures": ["Qwen2ForCausalLM"],
            "eos_token_id": 151645,
            "hidden_size": 3584,
            "intermediate_size": 18944,
            "max_position_embeddings": 32768,
            "max_window_layers": 70,
            "model_type": "qwen2",
            "num_attention_heads": 28,
            "num_hidden_layers": 28,
            "num_key_value_heads": 4,
            "rms_norm_eps": 1e-06,
            "rope_scaling": {"factor": 2.0, "rope_type": "dynamic", "type": "dynamic"},
            "rope_theta": 1000000.0,
            "sliding_window": None,
            "use_sliding_window": False,
            "vocab_size": 151674,
        },
        "torch_dtype": "bfloat16",
        "vision_config": {"attention_bias": True, "image_size": [448, 448], "model_type": "internvl_vision"},
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": "default",
    },
    "internvl2_5-8b-mpo-hf": {
        "architectures": ["InternVLForConditionalGeneration"],
        "image_token_id": 92546,
        "model_type": "internvl",
        "text_config": {
            "architectures": ["InternLM2ForCausalLM"],
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "max_position_embeddings": 32768,
            "model_type": "llama",
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-05,
            "rope_scaling": {"factor": 2.0, "rope_type": "dynamic", "type": "dynamic"},
            "rope_theta": 1000000,
            "vocab_size": 92553,
        },
        "torch_dtype": "bfloat16",
        "vision_config": {"attention_bias": True, "model_type": "internvl_vision"},
    },
    "qwen2-vl-2b-instruct": {
        "architectures": ["Qwen2VLForConditionalGeneration"],
        "bos_token_id": 151643,
        "eos_token_id": 151645,
        "image_token_id": 151655,
        "hidden_act": "silu",
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "max_position_embeddings": 32768,
        "max_window_layers": 28,
        "model_type": "qwen2_vl",
        "num_attention_heads": 12,
        "num_hidden_layers": 28,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-06,
        "rope_theta": 1000000.0,
        "sliding_window": 32768,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "use_sliding_window": False,
        "vision_config": {"depth": 32, "embed_dim": 1280, "hidden_size": 1536, "in_chans": 3, "spatial_patch_size": 14},
        "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
        "vocab_size": 151936,
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
    "qwen3-vl-4b-instruct": {
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "image_token_id": 151655,
        "model_type": "qwen3_vl",
        "text_config": {
            "attention_bias": False,
            "dtype": "bfloat16",
            "eos_token_id": 151645,
            "head_dim": 128,
            "hidden_size": 2560,
            "intermediate_size": 9728,
            "max_position_embeddings": 262144,
            "model_type": "qwen3_vl_text",
            "num_attention_heads": 32,
            "num_hidden_layers": 36,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-06,
            "rope_scaling": {"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"},
            "rope_theta": 5000000,
            "tie_word_embeddings": True,
            "vocab_size": 151936,
        },
        "tie_word_embeddings": True,
        "vision_config": {
            "deepstack_visual_indexes": [5, 11, 17],
            "depth": 24,
            "hidden_size": 1024,
            "intermediate_size": 4096,
            "model_type": "qwen3_vl",
            "out_hidden_size": 2560,
        },
    },
    "qwen3-vl-30b-a3b-instruct": {
        "architectures": ["Qwen3VLMoeForConditionalGeneration"],
        "image_token_id": 151655,
        "model_type": "qwen3_vl_moe",
        "text_config": {
            "dtype": "bfloat16",
            "head_dim": 128,
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "max_position_embeddings": 262144,
            "mlp_only_layers": [],
            "model_type": "qwen3_vl_moe_text",
            "moe_intermediate_size": 768,
            "norm_topk_prob": True,
            "num_attention_heads": 32,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "num_hidden_layers": 48,
            "num_key_value_heads": 4,
            "rope_scaling": {"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"},
            "rope_theta": 5000000,
        },
        "tie_word_embeddings": False,
        "vision_config": {"model_type": "qwen3_vl_moe", "out_hidden_size": 2048},
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


@pytest.mark.parametrize(("name", "is_tied"), [("qwen2-vl-2b-instruct", True), ("qwen2.5-vl-7b-instruct", False)])
def test_qwen2_vl_and_qwen2_5_vl_have_three_sections(tmp_path: Path, name: str, is_tied: bool):
    ours = loaded(tmp_path, CONFIGS[name])
    assert (ours.rope.theta, ours.rope.scaling, ours.rope.sections) == (1_000_000.0, None, (16, 24, 24))
    assert ours.qkv_bias
    assert ours.tie_word_embeddings == is_tied


def test_qwen3_vl_interleaves_three_sections_and_adds_pictures_to_three_layers(tmp_path: Path):
    ours = loaded(tmp_path, CONFIGS["qwen3-vl-4b-instruct"])
    assert ours.rope == RopeConfig(5_000_000.0, sections=(24, 20, 20), interleaved=True)
    assert (ours.num_deepstack_layers, ours.num_row_parts) == (3, 4)
    assert ours.qk_norm
    assert ours.tie_word_embeddings
    assert ours.eos_token_ids == (151645,)


def test_the_experts_of_qwen3_vl_are_those_that_transformers_reads(tmp_path: Path):
    ours = loaded(tmp_path, CONFIGS["qwen3-vl-30b-a3b-instruct"])
    assert ours.moe == MoeConfig(
        layers=(True,) * 48, num_experts=128, num_experts_per_token=8, intermediate_size=768, normalizes=True
    )
    assert ours.num_row_parts == 4
    assert not ours.tie_word_embeddings


@pytest.mark.parametrize("kind", ["Qwen3VL", "Qwen3VLMoe"])
def test_a_silent_config_of_qwen3_vl_means_what_transformers_assumes(tmp_path: Path, kind: str):
    ours = loaded(tmp_path, {"architectures": [f"{kind}ForConditionalGeneration"]})
    reference = getattr(transformers, f"{kind}Config")()
    text = reference.text_config
    assert (ours.hidden_size, ours.intermediate_size, ours.head_dim) == (
        text.hidden_size,
        text.intermediate_size,
        text.head_dim,
    )
    assert (ours.num_layers, ours.num_heads, ours.num_kv_heads) == (
        text.num_hidden_layers,
        text.num_attention_heads,
        text.num_key_value_heads,
    )
    assert (ours.vocab_size, ours.max_position_embeddings) == (text.vocab_size, text.max_position_embeddings)
    assert (ours.rope.theta, ours.rope.sections) == (text.rope_parameters["rope_theta"], (24, 20, 20))
    assert ours.num_deepstack_layers == len(reference.vision_config.deepstack_visual_indexes)
    assert ours.image_token_id == reference.image_token_id
    assert ours.tie_word_embeddings == reference.tie_word_embeddings
    if ours.moe is not None:
        assert ours.moe.num_experts == text.num_experts
        assert ours.moe.num_experts_per_token == text.num_experts_per_tok
        assert ours.moe.intermediate_size == text.moe_intermediate_size


@pytest.mark.parametrize(
    ("name", "change", "reason"),
    [
        ("qwen3-vl-4b-instruct", {"text_config": {"rope_scaling": {"rope_type": "yarn"}}}, "supported rope types"),
        ("qwen3-vl-4b-instruct", {"text_config": {"rope_scaling": {"mrope_interleaved": False}}}, "mrope_interleaved"),
        ("qwen3-vl-4b-instruct", {"vision_config": {"deepstack_visual_indexes": [*range(40)]}}, "it has 36"),
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
    from services.vision_encoder.families import internvl, pixtral, qwen2_5_vl, qwen2_vl, qwen3_vl, smolvlm

    (tmp_path / "config.json").write_text(json.dumps({"model_type": "pixtral"}))
    for defaults, config in (
        (pixtral.TOWER_DEFAULTS, transformers.PixtralVisionConfig()),
        (internvl.TOWER_DEFAULTS, transformers.InternVLConfig().vision_config),
        (qwen2_vl.TOWER_DEFAULTS, transformers.Qwen2VLConfig().vision_config),
        (qwen2_5_vl.TOWER_DEFAULTS, transformers.Qwen2_5_VLConfig().vision_config),
        (qwen3_vl.TOWER_DEFAULTS, transformers.Qwen3VLConfig().vision_config),
        (qwen3_vl.TOWER_DEFAULTS, transformers.Qwen3VLMoeConfig().vision_config),
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
