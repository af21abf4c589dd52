"""Rotary position embeddings: the rope fields of a config, and the table of cosines and sines they mean.

Every formula is transformers', operation by operation, so that the tables are equal to the last bit on the CPU.
"""

from __future__ import annotations

import math

import torch

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


def read_sectioned_rope(fields: Fields) -> RopeConfig:
    """Of three coordinates (Qwen2.5-VL), unscaled. Raises ConfigError."""
    rope = fields.nested("rope_scaling" if "rope_scaling" in fields else "rope_parameters")
    key = "rope_type" if "rope_type" in rope else "type"
    if rope.raw(key) not in (None, "default", "mrope"):
        raise rope.error(key, "supported rope types: default, mrope")
    sections = rope.integers("mrope_section") if "mrope_section" in rope else (16, 24, 24)
    theta = rope.number("rope_theta", fields.number("rope_theta", DEFAULT_GLOBAL_THETA))
    return RopeConfig(theta, sections=sections)


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
            raise rope.error(key, "supported rope types: default, linear, llama3, yarn")


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


def cos_sin_table(rope: RopeConfig, head_dim: int, max_positions: int, device: torch.device) -> torch.Tensor:
    """[max_positions, head_dim] fp32: cosines of the head_dim / 2 frequencies at each position, then their sines."""
    frequencies = inverse_frequencies(rope, head_dim)
    angles = torch.arange(max_positions, dtype=torch.float32)[:, None] * frequencies
    table = torch.cat((angles.cos(), angles.sin()), dim=-1)
    if isinstance(rope.scaling, YarnScaling):
        table *= rope.scaling.attention_factor
    return table.to(device)


def cos_sin_at(table: torch.Tensor, positions: torch.Tensor, sections: tuple[int, ...] | None) -> torch.Tensor:
    """Rows of a `cos_sin_table` for a step's tokens, [num_tokens, head_dim].

    positions  [num_tokens], or with sections [3, num_tokens]: each section's frequencies turn with their coordinate
    """
    rows = table[positions]
    if sections is None:
        return rows
    parts = torch.split(rows, list(sections) * 2, dim=-1)  # of the cosines, then of the sines
    return torch.cat([part[i % 3] for i, part in enumerate(parts)], dim=-1)


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> torch.Tensor:
    """[head_dim / 2] fp32, radians per position."""
    wavelengths = rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    match rope.scaling:
        case None:
            return 1.0 / wavelengths
        case LinearScaling(factor):
            return 1.0 / wavelengths / factor
        case Llama3Scaling():
            return _llama3_frequencies(1.0 / wavelengths, rope.scaling)
        case YarnScaling():
            return _yarn_frequencies(wavelengths, rope.theta, head_dim, rope.scaling)


def _llama3_frequencies(frequencies: torch.Tensor, scaling: Llama3Scaling) -> torch.Tensor:
    """Low frequencies divided by the factor, high ones kept, those between blended."""
    original_length = scaling.original_max_position_embeddings
    longest_kept = original_length / scaling.high_freq_factor
    shortest_divided = original_length / scaling.low_freq_factor
    wavelengths = 2 * math.pi / frequencies
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    blend = (original_length / wavelengths - low) / (high - low)
    blended = (1 - blend) * frequencies / scaling.factor + blend * frequencies
    scaled = torch.where(wavelengths > shortest_divided, frequencies / scaling.factor, frequencies)
    between = (wavelengths >= longest_kept) & (wavelengths <= shortest_divided)
    return torch.where(between, blended, scaled)


def _yarn_frequencies(wavelengths: torch.Tensor, theta: float, head_dim: int, scaling: YarnScaling) -> torch.Tensor:
    """Interpolated where a dimension turns seldom within the original length, kept where it turns often."""

    def dimension_of(num_rotations: float) -> float:
        turns = scaling.original_max_position_embeddings / (num_rotations * 2 * math.pi)
        return (head_dim * math.log(turns)) / (2 * math.log(theta))

    low, high = dimension_of(scaling.beta_fast), dimension_of(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001  # the ramp divides by their difference
    ramp = torch.clamp((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low), 0, 1)
    kept = 1 - ramp
    return 1.0 / (scaling.factor * wavelengths) * (1 - kept) + 1.0 / wavelengths * kept
