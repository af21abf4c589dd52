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
from typing import Literal

from services.text_engine.models.config import (
    Fields,
    Implementation,
    ModelConfig,
    MoeConfig,
    RopeConfig,
    YarnScaling,
    read_json,
)
from services.text_engine.models.rope_config import read_layered_rope, read_rope, read_sectioned_rope
from services.text_engine.models.transformers_config import read_transformers_config


@dataclass(frozen=True, slots=True)
class Family:
    """One model class of transformers.

    read_config  config.json -> ModelConfig, without what generation_config.json adds
    prefixes     start of a tensor's name in the checkpoint -> start of ours; the first that fits wins
    ignored      starts of names that another part of the system loads
    renamed      parts of a tensor's name -> what they are in ours, one after the other
    """

    model_type: str
    read_config: Callable[[Fields], ModelConfig]
    prefixes: tuple[tuple[str, str], ...] = (("model.", ""), ("lm_head.", "lm_head."))
    ignored: tuple[str, ...] = ()
    renamed: tuple[tuple[str, str], ...] = ()

    def our_name(self, name: str) -> str | None:
        """Our name of the checkpoint's tensor `name`; None if it is not the decoder's to load."""
        if name.startswith(self.ignored) or name.endswith("rotary_emb.inv_freq"):
            return None
        for theirs, ours in self.renamed:
            name = name.replace(theirs, ours)
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
    hidden_size: int = 4096
    num_layers: int = 32
    num_heads: int = 32
    rms_norm_eps: float = 1e-6


LLAMA_DEFAULTS = Defaults(intermediate_size=11008, vocab_size=32000, max_position_embeddings=2048)
MISTRAL_DEFAULTS = Defaults(
    intermediate_size=14336, vocab_size=32000, max_position_embeddings=4096 * 32, num_kv_heads=8
)
QWEN2_DEFAULTS = Defaults(intermediate_size=22016, vocab_size=151936, max_position_embeddings=32768, num_kv_heads=32)
QWEN2_5_VL_DEFAULTS = Defaults(
    hidden_size=8192,
    intermediate_size=29568,
    num_layers=80,
    num_heads=64,
    num_kv_heads=8,
    vocab_size=152_064,
    max_position_embeddings=32768,
    rms_norm_eps=1e-5,
)
MIXTRAL_DEFAULTS = dataclasses.replace(MISTRAL_DEFAULTS, rms_norm_eps=1e-5)
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
QWEN3_DEFAULTS = dataclasses.replace(QWEN2_DEFAULTS, head_dim=128)
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


def _mixtral(fields: Fields) -> ModelConfig:
    max_positions = fields.integer("max_position_embeddings", MIXTRAL_DEFAULTS.max_position_embeddings)
    config = _text_config(fields, MIXTRAL_DEFAULTS, read_rope(fields, max_positions, default_theta=1e6))
    window = fields.integer("sliding_window") if "sliding_window" in fields else None
    moe = MoeConfig(
        layers=(True,) * config.num_layers,
        num_experts=_num_experts(fields, 8),
        num_experts_per_token=fields.integer("num_experts_per_tok", 2),
        intermediate_size=config.intermediate_size,
        normalizes=True,
    )
    return dataclasses.replace(config, moe=moe, sliding_windows=(window,) * config.num_layers)


def _qwen2_moe(fields: Fields) -> ModelConfig:
    config = _text_config(fields, QWEN2_MOE_DEFAULTS)
    moe = _qwen_moe(fields, config.num_layers, num_experts=60, num_experts_per_token=4, intermediate_size=1408)
    shared = fields.integer("shared_expert_intermediate_size", 5632)
    return dataclasses.replace(
        config,
        qkv_bias=fields.boolean("qkv_bias", True),
        moe=dataclasses.replace(moe, shared_intermediate_size=shared),
        sliding_windows=_qwen2_moe_windows(fields, config.num_layers),
    )


