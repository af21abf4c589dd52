"""GPTQ, 4 and 8 bits: a word holds neighbouring inputs of one output.

With act-order (desc_act) inputs belong to groups in no order; they are sorted by group once, here, and the layer's
input is picked in that order.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch

from services.text_engine.kernels.grouped_weight import GroupedWeight, whole_input
from services.text_engine.models.config import Fields
from services.text_engine.models.quantization.interface import QuantizedFormat, affine, unpack_words


def read_format(fields: Fields) -> QuantizedFormat:
    bits = fields.integer("bits", 4)
    if bits not in (4, 8):
        raise fields.error("bits", "GPTQ checkpoints of 4 and 8 bits are supported")
    layout = fields.raw("checkpoint_format") or "gptq"
    if layout not in ("gptq", "gptq_v2"):
        raise fields.error("checkpoint_format", 'the layouts "gptq" and "gptq_v2" are supported')
    group_size = fields.integer("group_size", 128, minimum=-1)
    zero_offset = 1 if layout == "gptq" else 0
    return QuantizedFormat(
        "gptq",
        "qweight",
        ("qweight", "qzeros", "scales", "g_idx"),
        partial(unpack, bits=bits, group_size=group_size, zero_offset=zero_offset),
    )


def unpack(
    tensors: Mapping[str, torch.Tensor], shape: tuple[int, int], *, bits: int, group_size: int, zero_offset: int
) -> GroupedWeight:
    """
    qweight      [in_features * bits / 32, out_features] int32
    qzeros       [num_groups, out_features * bits / 32] int32
    scales       [num_groups, out_features]
    g_idx        [in_features] int32, the group of each input; may be missing
    zero_offset  what the stored zeros lack: the first version of the format stores them less one
    """
    in_features = shape[1]
    quants = unpack_words(tensors["qweight"].t(), bits)
    zeros = unpack_words(tensors["qzeros"], bits).t().int() + zero_offset
    size = whole_input(in_features) if group_size == -1 else group_size
    order = input_order(tensors.get("g_idx"), in_features, size)
    quants = quants.contiguous() if order is None else quants[:, order]
    return affine(quants, tensors["scales"].t(), zeros, bits, size, order)


def input_order(g_idx: torch.Tensor | None, in_features: int, group_size: int) -> torch.Tensor | None:
    """The inputs sorted by group; None where they are. Raises ValueError unless every group is full."""
    in_runs = torch.arange(in_features) // group_size
    if g_idx is None or torch.equal(g_idx.long(), in_runs):
        return None
    order = torch.argsort(g_idx.long(), stable=True)
    if not torch.equal(g_idx.long()[order], in_runs):
        raise ValueError(f"g_idx does not put {group_size} inputs into each group")
    return order
