"""compressed-tensors (llm-compressor): int8 and fp8 matrices, and integers of 4 or 8 bits packed into words.

What is stored says how it is to be read: bits and groups follow from the tensors' shapes, so that a checkpoint may mix
them; only where the last group is short the configuration has to say how long the others are. How the activations were
meant to be quantized is not followed: the products round theirs in their own way.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import partial

import torch

from services.text_engine.kernels.grouped_weight import GroupedWeight, whole_input
from services.text_engine.models.config import Fields
from services.text_engine.models.quantization.fp8 import from_floats
from services.text_engine.models.quantization.gptq import input_order
from services.text_engine.models.quantization.interface import QuantizedFormat, affine, unpack_words

LAYOUTS = ("int-quantized", "naive-quantized", "float-quantized", "pack-quantized", "mixed-precision")


def read_format(fields: Fields) -> QuantizedFormat:
    if fields.raw("format") not in LAYOUTS:
        raise fields.error("format", f"supported: {', '.join(LAYOUTS)}")
    if "sparsity_config" in fields and fields.nested("sparsity_config").raw("format") not in (None, "dense"):
        raise fields.nested("sparsity_config").error("format", 'matrices without their zeros are not read; "dense" are')
    if "transform_config" in fields and fields.nested("transform_config").raw("config_groups"):
        raise fields.error("transform_config", "checkpoints with rotated weights are not supported")
    tensors = ("weight", "weight_packed", "weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx")
    ignored = ("input_scale", "input_zero_point", "output_scale")
    unpacked = partial(unpack, stated_sizes=_stated_sizes(fields))
    return QuantizedFormat("compressed-tensors", "weight_scale", (*tensors, *ignored), unpacked)


def _stated_sizes(fields: Fields) -> frozenset[int]:
    """The sizes of groups that the configuration names for any matrix."""
    schemes, names = fields.nested("config_groups"), fields.raw("config_groups")
    sizes = [
        schemes.nested(name).nested("weights").raw("group_size") for name in (names if isinstance(names, dict) else ())
    ]
    return frozenset(size for size in sizes if isinstance(size, int) and size > 0)


def unpack(
    tensors: Mapping[str, torch.Tensor], shape: tuple[int, int], *, stated_sizes: Collection[int] = ()
) -> GroupedWeight:
    """
    weight             [out_features, in_features] int8 or fp8, or instead of it
    weight_packed      [out_features, in_features * bits / 32] int32: q + 2 ** (bits - 1), the first in the lowest bits
    weight_scale       one number, [out_features, 1] or [out_features, num_groups]; of fp8 also one for each tile
    weight_zero_point  as the scales, int8; with weight_packed packed along the outputs; missing: zero
    weight_g_idx       [in_features], the group of each input; may be missing
    stated_sizes       of groups, as the configuration has them
    """
    out_features, in_features = shape
    scales = tensors["weight_scale"]
    if "weight_packed" not in tensors:
        stored = tensors["weight"]
        if stored.dtype.is_floating_point:
            return from_floats(stored, scales)
        bits = 8
        quants = (stored.int() + 128).to(torch.uint8)
    else:
        words = tensors["weight_packed"]
        bits = next((bits for bits in (4, 8) if words.shape[1] == -(-in_features * bits // 32)), 0)
        if not bits:
            raise ValueError(f"weight_packed of shape {tuple(words.shape)}: integers of 4 and 8 bits are supported")
        quants = unpack_words(words, bits)[:, :in_features].contiguous()
    scales = scales.float().reshape(-1, 1) if scales.numel() in (1, out_features) else scales.float()
    scales = scales.expand(out_features, -1)
    size = _group_size(in_features, scales.shape[1], stated_sizes)
    zeros = torch.full_like(scales, 1 << (bits - 1))
    if "weight_zero_point" in tensors:
        stored = tensors["weight_zero_point"]
        if stored.dtype == torch.int32:
            zeros = unpack_words(stored.t(), bits).t()[:out_features].float()
        else:
            zeros = zeros + stored.float().reshape(-1, zeros.shape[1] if stored.numel() > 1 else 1)
    order = input_order(tensors.get("weight_g_idx"), in_features, size)
    return affine(quants if order is None else quants[:, order], scales.contiguous(), zeros, bits, size, order)


def _group_size(in_features: int, num_groups: int, stated_sizes: Collection[int]) -> int:
    if num_groups == 1:
        return whole_input(in_features)
    equal_size, rest = divmod(in_features, num_groups)
    possible = [size for size in stated_sizes if -(-in_features // size) == num_groups]
    if possible and (rest or equal_size not in possible):
        return possible[0]
    if rest:
        raise ValueError(
            f"weight_scale has {num_groups} groups for {in_features} inputs, so that the last one is short, and no "
            "group_size in config_groups makes so many"
        )
    return equal_size