def _qwen3_moe(fields: Fields) -> ModelConfig:
    bias = fields.boolean("attention_bias", False)
    config = _text_config(fields, QWEN3_MOE_DEFAULTS)
    return dataclasses.replace(
        config,
        qkv_bias=bias,
        output_bias=bias,
        qk_norm=True,
        moe=_qwen_moe(fields, config.num_layers, num_experts=128, num_experts_per_token=8, intermediate_size=768),
        sliding_windows=(_qwen_window(fields),) * config.num_layers,
    )


def _qwen_moe(
    fields: Fields, num_layers: int, *, num_experts: int, num_experts_per_token: int, intermediate_size: int
) -> MoeConfig:
    """The numbers are the family's defaults."""
    step = fields.integer("decoder_sparse_step", 1)
    ordinary = fields.layer_numbers("mlp_only_layers")
    return MoeConfig(
        layers=tuple(layer not in ordinary and (layer + 1) % step == 0 for layer in range(num_layers)),
        num_experts=_num_experts(fields, num_experts),
        num_experts_per_token=fields.integer("num_experts_per_tok", num_experts_per_token),
        intermediate_size=fields.integer("moe_intermediate_size", intermediate_size),
        normalizes=fields.boolean("norm_topk_prob", False),
    )


def _num_experts(fields: Fields, default: int) -> int:
    """Both names are in use, and each stands for the other in transformers."""
    return fields.integer("num_local_experts" if "num_local_experts" in fields else "num_experts", default)


def _gemma3(fields: Fields) -> ModelConfig:
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
    config = _text_config(fields, GEMMA3_DEFAULTS, rope)
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


def _llava(fields: Fields) -> ModelConfig:
    return _with_text_model(fields, default_image_token_id=32000)


def _llava_onevision(fields: Fields) -> ModelConfig:
    return _with_text_model(fields, default_image_token_id=151646, default_text_model="qwen2")


def _mistral3(fields: Fields) -> ModelConfig:
    return _with_text_model(fields, default_image_token_id=10, default_tied=True)


def _gemma3_with_images(fields: Fields) -> ModelConfig:
    config = _with_text_model(
        fields, default_image_token_id=262144, default_text_model="gemma3_text", default_tied=True
    )
    num_rows = fields.integer("mm_tokens_per_image", 256)
    # Our rows of an image see all of it, transformers' only as far as the window: the same as long as an image fits.
    if any(window is not None and window < num_rows for window in config.sliding_windows):
        raise fields.error("mm_tokens_per_image", "an image must fit into the text model's sliding_window")
    return dataclasses.replace(config, image_mark_id=fields.integer("boi_token_index", 255999, minimum=0))


def _qwen2_5_vl(fields: Fields) -> ModelConfig:
    """As published, the text model's fields stand among the others; transformers 5 nests them."""
    text = fields.nested("text_config") if "text_config" in fields else fields
    config = _text_config(text, QWEN2_5_VL_DEFAULTS, read_sectioned_rope(text))
    return dataclasses.replace(
        config,
        qkv_bias=True,
        sliding_windows=_qwen_windows(text, config.num_layers),
        tie_word_embeddings=config.tie_word_embeddings or fields.boolean("tie_word_embeddings", False),
        image_token_id=fields.integer("image_token_id", 151655, minimum=0),
        eos_token_ids=_merge(fields.token_ids("eos_token_id"), config.eos_token_ids),
        dtype=_dtype(fields) or config.dtype,
    )


def _smolvlm(fields: Fields) -> ModelConfig:
    return _with_text_model(fields, default_image_token_id=128257)


