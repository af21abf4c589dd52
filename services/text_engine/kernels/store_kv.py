"""Rotary embedding of queries and keys, and the new keys and values into the paged cache: one launch.

    (a, b) -> (a cos - b sin, b cos + a sin)      a, b: the halves of a head
    quantized: e = round(x / max|x| * largest)    max|x| over the head, kept beside it in fp32

Each element is read once and written once; queries are rotated in place. The formats are `kv_layout`'s.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from services.text_engine.kernels.compile_check import CompileCase
from services.text_engine.kernels.kv_layout import KVFormat, KVLayout
from services.text_engine.kernels.launch_plan import next_power_of_2

ELEMENTS_PER_PROGRAM = 2048  # of heads, which are its rows, together


@triton.jit
def _rotate(first, second, cos, sin, DTYPE: tl.constexpr):
    first, second = first.to(tl.float32), second.to(tl.float32)
    return (first * cos - second * sin).to(DTYPE), (second * cos + first * sin).to(DTYPE)


@triton.jit
def _to_e4m3(x):
    """The bits of the nearest e4m3 number, ties to even; |x| <= 448. Not every GPU that can hold fp8 can convert it."""
    bits = x.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    # Normal numbers: round the mantissa to 3 bits, and the exponent's bias from 127 to 7.
    normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - (120 << 3)
    # Below 2^-6 they are multiples of 2^-9; fp32 numbers just above 2^23 are integers, so that adding it rounds.
    subnormal = (tl.abs(x) * 512.0 + 8388608.0).to(tl.int32, bitcast=True) & 0xF
    # Not 0x7F, which is e4m3's NaN: attention may read whatever was stored, with weight 0.
    encoded = tl.minimum(tl.where(magnitude < 0x3C800000, subnormal, normal), 0x7E)
    return (encoded | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def _quantize(x, factor, IS_FP8: tl.constexpr):
    scaled = x.to(tl.float32) * factor[:, None]
    if IS_FP8:
        return _to_e4m3(scaled)
    return (scaled + 128.5).to(tl.uint8)


@triton.jit
def _store_rows(
    row_ptr, scale_ptr, first, second, is_row, half, mask,
    HALF: tl.constexpr, ELEMENT_STRIDE: tl.constexpr, LARGEST: tl.constexpr, IS_QUANTIZED: tl.constexpr,
    IS_FP8: tl.constexpr,
):  # fmt: skip
    """first, second [BLOCK_ROWS, BLOCK_HALF]: the halves of heads, each to its row_ptr."""
    if IS_QUANTIZED:
        largest = tl.maximum(
            tl.max(tl.abs(first.to(tl.float32)), axis=1), tl.max(tl.abs(second.to(tl.float32)), axis=1)
        )
        factor = LARGEST / tl.where(largest > 0, largest, 1.0)
        first, second = _quantize(first, factor, IS_FP8), _quantize(second, factor, IS_FP8)
        # Writes one scale a head.
        tl.store(scale_ptr, largest, mask=is_row)
    # Writes the row, half by half.
    first_ptr = row_ptr[:, None] + half[None, :] * ELEMENT_STRIDE
    tl.store(first_ptr, first, mask=mask)
    tl.store(first_ptr + HALF * ELEMENT_STRIDE, second, mask=mask)


@triton.jit(do_not_specialize=["num_tokens"], do_not_specialize_on_alignment=["slot_mapping_ptr"])
def store_kv_kernel(
    query_ptr,
    key_ptr,
    value_ptr,
    cos_sin_ptr,
    kv_ptr,
    scales_ptr,
    slot_mapping_ptr,
    num_tokens,
    query_token_stride,
    query_head_stride,
    key_token_stride,
    key_head_stride,
    value_token_stride,
    value_head_stride,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROW_STRIDE: tl.constexpr,
    HEAD_STRIDE: tl.constexpr,
    SCALES_OFFSET: tl.constexpr,
    LARGEST: tl.constexpr,
    IS_QUANTIZED: tl.constexpr,
    IS_FP8: tl.constexpr,
):
    """The first programs rotate BLOCK_ROWS query heads each, whosever tokens', the others store as many key heads."""
    query_programs = tl.cdiv(num_tokens * NUM_HEADS, BLOCK_ROWS)
    program = tl.program_id(0)
    is_query = program < query_programs
    heads_per_token = tl.where(is_query, NUM_HEADS, NUM_KV_HEADS)
    row = tl.where(is_query, program, program - query_programs) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    token = (row // heads_per_token).to(tl.int64)
    head = row % heads_per_token
    half = tl.arange(0, BLOCK_HALF)
    in_half = half < HALF
    is_row = token < num_tokens
    mask = is_row[:, None] & in_half[None, :]

    # Reads each token's row of the table; its heads share it in L1.
    cos_ptr = cos_sin_ptr + (token * (2 * HALF))[:, None] + half[None, :]
    cos = tl.load(cos_ptr, mask=mask, other=0.0)
    sin = tl.load(cos_ptr + HALF, mask=mask, other=0.0)
    if is_query:
        # Reads and writes the queries, in place.
        first_ptr = query_ptr + (token * query_token_stride + head * query_head_stride)[:, None] + half[None, :]
        first = tl.load(first_ptr, mask=mask, other=0.0)
        second = tl.load(first_ptr + HALF, mask=mask, other=0.0)
        first, second = _rotate(first, second, cos, sin, first.dtype)
        tl.store(first_ptr, first, mask=mask)
        tl.store(first_ptr + HALF, second, mask=mask)
    else:
        slot = tl.load(slot_mapping_ptr + token, mask=is_row, other=-1)
        is_row = slot >= 0
        mask = is_row[:, None] & in_half[None, :]
        block_head, offset = (slot // BLOCK_SIZE) * NUM_KV_HEADS + head, slot % BLOCK_SIZE
        head_ptr = kv_ptr + block_head * HEAD_STRIDE
        scale_ptr = scales_ptr + block_head * (HEAD_STRIDE // 4) + SCALES_OFFSET + offset
        # Reads and writes the keys.
        key_row_ptr = key_ptr + (token * key_token_stride + head * key_head_stride)[:, None] + half[None, :]
        first = tl.load(key_row_ptr, mask=mask, other=0.0)
        second = tl.load(key_row_ptr + HALF, mask=mask, other=0.0)
        first, second = _rotate(first, second, cos, sin, first.dtype)
        _store_rows(
            head_ptr + offset * ROW_STRIDE, scale_ptr, first, second, is_row, half, mask,
            HALF, 1, LARGEST, IS_QUANTIZED, IS_FP8,
        )  # fmt: skip
        # Reads and writes the values, which follow the keys of their block.
        value_row_ptr = value_ptr + (token * value_token_stride + head * value_head_stride)[:, None] + half[None, :]
        first = tl.load(value_row_ptr, mask=mask, other=0.0)
        second = tl.load(value_row_ptr + HALF, mask=mask, other=0.0)
        _store_rows(
            head_ptr + BLOCK_SIZE * ROW_STRIDE + offset * (1 if IS_QUANTIZED else ROW_STRIDE), scale_ptr + BLOCK_SIZE,
            first, second, is_row, half, mask,
            HALF, BLOCK_SIZE if IS_QUANTIZED else 1, LARGEST, IS_QUANTIZED, IS_FP8,
        )  # fmt: skip


def store_kv(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cos_sin: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    layout: KVLayout,
) -> None:
    """Rotate query in place; rotate key and write it, and value, where slot_mapping says.

    query         [num_tokens, num_heads, head_dim]; key, value [num_tokens, num_kv_heads, head_dim]; any strides of
                  tokens and heads
    cos_sin       [num_tokens, head_dim] fp32
    kv_cache      as `layout.allocate` makes it
    slot_mapping  [num_tokens] int64; -1: nowhere
    """
    num_tokens, num_heads, head_dim = query.shape
    layout.check(kv_cache)
    assert query.dtype == key.dtype == value.dtype == layout.dtype
    assert key.shape == value.shape == (num_tokens, layout.num_kv_heads, head_dim)
    assert query.stride(2) == key.stride(2) == value.stride(2) == 1
    assert head_dim == layout.head_dim
    assert head_dim % 2 == 0
    assert cos_sin.shape == (num_tokens, head_dim)
    assert cos_sin.dtype == torch.float32
    assert cos_sin.is_contiguous()
    assert slot_mapping.shape == (num_tokens,)
    assert slot_mapping.dtype == torch.int64
    assert slot_mapping.is_contiguous()
    values = constexprs(layout, num_heads)
    block_rows = values["BLOCK_ROWS"]
    grid = (-(-num_tokens * num_heads // block_rows) + -(-num_tokens * layout.num_kv_heads // block_rows),)
    store_kv_kernel[grid](
        query,
        key,
        value,
        cos_sin,
        kv_cache,
        layout.scales(kv_cache),
        slot_mapping,
        num_tokens,
        *query.stride()[:2],
        *key.stride()[:2],
        *value.stride()[:2],
        **values,
        num_warps=num_warps(values),
    )


def constexprs(layout: KVLayout, num_heads: int) -> dict[str, int]:
    block_half = next_power_of_2(layout.head_dim // 2)
    return {
        "NUM_HEADS": num_heads,
        "NUM_KV_HEADS": layout.num_kv_heads,
        "HALF": layout.head_dim // 2,
        "BLOCK_ROWS": max(1, ELEMENTS_PER_PROGRAM // (2 * block_half)),
        "BLOCK_HALF": block_half,
        "BLOCK_SIZE": layout.block_size,
        "ROW_STRIDE": layout.row_stride,
        "HEAD_STRIDE": layout.head_stride,
        "SCALES_OFFSET": layout.scales_offset,
        "LARGEST": int(layout.largest),
        "IS_QUANTIZED": layout.is_quantized,
        "IS_FP8": layout.format == "fp8",
    }


def num_warps(values: dict[str, int]) -> int:
    """8 elements of each half a thread: 16 bytes."""
    return max(1, values["BLOCK_ROWS"] * values["BLOCK_HALF"] // 256)


def compile_cases() -> list[CompileCase]:
    """Well-known models' shapes: (query heads, key heads, head_dim)."""
    bf16, fp16 = torch.bfloat16, torch.float16
    return [
        _compile_case("Llama-3-8B bf16", 32, 8, 128, bf16, "auto"),
        _compile_case("Llama-3-8B bf16, fp8 cache", 32, 8, 128, bf16, "fp8"),
        _compile_case("Llama-3-8B bf16, int8 cache", 32, 8, 128, bf16, "int8"),
        _compile_case("Vicuna-7B fp16", 32, 32, 128, fp16, "auto"),
        _compile_case("Qwen2.5-7B bf16", 28, 4, 128, bf16, "auto"),
        _compile_case("SmolLM2-135M bf16", 9, 3, 64, bf16, "auto"),
        _compile_case("Phi-2 fp16", 32, 32, 80, fp16, "auto"),
        _compile_case("Phi-3-mini bf16", 32, 32, 96, bf16, "auto"),
        _compile_case("Gemma-2-9B bf16, fp8 cache", 16, 8, 256, bf16, "fp8"),
    ]


def _compile_case(
    model: str, num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, kv_format: KVFormat
) -> CompileCase:
    layout = KVLayout(num_kv_heads, head_dim, 16, dtype, kv_format)
    values = constexprs(layout, num_heads)
    element = {torch.bfloat16: "*bf16", torch.float16: "*fp16"}[dtype]
    types = dict.fromkeys(("query_ptr", "key_ptr", "value_ptr", "kv_ptr", "scales_ptr"), element)
    types |= {"kv_ptr": "*u8", "scales_ptr": "*fp32"} if layout.is_quantized else {}
    types |= {"cos_sin_ptr": "*fp32", "slot_mapping_ptr": "*i64"} | dict.fromkeys(values, "constexpr")
    names = store_kv_kernel.arg_names
    return CompileCase(
        name=f"store_kv, {model}",
        kernel=store_kv_kernel,
        signature={name: types.get(name, "i32") for name in names},
        constexprs=values,
        num_warps=num_warps(values),
        num_stages=3,
        ptx_contains=("ld.global.v4.b32", "st.global.v4.b32"),
        divisible_by_16=frozenset(name for name in names if name.endswith(("_stride", "_ptr"))) - {"slot_mapping_ptr"},
    )
