"""Quantized weight matrices in the one layout that `quant_matmul` reads, and the ways into it: AWQ, GPTQ, plain int8.

Plain torch, any device, once at load. A weight w [out_features, in_features] is cut along its inputs into chunks; a
chunk of all outputs lies together, so that any tile of outputs is one contiguous piece of memory. Within an int4
chunk byte j holds inputs j (low nibble) and half + j (high): unpacked, each nibble is a contiguous range of inputs
and nothing needs to be interleaved.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch.nn import functional

INT8_CHUNK = 128
# Column of an AWQ word's nibble i, within the word's eight columns.
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


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


def from_awq(qweight: torch.Tensor, qzeros: torch.Tensor, scales: torch.Tensor, group_size: int) -> Int4Weight:
    """AutoAWQ's GEMM layout.

    qweight  [in_features, out_features / 8] int32
    qzeros   [num_groups, out_features / 8] int32
    scales   [num_groups, out_features]
    """
    return pack_int4(_unpack_columns(qweight, AWQ_ORDER), scales, _unpack_columns(qzeros, AWQ_ORDER), group_size)


def from_gptq(
    qweight: torch.Tensor,
    qzeros: torch.Tensor,
    scales: torch.Tensor,
    group_size: int,
    g_idx: torch.Tensor | None = None,
    *,
    zeros_are_less_one: bool = True,
) -> Int4Weight:
    """AutoGPTQ's layout.

    qweight  [in_features / 8, out_features] int32
    qzeros   [num_groups, out_features / 8] int32
    scales   [num_groups, out_features]
    g_idx    [in_features] int32, the group of each input: with act-order not in runs of group_size
    zeros_are_less_one   the first version of the format stores each zero point less one ("gptq_v2": as it is)
    """
    plain_order = tuple(range(8))
    quants = _unpack_columns(qweight.t(), plain_order).t()
    zeros = _unpack_columns(qzeros, plain_order) + (1 if zeros_are_less_one else 0)
    order = None
    if g_idx is not None and group_size != -1:
        in_runs = torch.arange(quants.shape[0], device=g_idx.device) // group_size
        if not torch.equal(g_idx.long(), in_runs):
            order = torch.argsort(g_idx.long(), stable=True)
            if not torch.equal(g_idx.long()[order], in_runs):
                raise ValueError(f"g_idx does not put {group_size} inputs into each group")
            quants = quants[order]
    return replace(pack_int4(quants, scales, zeros, group_size), input_order=order)


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


def _unpack_columns(words: torch.Tensor, order: tuple[int, ...]) -> torch.Tensor:
    """words [rows, columns / 8] int32, nibble i of a word being its column order[i] -> [rows, columns] uint8"""
    shifts = torch.empty(8, dtype=torch.int32, device=words.device)
    shifts[list(order)] = torch.arange(0, 32, 4, dtype=torch.int32, device=words.device)
    nibbles = (words[:, :, None] >> shifts) & 15
    return nibbles.to(torch.uint8).flatten(1)