def _with_text_model(
    fields: Fields, *, default_image_token_id: int, default_text_model: str = "llama", default_tied: bool = False
) -> ModelConfig:
    """A vision-language model around one of the text families."""
    text = fields.nested("text_config")
    model_type = text.raw("model_type") or default_text_model
    family = next((family for family in TEXT_FAMILIES.values() if family.model_type == model_type), None)
    if family is None:
        raise text.error(
            "model_type", f"supported text models: {', '.join(f.model_type for f in TEXT_FAMILIES.values())}"
        )
    config = family.read_config(text)
    image_token = "image_token_id" if "image_token_id" in fields else "image_token_index"
    return dataclasses.replace(
        config,
        # Either place may say it: transformers 5 writes both, older checkpoints only the text model's.
        tie_word_embeddings=config.tie_word_embeddings or fields.boolean("tie_word_embeddings", default_tied),
        image_token_id=fields.integer(image_token, default_image_token_id, minimum=0),
        eos_token_ids=_merge(fields.token_ids("eos_token_id"), config.eos_token_ids),
        dtype=_dtype(fields) or config.dtype,
    )


# Gemma's names say what a norm follows; ours, what it is for.
GEMMA_NORMS = (
    (".post_attention_layernorm.", ".self_attn.output_norm."),
    (".pre_feedforward_layernorm.", ".post_attention_layernorm."),
    (".post_feedforward_layernorm.", ".mlp.output_norm."),
)
MIXTRAL_NAMES = (
    (".block_sparse_moe.", ".mlp."),
    (".w1.", ".gate_proj."),
    (".w3.", ".up_proj."),
    (".w2.", ".down_proj."),
)
TEXT_FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "LlamaForCausalLM": Family("llama", _llama),
        "MistralForCausalLM": Family("mistral", _mistral),
        "Qwen2ForCausalLM": Family("qwen2", _qwen2),
        "Qwen3ForCausalLM": Family("qwen3", _qwen3),
        "Gemma3ForCausalLM": Family("gemma3_text", _gemma3, renamed=GEMMA_NORMS),
        "MixtralForCausalLM": Family("mixtral", _mixtral, renamed=MIXTRAL_NAMES),
        "Qwen2MoeForCausalLM": Family("qwen2_moe", _qwen2_moe),
        "Qwen3MoeForCausalLM": Family("qwen3_moe", _qwen3_moe),
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
    ignored=(
        *("vision_tower.", "multi_modal_projector.", "image_newline"),
        *("model.vision_tower.", "model.multi_modal_projector.", "model.image_newline"),
    ),
)
LLAVA_ONEVISION = dataclasses.replace(LLAVA, model_type="llava_onevision", read_config=_llava_onevision)
SMOLVLM = Family(
    "smolvlm",
    _smolvlm,
    prefixes=(("model.text_model.", ""), ("lm_head.", "lm_head.")),
    ignored=("model.vision_model.", "model.connector."),
)
QWEN2_5_VL = Family(
    "qwen2_5_vl",
    _qwen2_5_vl,
    prefixes=(("model.language_model.", ""), ("model.", ""), ("lm_head.", "lm_head.")),
    ignored=("visual.", "model.visual."),
)
FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        **TEXT_FAMILIES,
        "LlavaForConditionalGeneration": LLAVA,
        "LlavaNextForConditionalGeneration": LLAVA,
        "LlavaOnevisionForConditionalGeneration": LLAVA_ONEVISION,
        "VipLlavaForConditionalGeneration": LLAVA,
        "Idefics3ForConditionalGeneration": SMOLVLM,
        "Gemma3ForConditionalGeneration": dataclasses.replace(
            LLAVA, model_type="gemma3", read_config=_gemma3_with_images, renamed=GEMMA_NORMS
        ),
        "Mistral3ForConditionalGeneration": dataclasses.replace(LLAVA, model_type="mistral3", read_config=_mistral3),
        "Qwen2_5_VLForConditionalGeneration": QWEN2_5_VL,
        "SmolVLMForConditionalGeneration": SMOLVLM,
    }
)


