"""Which checkpoints the engine takes: a family maps a Hugging Face config to `ModelConfig` and tensor names to ours.

The network is the same for all of them (`decoder`). Defaults are transformers' for the family, because published
configs, above all a Llava config's `text_config`, leave out what equals them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from services.text_engine.models.config import Fields, ModelConfig, YarnScaling, read_json
from services.text_engine.models.rope import read_rope


@dataclass(frozen=True, slots=True)
class Family:
    """One model class of transformers.

    read_config  config.json -> ModelConfig, without what generation_config.json adds
    prefixes     start of a tensor's name in the checkpoint -> start of ours; the first that fits wins
    ignored      starts of names that another part of the system loads
    """

    model_type: str
    read_config: Callable[[Fields], ModelConfig]
    prefixes: tuple[tuple[str, str], ...] = (("model.", ""), ("lm_head.", "lm_head."))
    ignored: tuple[str, ...] = ()

    def our_name(self, name: str) -> str | None:
        """Our name of the checkpoint's tensor `name`; None if it is not the decoder's to load."""
        if name.startswith(self.ignored) or name.endswith("rotary_emb.inv_freq"):
            return None
        for theirs, ours in self.prefixes:
            if name.startswith(theirs):
                return ours + name.removeprefix(theirs)
        return name


@dataclass(frozen=True, slots=True)
class Defaults:
    """What transformers assumes where a config is silent; None: derived from other fields."""

    intermediate_size: int
    vocab_size: int
    max_position_embeddings: int
    num_kv_heads: int | None = None
    head_dim: int | None = None


LLAMA_DEFAULTS = Defaults(intermediate_size=11008, vocab_size=32000, max_position_embeddings=2048)
MISTRAL_DEFAULTS = Defaults(
    intermediate_size=14336, vocab_size=32000, max_position_embeddings=4096 * 32, num_kv_heads=8
)
QWEN2_DEFAULTS = Defaults(intermediate_size=22016, vocab_size=151936, max_position_embeddings=32768, num_kv_heads=32)
QWEN3_DEFAULTS = dataclasses.replace(QWEN2_DEFAULTS, head_dim=128)


def _llama(fields: Fields) -> ModelConfig:
    bias = fields.boolean("attention_bias", False)
    config = _text_config(fields, LLAMA_DEFAULTS)
    return dataclasses.replace(config, qkv_bias=bias, output_bias=bias, mlp_bias=fields.boolean("mlp_bias", False))


def _mistral(fields: Fields) -> ModelConfig:
    config = _text_config(fields, MISTRAL_DEFAULTS)
    window = None if fields.is_null("sliding_window") else fields.integer("sliding_window", 4096)
    return dataclasses.replace(config, sliding_windows=_windows(fields, window, config.num_layers, first_layer=0))


def _qwen2(fields: Fields) -> ModelConfig:
    config = _text_config(fields, QWEN2_DEFAULTS)
    return dataclasses.replace(config, qkv_bias=True, sliding_windows=_qwen_windows(fields, config.num_layers))


def _qwen3(fields: Fields) -> ModelConfig:
    bias = fields.boolean("attention_bias", False)
    config = _text_config(fields, QWEN3_DEFAULTS)
    windows = _qwen_windows(fields, config.num_layers)
    return dataclasses.replace(config, qkv_bias=bias, output_bias=bias, qk_norm=True, sliding_windows=windows)


def _llava(fields: Fields) -> ModelConfig:
    text = fields.nested("text_config")
    model_type = text.raw("model_type") or "llama"
    family = next((family for family in TEXT_FAMILIES.values() if family.model_type == model_type), None)
    if family is None:
        raise text.error(
            "model_type", f"supported inside Llava: {', '.join(f.model_type for f in TEXT_FAMILIES.values())}"
        )
    config = family.read_config(text)
    image_token = "image_token_id" if "image_token_id" in fields else "image_token_index"
    return dataclasses.replace(
        config,
        # Either place may say it: transformers 5 writes both, older checkpoints only the text model's.
        tie_word_embeddings=config.tie_word_embeddings or fields.boolean("tie_word_embeddings", False),
        image_token_id=fields.integer(image_token, 32000, minimum=0),
        eos_token_ids=_merge(fields.token_ids("eos_token_id"), config.eos_token_ids),
        dtype=_dtype(fields) or config.dtype,
    )


TEXT_FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "LlamaForCausalLM": Family("llama", _llama),
        "MistralForCausalLM": Family("mistral", _mistral),
        "Qwen2ForCausalLM": Family("qwen2", _qwen2),
        "Qwen3ForCausalLM": Family("qwen3", _qwen3),
    }
)
LLAVA = Family(
    "llava",
    _llava,
    prefixes=(
        ("language_model.model.", ""),  # as published, and as transformers 5 writes
        ("language_model.lm_head.", "lm_head."),
        ("model.language_model.", ""),  # as transformers 4.52 to 4.57 wrote
        ("lm_head.", "lm_head."),
    ),
    ignored=("vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector."),
)
FAMILIES: Mapping[str, Family] = MappingProxyType({**TEXT_FAMILIES, "LlavaForConditionalGeneration": LLAVA})


def load_model_config(folder: Path) -> ModelConfig:
    """Read the config files of a checkpoint folder. Raises ConfigError for one that the engine cannot serve."""
    fields = read_json(folder / "config.json")
    architecture = next(iter(fields.strings("architectures")), "")
    if architecture not in FAMILIES:
        raise fields.error("architectures", f"supported: {', '.join(FAMILIES)}")
    if "quantization_config" in fields:
        raise fields.error("quantization_config", "only checkpoints with plain weights are supported")
    config = dataclasses.replace(FAMILIES[architecture].read_config(fields), architecture=architecture)
    generation_file = folder / "generation_config.json"
    if generation_file.is_file():
        generation_ids = read_json(generation_file).token_ids("eos_token_id")
        config = dataclasses.replace(config, eos_token_ids=_merge(generation_ids, config.eos_token_ids))
    return config


def _text_config(fields: Fields, defaults: Defaults) -> ModelConfig:
    """What all text families read alike; no biases, no windows."""
    if fields.raw("hidden_act") not in (None, "silu", "swish"):
        raise fields.error("hidden_act", "supported: silu")
    hidden_size = fields.integer("hidden_size", 4096)
    num_layers = fields.integer("num_hidden_layers", 32)
    num_heads = fields.integer("num_attention_heads", 32)
    head_dim = fields.integer("head_dim", defaults.head_dim or hidden_size // num_heads)
    kv_heads_if_absent = defaults.num_kv_heads or num_heads
    max_positions = fields.integer("max_position_embeddings", defaults.max_position_embeddings)
    rope = read_rope(fields, max_positions)
    if isinstance(rope.scaling, YarnScaling):
        # YaRN is switched on in configs that go on stating the length before scaling.
        max_positions = max(max_positions, int(rope.scaling.original_max_position_embeddings * rope.scaling.factor))
    return ModelConfig(
        hidden_size=hidden_size,
        intermediate_size=fields.integer("intermediate_size", defaults.intermediate_size),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=(
            num_heads
            if fields.is_null("num_key_value_heads")
            else fields.integer("num_key_value_heads", kv_heads_if_absent)
        ),
        head_dim=head_dim,
        vocab_size=fields.integer("vocab_size", defaults.vocab_size),
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        rope=rope,
        max_position_embeddings=max_positions,
        tie_word_embeddings=fields.boolean("tie_word_embeddings", False),
        sliding_windows=(None,) * num_layers,
        eos_token_ids=fields.token_ids("eos_token_id"),
        dtype=_dtype(fields),
    )


def _qwen_windows(fields: Fields, num_layers: int) -> tuple[int | None, ...]:
    """Only with `use_sliding_window`, and by default only from layer `max_window_layers` on."""
    used = fields.boolean("use_sliding_window", False) and not fields.is_null("sliding_window")
    window = fields.integer("sliding_window", 4096) if used else None
    return _windows(fields, window, num_layers, first_layer=fields.integer("max_window_layers", 28, minimum=0))


def _windows(fields: Fields, window: int | None, num_layers: int, first_layer: int) -> tuple[int | None, ...]:
    """Per layer, what `layer_types` says; without it, `window` from `first_layer` on."""
    if "layer_types" not in fields:
        return tuple(window if layer >= first_layer else None for layer in range(num_layers))
    layer_types = fields.strings("layer_types")
    if len(layer_types) != num_layers:
        raise fields.error("layer_types", f"one for each of the {num_layers} layers is needed")
    if not set(layer_types) <= {"full_attention", "sliding_attention"}:
        raise fields.error("layer_types", "supported: full_attention, sliding_attention")
    if window is None and "sliding_attention" in layer_types:
        raise fields.error("layer_types", "sliding layers need a sliding_window that is in use")
    return tuple(window if layer_type == "sliding_attention" else None for layer_type in layer_types)


def _dtype(fields: Fields) -> str | None:
    value = fields.raw("dtype") or fields.raw("torch_dtype")
    return value if isinstance(value, str) else None


def _merge(first: tuple[int, ...], second: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(dict.fromkeys(first + second))
