"""The rope fields of a config.json -> `RopeConfig`. What they mean in cosines and sines is `rope`'s business.

Imports no torch: the settings are checked against a checkpoint before anything heavy is loaded.
"""

from __future__ import annotations

import math

from services.text_engine.models.config import (
    Fields,
    LinearScaling,
    Llama3Scaling,
    RopeConfig,
    RopeScaling,
    YarnScaling,
)

DEFAULT_THETA = 10_000.0
DEFAULT_GLOBAL_THETA = 1_000_000.0  # of Gemma's layers without a window, and of Qwen2.5-VL


def read_rope(fields: Fields, max_position_embeddings: int, default_theta: float = DEFAULT_THETA) -> RopeConfig:
    """From `rope_parameters` (transformers 5) or `rope_theta` with `rope_scaling` (before); raises ConfigError."""
    place = "rope_scaling" if "rope_scaling" in fields else "rope_parameters"
    rope = fields.nested(place)
    for layer_type in ("full_attention", "sliding_attention"):
        if layer_type in rope:
            raise rope.error(layer_type, "only one set of rope parameters for all layers is supported")
    theta = rope.number("rope_theta", fields.number("rope_theta", default_theta))
    for holder in (fields, rope):
        if holder.number("partial_rotary_factor", 1.0) != 1.0:
            raise holder.error("partial_rotary_factor", "only 1.0 is supported: all of a head is rotated")
    return RopeConfig(theta, _read_scaling(rope, max_position_embeddings))


def read_sectioned_rope(
    fields: Fields,
    default_theta: float = DEFAULT_GLOBAL_THETA,
    default_sections: tuple[int, ...] = (16, 24, 24),
    *,
    interleaved: bool = False,
) -> RopeConfig:
    """Of three coordinates (Qwen2.5-VL, Qwen3-VL), unscaled. Raises ConfigError.

    interleaved   how the family's sections stand, whether or not the config repeats it
    """
    rope = fields.nested("rope_scaling" if "rope_scaling" in fields else "rope_parameters")
    key = "rope_type" if "rope_type" in rope else "type"
    if rope.raw(key) not in (None, "default", "mrope"):
        raise rope.error(key, "supported rope types: default, mrope")
    if rope.boolean("mrope_interleaved", interleaved) != interleaved:
        raise rope.error("mrope_interleaved", f"supported for this family: {str(interleaved).lower()}")
    sections = rope.integers("mrope_section") if "mrope_section" in rope else default_sections
    theta = rope.number("rope_theta", fields.number("rope_theta", default_theta))
    return RopeConfig(theta, sections=sections, interleaved=interleaved)


def read_layered_rope(fields: Fields, max_position_embeddings: int) -> tuple[RopeConfig, RopeConfig]:
    """Of layers that see everything, and of those with a window (Gemma 3). Raises ConfigError."""
    layered = fields.nested("rope_parameters")
    if "full_attention" in layered or "sliding_attention" in layered:
        full, local = layered.nested("full_attention"), layered.nested("sliding_attention")
        local_theta = local.number("rope_theta", DEFAULT_THETA)
        full_theta = full.number("rope_theta", DEFAULT_GLOBAL_THETA)
    else:  # before transformers 5, where only the layers that see everything were ever scaled
        full, local = fields.nested("rope_scaling"), fields.nested("rope_parameters")
        local_theta = fields.number("rope_local_base_freq", DEFAULT_THETA)
        full_theta = fields.number("rope_theta", DEFAULT_GLOBAL_THETA)
    return (
        RopeConfig(full_theta, _read_scaling(full, max_position_embeddings)),
        RopeConfig(local_theta, _read_scaling(local, max_position_embeddings)),
    )


def _read_scaling(rope: Fields, max_position_embeddings: int) -> RopeScaling | None:
    key = "rope_type" if "rope_type" in rope else "type"
    match rope.raw(key):
        case None | "default":
            return None
        case "dynamic":  # sets in beyond max_position_embeddings, and no prompt and answer are longer here
            rope.number("factor")
            return None
        case "linear":
            return LinearScaling(rope.number("factor"))
        case "llama3":
            return Llama3Scaling(
                factor=rope.number("factor"),
                low_freq_factor=rope.number("low_freq_factor"),
                high_freq_factor=rope.number("high_freq_factor"),
                original_max_position_embeddings=_original_length(rope, max_position_embeddings),
            )
        case "yarn":
            return YarnScaling(
                factor=rope.number("factor"),
                original_max_position_embeddings=_original_length(rope, max_position_embeddings),
                attention_factor=_yarn_attention_factor(rope),
                beta_fast=rope.number("beta_fast", 32.0),
                beta_slow=rope.number("beta_slow", 1.0),
                truncate=rope.boolean("truncate", True),
            )
        case _:
            raise rope.error(key, "supported rope types: default, dynamic, linear, llama3, yarn")


def _original_length(rope: Fields, max_position_embeddings: int) -> int:
    return rope.integer("original_max_position_embeddings", max_position_embeddings)


def _yarn_attention_factor(rope: Fields) -> float:
    if "attention_factor" in rope:
        return rope.number("attention_factor")
    factor = rope.number("factor")

    def mscale(multiplier: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * multiplier * math.log(factor) + 1.0

    if "mscale" in rope and "mscale_all_dim" in rope:
        return mscale(rope.number("mscale")) / mscale(rope.number("mscale_all_dim"))
    return mscale(1.0)