def load_model_config(folder: Path, implementation: Literal["auto"] | Implementation = "native") -> ModelConfig:
    """Read the config files of a checkpoint folder. Raises ConfigError for one that the engine cannot serve.

    implementation  whose code is to run it; auto: ours where it is one of our families
    """
    fields = read_json(folder / "config.json")
    architecture = next(iter(fields.strings("architectures")), "")
    supported = ", ".join(FAMILIES)
    if architecture in FAMILIES and implementation != "transformers":
        _check_format(fields)
        config = FAMILIES[architecture].read_config(fields)
    elif implementation == "native":
        raise fields.error("architectures", f"supported: {supported}")
    else:
        config = read_transformers_config(folder, fields, supported)
    config = dataclasses.replace(config, architecture=architecture)
    generation_file = folder / "generation_config.json"
    if generation_file.is_file():
        generation_ids = read_json(generation_file).token_ids("eos_token_id")
        config = dataclasses.replace(config, eos_token_ids=_merge(generation_ids, config.eos_token_ids))
    return config


def _check_format(fields: Fields) -> None:
    """Raises ConfigError for quantized weights that the engine does not read."""
    if "quantization_config" in fields or "quantization_config" in fields.nested("text_config"):
        # Late: it needs torch, and who only asks what a plain checkpoint is like does not.
        from services.text_engine.models.quantization.formats import read_format

        read_format(fields)


def _text_config(fields: Fields, defaults: Defaults, rope: RopeConfig | None = None) -> ModelConfig:
    """What all text families read alike; no biases, no windows.

    rope   None: as most families spell it
    """
    if fields.raw("hidden_act") not in (None, "silu", "swish"):
        raise fields.error("hidden_act", "supported: silu")
    hidden_size = fields.integer("hidden_size", defaults.hidden_size)
    num_layers = fields.integer("num_hidden_layers", defaults.num_layers)
    num_heads = fields.integer("num_attention_heads", defaults.num_heads)
    head_dim = fields.integer("head_dim", defaults.head_dim or hidden_size // num_heads)
    kv_heads_if_absent = defaults.num_kv_heads or num_heads
    max_positions = fields.integer("max_position_embeddings", defaults.max_position_embeddings)
    rope = rope or read_rope(fields, max_positions)
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
        rms_norm_eps=fields.number("rms_norm_eps", defaults.rms_norm_eps),
        rope=rope,
        max_position_embeddings=max_positions,
        tie_word_embeddings=fields.boolean("tie_word_embeddings", False),
        sliding_windows=(None,) * num_layers,
        eos_token_ids=fields.token_ids("eos_token_id"),
        dtype=_dtype(fields),
    )


def _qwen_windows(fields: Fields, num_layers: int) -> tuple[int | None, ...]:
    """Only with `use_sliding_window`, and by default only from layer `max_window_layers` on."""
    first_layer = fields.integer("max_window_layers", 28, minimum=0)
    return _windows(fields, _qwen_window(fields), num_layers, first_layer)


def _qwen2_moe_windows(fields: Fields, num_layers: int) -> tuple[int | None, ...]:
    """By default every second layer below `max_window_layers`, the first one among them."""
    window = _qwen_window(fields)
    if "layer_types" in fields:
        return _windows(fields, window, num_layers, first_layer=0)
    end = fields.integer("max_window_layers", 28, minimum=0)
    return tuple(window if layer < end and layer % 2 == 0 else None for layer in range(num_layers))


def _qwen_window(fields: Fields) -> int | None:
    used = fields.boolean("use_sliding_window", False) and not fields.is_null("sliding_window")
    return fields.integer("sliding_window", 4096) if used else None


def _gemma_windows(fields: Fields, num_layers: int) -> tuple[int | None, ...]:
    """By default every sixth layer sees everything."""
    window = fields.integer("sliding_window", 4096)
    if "layer_types" in fields:
        return _windows(fields, window, num_layers, first_layer=0)
    period = fields.integer("sliding_window_pattern", 6)
    return tuple(None if (layer + 1) % period == 0 else window for layer in range(num_layers))


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
