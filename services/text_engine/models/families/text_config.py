"""What all text families read alike from their configs.

Defaults are transformers' for the family, because published configs, above all a Llava config's `text_config`, leave
out what equals them.
"""

from __future__ import annotations

from dataclasses import dataclass

from services.text_engine.models.config import Fields, ModelConfig, RopeConfig, YarnScaling
from services.text_engine.models.rope_config import read_rope


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


def read_text_config(fields: Fields, defaults: Defaults, rope: RopeConfig | None = None) -> ModelConfig:
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
        dtype=read_dtype(fields),
    )


def layer_windows(fields: Fields, window: int | None, num_layers: int, first_layer: int) -> tuple[int | None, ...]:
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


def read_num_experts(fields: Fields, default: int) -> int:
    """Both names are in use, and each stands for the other in transformers."""
    return fields.integer("num_local_experts" if "num_local_experts" in fields else "num_experts", default)


def read_dtype(fields: Fields) -> str | None:
    value = fields.raw("dtype") or fields.raw("torch_dtype")
    return value if isinstance(value, str) else None


def merge_token_ids(first: tuple[int, ...], second: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(dict.fromkeys(first + second))
