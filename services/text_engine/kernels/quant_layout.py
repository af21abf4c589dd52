"""Quantized weight matrices in the one layout that `quant_matmul` reads, and the ways into it.

Plain torch, any device, once at load. A weight w [out_features, in_features] is cut along its inputs into chunks; a
chunk of all outputs lies together, so that any tile of outputs is one contiguous piece of memory. Within an int4
chunk byte j holds inputs j (low nibble) and half + j (high): unpacked, each nibble is a contiguous range of inputs
and nothing needs to be interleaved.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch.nn import functional

from services.text_engine.kernels.grouped_weight import GroupedWeight

INT8_CHUNK = 128


@dataclass(frozen=True, slots=True)
class Int4Weight:
    """w[n, k] = (q[n, k] - zeros[k // group_size, n]) * scales[k // group_size, n]

    packed       [num_chunks, out_features, half] uint8, half = 64, or 32 for groups of 32; 0 past in_features
    groups       [num_groups, out_features] int32: the zero point, 0 to 16, in the high half, the bits of the scale in
                 the low: one word, since only copies of 4 bytes or more run ahead of the arithmetic
    scale_dtype  fp16 or bf16
    input_order  [in_features] int64: which input of the layer is input k here (GPTQ's act-order); None: k itself
    """

    packed: torch.Tensor
    groups: torch.Tensor
    scale_dtype: torch.dtype
    in_features: int
    group_size: int
    input_order: torch.Tensor | None = None

    @property
    def out_features(self) -> int:
        return self.packed.shape[1]

    @property
    def half(self) -> int:
        return self.packed.shape[2]

    @property
    def size_bytes(self) -> int:
        return self.packed.nbytes + self.groups.nbytes


@dataclass(frozen=True, slots=True)
class Int8Weight:
    """w[n, k] = q[n, k] * scales[n]

    values  [num_chunks, out_features, INT8_CHUNK] int8; inputs past in_features are 0
    scales  [out_features] fp32
    """

    values: torch.Tensor
    scales: torch.Tensor
    in_features: int

    @property
    def out_features(self) -> int:
        return self.values.shape[1]

    @property
    def size_bytes(self) -> int:
        return self.values.nbytes + self.scales.nbytes


QuantizedWeight = Int4Weight | Int8Weight


def pack_int4(quants: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor, group_size: int) -> Int4Weight:
    """Any int4 weight in our layout.

    quants      [in_features, out_features], 0 to 15
    scales      [num_groups, out_features] fp16 or bf16
    zeros       [num_groups, out_features], 0 to 16
    group_size  32 or a multiple of 64; -1: the whole input is one group
    """
    if scales.dtype not in (torch.float16, torch.bfloat16):
        raise ValueError(f"scales of {scales.dtype}; int4 takes float16 or bfloat16")
    in_features, out_features = quants.shape
    if group_size == -1:
        group_size = -(-in_features // 64) * 64
    if group_size != 32 and (group_size <= 0 or group_size % 64):
        raise ValueError(f"groups of {group_size} weights; int4 takes 32, multiples of 64, or -1 for the whole input")
    num_groups = -(-in_features // group_size)
    if scales.shape != (num_groups, out_features) or zeros.shape != scales.shape:
        raise ValueError(
            f"scales {list(scales.shape)} and zero points {list(zeros.shape)} for {in_features} inputs in groups of "
            f"{group_size}; wanted [{num_groups}, {out_features}]"
        )
    half = min(group_size, 64)
    padded = functional.pad(quants.to(torch.uint8), (0, 0, 0, -in_features % (2 * half)))
    low, high = padded.view(-1, 2, half, out_features).unbind(1)  # each [num_chunks, half, out_features]
    scale_bits = scales.contiguous().view(torch.int16).to(torch.int32) & 0xFFFF
    groups = (zeros.to(torch.int32) << 16) | scale_bits
    # A last chunk that reaches past the last group reads that group's row again; its inputs are zero.
    num_rows = -(-padded.shape[0] // group_size)
    return Int4Weight(
        packed=(low | (high << 4)).transpose(1, 2).contiguous(),
        groups=torch.cat((groups, groups[-1:].expand(num_rows - num_groups, -1))),
        scale_dtype=scales.dtype,
        in_features=in_features,
        group_size=group_size,
    )


def pack_int8(quants: torch.Tensor, scales: torch.Tensor) -> Int8Weight:
    """quants [out_features, in_features] int8, scales [out_features]"""
    out_features, in_features = quants.shape
    padded = functional.pad(quants, (0, -in_features % INT8_CHUNK))
    values = padded.view(out_features, -1, INT8_CHUNK).transpose(0, 1).contiguous()
    return Int8Weight(values, scales.float().contiguous(), in_features)


def quantize_int8(weight: torch.Tensor) -> Int8Weight:
    """Round each output's weights to -127 .. 127 of its largest. weight [out_features, in_features]"""
    scales = weight.float().abs().amax(1).clamp(min=torch.finfo(torch.float32).tiny * 127) / 127
    return pack_int8((weight.float() / scales[:, None]).round().to(torch.int8), scales)


def from_grouped(weight: GroupedWeight) -> QuantizedWeight:
    """Any quantized matrix, scales of int4 rounded to fp16; what this layout cannot say is rounded anew, to int8."""
    if weight.bits == 8 and weight.minimums is None and weight.scales.shape[1] == 1 and weight.input_order is None:
        return pack_int8((weight.quants.to(torch.int16) - weight.zero).to(torch.int8), weight.scales[:, 0])
    zeros = torch.full_like(weight.scales, weight.zero)
    if weight.minimums is not None:
        zeros = -weight.minimums / weight.scales
    are_whole = bool(((zeros - zeros.round()).abs() < 1e-3).all() and (zeros >= 0).all() and (zeros <= 16).all())
    group_size = weight.group_size if weight.scales.shape[1] > 1 else -1
    fits = weight.bits == 4 and are_whole and (group_size in (-1, 32) or group_size % 64 == 0)
    if not fits:
        return quantize_int8(weight.dequantize())
    scales = weight.scales.to(torch.float16).t().contiguous()
    packed = pack_int4(weight.quants.t(), scales, zeros.round().t(), group_size)
    return replace(packed, input_order=weight.input_order)
