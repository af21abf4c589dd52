"""Configs: every spelling of the same model reads the same, defaults are transformers', and what cannot run says so."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from services.text_engine.models.config import ConfigError, Llama3Scaling, YarnScaling
from services.text_engine.models.load_config import load_model_config
from tests.checkpoints import LLAVA_RECIPES, RECIPES, TINY_TEXT
from tests.conftest import CheckpointFactory

NUM_LAYERS = TINY_TEXT["num_hidden_layers"]


def config_folder(tmp_path: Path, config: dict[str, Any], generation: dict[str, Any] | None = None) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    return tmp_path


def tiny_config(architecture: str = "LlamaForCausalLM", **changes: Any) -> dict[str, Any]:
    return TINY_TEXT | {"architectures": [architecture], "vocab_size": 316} | changes


@pytest.mark.parametrize("name", RECIPES)
def test_old_and_new_spellings_read_the_same(checkpoint: CheckpointFactory, name: str):
    published, current = (
        load_model_config(checkpoint(name, layout=layout)) for layout in ("published", "transformers")
    )
    assert published == current


@pytest.mark.parametrize("model_type", ["llama", "mistral", "qwen2", "qwen3"])
def test_what_a_llava_text_config_leaves_out_is_transformers_default(tmp_path: Path, model_type: str):
    config = {
        "architectures": ["LlavaForConditionalGeneration"],
        "model_type": "llava",
        "text_config": {"model_type": model_type},
        "vision_config": {"model_type": "clip_vision_model"},
    }
    ours = load_model_config(config_folder(tmp_path, config))
    oracle = AutoConfig.from_pretrained(tmp_path)
    text = oracle.text_config
    window = text.sliding_window if model_type == "mistral" else None
    assert ours.hidden_size == text.hidden_size
    assert ours.intermediate_size == text.intermediate_size
    assert ours.num_layers == text.num_hidden_layers
    assert (ours.num_heads, ours.num_kv_heads) == (text.num_attention_heads, text.num_key_value_heads)
    assert ours.head_dim == getattr(text, "head_dim", text.hidden_size // text.num_attention_heads)
    assert ours.vocab_size == text.vocab_size
    assert ours.rms_norm_eps == text.rms_norm_eps
    assert ours.rope.theta == text.rope_parameters["rope_theta"]
    assert ours.max_position_embeddings == text.max_position_embeddings
    assert ours.sliding_windows == (window,) * ours.num_layers
    assert ours.image_token_id == oracle.image_token_id


def test_only_llava_has_an_image_token(checkpoint: CheckpointFactory):
    assert {name for name in RECIPES if load_model_config(checkpoint(name)).image_token_id == 316} == set(LLAVA_RECIPES)


@pytest.mark.parametrize(
    ("name", "windows"),
    [
        ("mistral", (32, 32, 32)),
        ("mistral_window_null", (None, None, None)),
        ("qwen2", (None, None, None)),
        ("qwen2_window_unused", (None, None, None)),
        ("qwen2_window_upper_layers", (None, 32, 32)),
        ("qwen3_window_on_no_layer", (None, None, None)),
        ("llava_clip_mistral", (32, 32, 32)),
    ],
)
def test_a_window_counts_only_on_layers_that_slide(checkpoint: CheckpointFactory, name: str, windows: tuple):
    assert load_model_config(checkpoint(name)).sliding_windows == windows


def test_a_mistral_whose_layers_are_all_marked_full_has_no_window(tmp_path: Path):
    """Case D29."""
    config = tiny_config("MistralForCausalLM", sliding_window=32, layer_types=["full_attention"] * NUM_LAYERS)
    assert load_model_config(config_folder(tmp_path, config)).sliding_windows == (None,) * NUM_LAYERS


def test_llama_knows_no_window(tmp_path: Path):
    config = tiny_config(sliding_window=32)
    assert load_model_config(config_folder(tmp_path, config)).sliding_windows == (None,) * NUM_LAYERS


def test_every_end_of_sequence_id_counts_wherever_it_is_stated(tmp_path: Path):
    folder = config_folder(tmp_path, tiny_config(eos_token_id=2), {"eos_token_id": [7, 2, 5]})
    assert load_model_config(folder).eos_token_ids == (7, 2, 5)


def test_without_a_generation_config_the_models_own_end_counts(tmp_path: Path):
    assert load_model_config(config_folder(tmp_path, tiny_config(eos_token_id=[2, 3]))).eos_token_ids == (2, 3)


def test_no_end_of_sequence_at_all_is_allowed(tmp_path: Path):
    folder = config_folder(tmp_path, tiny_config(eos_token_id=None), {"eos_token_id": None})
    assert load_model_config(folder).eos_token_ids == ()


def test_llama3_scaling_reads_from_the_old_spelling(tmp_path: Path):
    rope = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 128,
    }
    config = load_model_config(config_folder(tmp_path, tiny_config(rope_theta=500000.0, rope_scaling=rope)))
    assert config.rope.theta == 500000.0
    assert config.rope.scaling == Llama3Scaling(8.0, 1.0, 4.0, 128)


def test_yarn_makes_the_context_longer_than_the_stated_length(tmp_path: Path):
    rope = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
    config = load_model_config(config_folder(tmp_path, tiny_config(rope_scaling=rope)))
    assert config.max_position_embeddings == 2048
    assert isinstance(config.rope.scaling, YarnScaling)
    assert config.rope.scaling.attention_factor == pytest.approx(1.138629436)


def test_dynamic_scaling_changes_nothing_within_the_stated_length(tmp_path: Path):
    rope = {"type": "dynamic", "rope_type": "dynamic", "factor": 2.0}
    config = load_model_config(config_folder(tmp_path, tiny_config(max_position_embeddings=512, rope_scaling=rope)))
    assert config.rope.scaling is None
    assert config.max_position_embeddings == 512


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"architectures": ["GPT2LMHeadModel"]},
            r"architectures is \['GPT2LMHeadModel'\]; supported: LlamaForCausalLM, ",
        ),
        ({"architectures": None}, "architectures is None; supported: LlamaForCausalLM, "),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; supported: silu"),
        (
            {"rope_scaling": {"type": "ntk", "factor": 2.0}},
            r"rope_scaling\.type is 'ntk'; supported rope types: ",
        ),
        ({"rope_scaling": {"type": "linear"}}, r"rope_scaling\.factor is missing; this model needs it"),
        ({"rope_parameters": {"rope_type": "longrope"}}, r"rope_parameters\.rope_type is 'longrope'; supported rope"),
        (
            {"rope_parameters": {"full_attention": {"rope_type": "default"}}},
            r"rope_parameters\.full_attention is {.*only one set",
        ),
        ({"partial_rotary_factor": 0.5}, r"partial_rotary_factor is 0\.5; only 1\.0"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0; a whole number of at least 1"),
        ({"hidden_size": "64"}, "hidden_size is '64'; a whole number"),
        ({"rms_norm_eps": -1}, "rms_norm_eps is -1; a positive number"),
        ({"attention_bias": 1}, "attention_bias is 1; true or false"),
        ({"eos_token_id": "2"}, "eos_token_id is '2'; a token id or a list"),
        ({"num_key_value_heads": 3}, "num_key_value_heads is 3; it must divide num_attention_heads = 4"),
        ({"head_dim": 15}, "head_dim is 15; rotary embeddings need an even one"),
        ({"quantization_config": {"quant_method": "hqq"}}, "quantization_config.quant_method is .*; supported: awq"),
    ],
)
def test_a_config_that_cannot_run_names_the_field_its_value_and_what_can(tmp_path: Path, changes: dict, message: str):
    with pytest.raises(ConfigError, match=message):
        load_model_config(config_folder(tmp_path, tiny_config(**changes)))


@pytest.mark.parametrize(
    ("layer_types", "message"),
    [
        (["full_attention"], "one for each of the 3 layers"),
        (["full_attention", "chunked_attention", "full_attention"], "supported: full_attention, sliding_attention"),
        (["full_attention", "sliding_attention", "full_attention"], "sliding layers need a sliding_window"),
    ],
)
def test_layer_types_that_make_no_sense_are_refused(tmp_path: Path, layer_types: list[str], message: str):
    config = tiny_config("Qwen2ForCausalLM", layer_types=layer_types)
    with pytest.raises(ConfigError, match=message):
        load_model_config(config_folder(tmp_path, config))


def test_a_llava_around_an_unknown_text_model_names_the_nested_field(tmp_path: Path):
    config = {"architectures": ["LlavaForConditionalGeneration"], "text_config": {"model_type": "phi3"}}
    with pytest.raises(ConfigError, match=r"text_config\.model_type is 'phi3'; supported text models: llama, mistral,"):
        load_model_config(config_folder(tmp_path, config))


def test_a_folder_that_is_no_checkpoint_is_named(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"holds no config\.json"):
        load_model_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="is not valid JSON"):
        load_model_config(tmp_path)
