"""fp8 (e4m3) matrices with scales for all of a matrix, for each output or for each tile.

They become int8 in groups of 32: as many bytes, and what that rounds away is a fraction of what e4m3 did (docs/
quantization.md has figures). A CPU has no arithmetic in fp8.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch

from services.text_engine.kernels.grouped_weight import GroupedWeight, quantize
from services.text_engine.models.config import Fields
from services.text_engine.models.quantization.interface import QuantizedFormat

GROUP_SIZE = 32
# DeepSeek's, and everybody's since.
DEFAULT_TILE = (128, 128)


def read_format(fields: Fields) -> QuantizedFormat:
    # DeepSeek's and Qwen's tiles have "inverse" scales, which are multiplied all the same.
    marker = "weight_scale_inv" if "weight_block_size" in fields else "weight_scale"
    tile = read_tile(fields, "weight_block_size")
    tensors = ("weight", marker, "input_scale", "activation_scale", "input_scale_ub")
    return QuantizedFormat("fp8", marker, tensors, partial(unpack, marker=marker, tile=tile))


def read_tile(fields: Fields, field: str) -> tuple[int, int]:
    """Outputs and inputs that share a scale, where there are such tiles."""
    if field not in fields:
        return DEFAULT_TILE
    tile = fields.integers(field)
    if len(tile) != 2:
        raise fields.error(field, "two whole numbers are needed")
    return tile[0], tile[1]


def unpack(
    tensors: Mapping[str, torch.Tensor], _shape: tuple[int, int], *, marker: str, tile: tuple[int, int]
) -> GroupedWeight:
    return from_floats(tensors["weight"], tensors[marker], tile)


def from_floats(weight: torch.Tensor, scales: torch.Tensor, tile: tuple[int, int] = DEFAULT_TILE) -> GroupedWeight:
    """
    weight  [out_features, in_features], any floating-point numbers
    scales  one number, [out_features], [out_features, 1] or one for each tile [tiles down, tiles across]
    tile    outputs and inputs of a tile; the last ones may stick out
    """
    values = weight.float()
    scales = scales.float()
    if scales.dim() < 2:
        scales = scales.reshape(-1, 1)
    for dimension, (length, count, size) in enumerate(zip(values.shape, scales.shape, tile, strict=True)):
        if count in (1, length):
            continue
        if count != -(-length // size):
            raise ValueError(f"{count} scales along {length} weights; tiles of {size} need {-(-length // size)}")
        scales = scales.repeat_interleave(size, dimension).narrow(dimension, 0, length)
    return quantize(values.mul_(scales), bits=8, group_size=GROUP_SIZE, symmetric=True)
