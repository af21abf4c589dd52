"""Products with quantized weights, dequantized in registers: y = x @ w.T + bias.

    int4, per group of inputs:  y[m, n] = Σ_g scale[g, n] * Σ_{k in g} (q[n, k] - zero[g, n]) * x[m, k]
    int8, per output:           y[m, n] = scale[n] * Σ_k q[n, k] * x[m, k]

The differences q - zero are whole numbers, exact in bf16 and fp16; scales multiply fp32 sums. So the only rounding is
that of the result. The weights are the tensor cores' left operand (y.T = w @ x.T): they go from memory through
registers without a second trip through shared memory, and a handful of rows of x costs no more than one.

A small product has too few tiles of outputs to fill the chip, so that its inputs are split over programs too; the one
that arrives last at a tile adds the parts up, in fixed order. The split depends on the weight's shape only, not on the
rows: up to 16 rows a row's result does not depend on its neighbours.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from services.text_engine.kernels.compile_check import CompileCase
from services.text_engine.kernels.quant_layout import INT8_CHUNK, Int4Weight, QuantizedWeight

MAX_TILES = 4096
# Two programs for each of a large chip's multiprocessors keep its memory busy.
WANTED_PROGRAMS = 264
# q OR'ed into these bits is the number 128 + q in bf16, 1024 + q in fp16: conversion without a conversion instruction.
MAGIC_BITS = {torch.bfloat16: 0x4300, torch.float16: 0x6400}


@triton.jit
def _write_out(acc, bias_ptr, out_ptr, m, n, num_rows, out_features, HAS_BIAS: tl.constexpr):
    """acc [BLOCK_N, BLOCK_M] fp32"""
    if HAS_BIAS:
        acc += tl.load(bias_ptr + n, mask=n < out_features, other=0.0).to(tl.float32)[:, None]
    offsets = m.to(tl.int64)[:, None] * out_features + n[None, :]
    mask = (m < num_rows)[:, None] & (n < out_features)[None, :]
    tl.store(out_ptr + offsets, tl.trans(acc).to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _finish(
    acc,
    bias_ptr,
    out_ptr,
    parts_ptr,
    arrivals_ptr,
    m,
    n,
    num_rows,
    out_features,
    HAS_BIAS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    SPLIT_K: tl.constexpr,
):
    """Write the tile; with split inputs, only its last arriver does, after adding all parts."""
    if SPLIT_K == 1:
        _write_out(acc, bias_ptr, out_ptr, m, n, num_rows, out_features, HAS_BIAS)
    else:
        tile = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
        within = tl.arange(0, BLOCK_N)[:, None] * BLOCK_M + tl.arange(0, BLOCK_M)[None, :]
        parts_ptr += tile * (SPLIT_K * BLOCK_N * BLOCK_M)
        tl.store(parts_ptr + tl.program_id(2) * (BLOCK_N * BLOCK_M) + within, acc)
        tl.debug_barrier()  # all threads' parts are written before one thread announces them
        arrived = tl.atomic_add(arrivals_ptr + tile, 1, sem="acq_rel")
        if arrived == SPLIT_K - 1:
            total = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
            for part in range(SPLIT_K):
                # From L2, where the other programs' stores went.
                total += tl.load(parts_ptr + part * (BLOCK_N * BLOCK_M) + within, cache_modifier=".cg")
            _write_out(total, bias_ptr, out_ptr, m, n, num_rows, out_features, HAS_BIAS)
            tl.store(arrivals_ptr + tile, 0)  # ready for the next product


@triton.jit
def _load_inputs(x_ptr, x_stride, m, k, num_rows, in_features):
    """x.T's tile [BLOCK_K, BLOCK_M]; zero outside."""
    mask = (k < in_features)[:, None] & (m < num_rows)[None, :]
    return tl.load(x_ptr + m.to(tl.int64)[None, :] * x_stride + k[:, None], mask=mask, other=0.0)


