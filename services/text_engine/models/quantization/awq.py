"""AWQ's GEMM layout, 4 bits: a word holds eight outputs of one input, in an order that suited one kernel."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch

from services.text_engine.kernels.grouped_weight import GroupedWeight, whole_input
from services.text_engine.models.config import Fields
from services.text_engine.models.quantization.interface import QuantizedFormat, affine, unpack_words

# The output, within the eight, at each place of a word, from the lowest bits up.
ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def read_format(fields: Fields) -> QuantizedFormat:
    bits = "bits" if "bits" in fields else "w_bit"
    if fields.integer(bits, 4) != 4:
        raise fields.error(bits, "AWQ checkpoints of 4 bits are supported")
    if str(fields.raw("version") or "gemm").lower() != "gemm":
        raise fields.error("version", 'the layout "gemm" is supported; convert the checkpoint, or take its GPTQ form')
    size = "group_size" if "group_size" in fields else "q_group_size"
    group_size = fields.integer(size, 128, minimum=-1)
    return QuantizedFormat("awq", "qweight", ("qweight", "qzeros", "scales"), partial(unpack, group_size=group_size))


def unpack(tensors: Mapping[str, torch.Tensor], shape: tuple[int, int], *, group_size: int) -> GroupedWeight:
    """
    qweight  [in_features, out_features / 8] int32
    qzeros   [num_groups, out_features / 8] int32
    scales   [num_groups, out_features]
    """
    quants = unpack_words(tensors["qweight"], 4, ORDER).t().contiguous()
    zeros = unpack_words(tensors["qzeros"], 4, ORDER).t()
    size = whole_input(shape[1]) if group_size == -1 else group_size
    return affine(quants, tensors["scales"].t(), zeros, 4, size)
