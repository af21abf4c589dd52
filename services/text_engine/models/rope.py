"""Rotary position embeddings: the table of cosines and sines that a `RopeConfig` means.

Every formula is transformers', operation by operation, so that the tables are equal to the last bit on the CPU.
"""

from __future__ import annotations

import math

import torch

from services.text_engine.models.config import LinearScaling, Llama3Scaling, RopeConfig, YarnScaling


def cos_sin_table(rope: RopeConfig, head_dim: int, max_positions: int, device: torch.device) -> torch.Tensor:
    """[max_positions, head_dim] fp32: cosines of the head_dim / 2 frequencies at each position, then their sines."""
    frequencies = inverse_frequencies(rope, head_dim)
    angles = torch.arange(max_positions, dtype=torch.float32)[:, None] * frequencies
    table = torch.cat((angles.cos(), angles.sin()), dim=-1)
    if isinstance(rope.scaling, YarnScaling):
        table *= rope.scaling.attention_factor
    return table.to(device)


def cos_sin_at(table: torch.Tensor, positions: torch.Tensor, rope: RopeConfig) -> torch.Tensor:
    """Rows of a `cos_sin_table` for a step's tokens, [num_tokens, head_dim].

    positions  [num_tokens], or with sections [3, num_tokens]: each section's frequencies turn with their coordinate
    """
    rows = table[positions]
    if rope.sections is None:
        return rows
    if rope.interleaved:
        return _interleaved(rows, rope.sections)
    parts = torch.split(rows, list(rope.sections) * 2, dim=-1)  # of the cosines, then of the sines
    return torch.cat([part[i % 3] for i, part in enumerate(parts)], dim=-1)


def _interleaved(rows: torch.Tensor, sections: tuple[int, ...]) -> torch.Tensor:
    """Every third frequency with the line, every third with the column as long as their sections last, the others with
    the frame. rows [3, num_tokens, head_dim], may be overwritten -> [num_tokens, head_dim]
    """
    halves = torch.unflatten(rows, -1, (2, -1))  # cosines, sines
    mixed = halves[0]
    for coordinate in (1, 2):
        every_third = slice(coordinate, 3 * sections[coordinate], 3)
        mixed[..., every_third] = halves[coordinate, ..., every_third]
    return mixed.flatten(-2)


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