@triton.jit(do_not_specialize=["num_rows"])
def _int4_matmul(
    x_ptr,
    packed_ptr,
    groups_ptr,
    bias_ptr,
    out_ptr,
    parts_ptr,
    arrivals_ptr,
    num_rows,
    in_features,
    out_features,
    x_stride,
    chunks_per_split,
    GROUP: tl.constexpr,
    HALF: tl.constexpr,
    MAGIC: tl.constexpr,
    SCALE_IS_BF16: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    SPLIT_K: tl.constexpr,
):
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_output = n < out_features
    within = tl.arange(0, HALF)
    scale_dtype: tl.constexpr = tl.bfloat16 if SCALE_IS_BF16 else tl.float16
    acc = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    first = tl.program_id(2) * chunks_per_split
    last = tl.minimum(first + chunks_per_split, tl.cdiv(in_features, 2 * HALF))
    for chunk in range(first, last):
        # Reads BLOCK_N * HALF contiguous bytes of weights, once in all (once for each BLOCK_M rows).
        offsets = (chunk * out_features + n).to(tl.int64)[:, None] * HALF + within[None, :]
        packed = tl.load(packed_ptr + offsets, mask=is_output[:, None], other=0)
        for plane in tl.static_range(2):
            # Reads a row of scales and zero points for each group, and the inputs (L2).
            if plane == 0 or GROUP < 2 * HALF:
                group = ((chunk * 2 + plane) * HALF // GROUP) * out_features + n
                word = tl.load(groups_ptr + group, mask=is_output, other=0)
                zero = ((word >> 16) | MAGIC).to(tl.int16).to(x_ptr.dtype.element_ty, bitcast=True)
                scale = word.to(tl.int16).to(scale_dtype, bitcast=True).to(tl.float32)
            x = _load_inputs(x_ptr, x_stride, m, (chunk * 2 + plane) * HALF + within, num_rows, in_features)
            nibbles = (packed >> 4) if plane == 1 else (packed & 15)
            quants = (nibbles.to(tl.int16) | MAGIC).to(tl.int16).to(x.dtype, bitcast=True)
            acc += tl.dot(quants - zero[:, None], x) * scale[:, None]
    _finish(
        acc,
        bias_ptr,
        out_ptr,
        parts_ptr,
        arrivals_ptr,
        m,
        n,
        num_rows,
        out_features,
        HAS_BIAS,
        BLOCK_N,
        BLOCK_M,
        SPLIT_K,
    )


@triton.jit(do_not_specialize=["num_rows"])
def _int8_matmul(
    x_ptr,
    values_ptr,
    scales_ptr,
    bias_ptr,
    out_ptr,
    parts_ptr,
    arrivals_ptr,
    num_rows,
    in_features,
    out_features,
    x_stride,
    chunks_per_split,
    CHUNK: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    SPLIT_K: tl.constexpr,
):
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_output = n < out_features
    within = tl.arange(0, CHUNK)
    acc = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    first = tl.program_id(2) * chunks_per_split
    last = tl.minimum(first + chunks_per_split, tl.cdiv(in_features, CHUNK))
    for chunk in range(first, last):
        # Reads BLOCK_N * CHUNK contiguous bytes of weights, and the inputs (L2).
        offsets = (chunk * out_features + n).to(tl.int64)[:, None] * CHUNK + within[None, :]
        values = tl.load(values_ptr + offsets, mask=is_output[:, None], other=0)
        x = _load_inputs(x_ptr, x_stride, m, chunk * CHUNK + within, num_rows, in_features)
        acc = tl.dot(values.to(x.dtype), x, acc)
    acc *= tl.load(scales_ptr + n, mask=is_output, other=0.0)[:, None]
    _finish(
        acc,
        bias_ptr,
        out_ptr,
        parts_ptr,
        arrivals_ptr,
        m,
        n,
        num_rows,
        out_features,
        HAS_BIAS,
        BLOCK_N,
        BLOCK_M,
        SPLIT_K,
    )


@dataclass(frozen=True, slots=True)
class Tile:
    block_n: int
    block_m: int
    split_k: int
    num_warps: int
    num_stages: int


def choose_tile(num_rows: int, out_features: int, num_chunks: int) -> Tile:
    """Few rows: narrow tiles and split inputs, to keep the memory busy. Many: square tiles, for the tensor cores."""
    if num_rows > 64:
        return Tile(128, 128, split_k=1, num_warps=8, num_stages=3)
    block_m = 16 if num_rows <= 16 else 64
    split_k, num_tiles = 1, triton.cdiv(out_features, 64)
    while split_k < 16 and num_tiles * split_k < WANTED_PROGRAMS and num_chunks >= 8 * split_k:
        split_k *= 2
    return Tile(64, block_m, split_k, num_warps=4, num_stages=4 if block_m == 16 else 3)


class QuantLinear:
    """`models.layers.Product` of a quantized weight.

    arrivals  [MAX_TILES] int32 zeros, which every product leaves zero: all products of one stream may share it
    """

    def __init__(self, weight: QuantizedWeight, bias: torch.Tensor | None, arrivals: torch.Tensor) -> None:
        self._weight = weight
        self._bias = bias
        self._arrivals = arrivals

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return quant_matmul(x, self._weight, self._bias, self._arrivals)


def make_arrivals(device: torch.device) -> torch.Tensor:
    return torch.zeros(MAX_TILES, dtype=torch.int32, device=device)


def quant_matmul(
    x: torch.Tensor, weight: QuantizedWeight, bias: torch.Tensor | None, arrivals: torch.Tensor
) -> torch.Tensor:
    """x @ dequantized(weight).T + bias

    x         [num_rows, in_features] bf16 or fp16
    bias      [out_features] or None
    arrivals  see QuantLinear
    returns   [num_rows, out_features] in x's dtype
    """
    num_rows, in_features = x.shape
    assert in_features == weight.in_features
    assert x.dtype in MAGIC_BITS, f"{x.dtype} activations; quantized weights take bf16 or fp16"
    assert bias is None or (bias.shape == (weight.out_features,) and bias.is_contiguous())
    assert arrivals.dtype == torch.int32
    out = torch.empty((num_rows, weight.out_features), dtype=x.dtype, device=x.device)
    if num_rows == 0:
        return out
    if isinstance(weight, Int4Weight) and weight.input_order is not None:
        x = x.index_select(1, weight.input_order)
    elif x.stride(1) != 1:
        x = x.contiguous()
    num_chunks = (weight.packed if isinstance(weight, Int4Weight) else weight.values).shape[0]
    tile = choose_tile(num_rows, weight.out_features, num_chunks)
    grid = (triton.cdiv(num_rows, tile.block_m), triton.cdiv(weight.out_features, tile.block_n), tile.split_k)
    parts = out
    if tile.split_k > 1:
        assert grid[0] * grid[1] <= arrivals.numel()
        num_parts = grid[0] * grid[1] * tile.split_k
        parts = torch.empty(num_parts * tile.block_n * tile.block_m, dtype=torch.float32, device=x.device)
    common: dict[str, Any] = {
        "bias_ptr": out if bias is None else bias,
        "out_ptr": out,
        "parts_ptr": parts,
        "arrivals_ptr": arrivals,
        "num_rows": num_rows,
        "in_features": in_features,
        "out_features": weight.out_features,
        "x_stride": x.stride(0),
        "chunks_per_split": triton.cdiv(num_chunks, tile.split_k),
        "HAS_BIAS": bias is not None,
        "BLOCK_N": tile.block_n,
        "BLOCK_M": tile.block_m,
        "SPLIT_K": tile.split_k,
        "num_warps": tile.num_warps,
        "num_stages": tile.num_stages,
    }
    if isinstance(weight, Int4Weight):
        _int4_matmul[grid](
            x,
            weight.packed,
            weight.groups,
            GROUP=weight.group_size,
            HALF=weight.half,
            MAGIC=MAGIC_BITS[x.dtype],
            SCALE_IS_BF16=weight.scale_dtype == torch.bfloat16,
            **common,
        )
    else:
        _int8_matmul[grid](x, weight.values, weight.scales, CHUNK=INT8_CHUNK, **common)
    return out


def compile_cases() -> list[CompileCase]:
    """Every tile that `choose_tile` gives, with and without split inputs; other kinds of int4 at the smallest."""
    few, wide, some, many = (
        choose_tile(num_rows, out_features, num_chunks=32)
        for num_rows, out_features in ((1, 4096), (1, 28672), (64, 4096), (512, 4096))
    )
    return [
        *(_int4_case("int4", tile) for tile in (few, wide, some, many)),
        _int4_case("int4 groups of 32", few, group=32),
        _int4_case("int4 fp16 + bias", few, dtype="fp16", has_bias=True),
        *(_int8_case("int8", tile) for tile in (few, wide, some, many)),
    ]


def _int4_case(name: str, tile: Tile, *, group: int = 128, dtype: str = "bf16", has_bias: bool = False) -> CompileCase:
    magic = MAGIC_BITS[torch.float16 if dtype == "fp16" else torch.bfloat16]
    kind = {"GROUP": group, "HALF": min(group, 64), "MAGIC": magic, "SCALE_IS_BF16": False}
    weights = {"packed_ptr": "*u8", "groups_ptr": "*i32"}
    return _case(name, _int4_matmul, tile, weights, kind, dtype=dtype, has_bias=has_bias)


def _int8_case(name: str, tile: Tile) -> CompileCase:
    weights = {"values_ptr": "*i8", "scales_ptr": "*fp32"}
    return _case(name, _int8_matmul, tile, weights, {"CHUNK": INT8_CHUNK}, dtype="bf16", has_bias=False)


def _case(
    name: str, kernel: Any, tile: Tile, weights: dict[str, str], kind: dict[str, Any], *, dtype: str, has_bias: bool
) -> CompileCase:
    pointers = {
        "x_ptr": f"*{dtype}",
        **weights,
        **dict.fromkeys(("bias_ptr", "out_ptr"), f"*{dtype}"),
        "parts_ptr": "*fp32",
        "arrivals_ptr": "*i32",
    }
    integers = dict.fromkeys(("num_rows", "in_features", "out_features", "x_stride", "chunks_per_split"), "i32")
    blocks = {"HAS_BIAS": has_bias, "BLOCK_N": tile.block_n, "BLOCK_M": tile.block_m, "SPLIT_K": tile.split_k}
    constexprs = {**kind, **blocks}
    return CompileCase(
        name=f"{name} matmul {tile.block_n}x{tile.block_m} split {tile.split_k}",
        kernel=kernel,
        signature={**pointers, **integers, **dict.fromkeys(constexprs, "constexpr")},
        constexprs=constexprs,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        is_hot=tile.block_m <= 64,
        ptx_contains=("mma.sync|wgmma.mma_async|tcgen05.mma", "cp.async"),
        divisible_by_16=frozenset((*pointers, "in_features", "out_features", "x_stride")),
    )
