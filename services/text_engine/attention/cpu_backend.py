"""Attention on the CPU: compiled kernels that read the paged KV cache in place. The algorithm: native/attention.cpp.

A token's result is the same bit for bit whatever else is in the batch, however its prompt was chunked and however many
threads work; with a cache of bytes too.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap
from ctypes import c_float, c_int32, c_int64, c_void_p

import torch
from torch.nn import functional

from services.text_engine.attention.interface import AttentionMetadata, AttentionShape
from services.text_engine.kernels.kv_layout import KVFormat
from services.text_engine.kernels.native import NativeKernels
from services.text_engine.kernels.native_library import CACHE_TYPES, ELEMENT_TYPES, NativeLibrary

BLOCK_SIZE = 16
# The kernels step through a head in vectors of 16 elements; other heads are padded with zeros, which change no sum.
HEAD_DIM_MULTIPLE = 16
MAX_HEAD_DIM = 256
STEP_BYTES = 4


class AttentionCall(ctypes.Structure):
    """Mirrors `AttentionCall` in native/attention.cpp, which says what each field means."""

    _fields_ = (
        ("query", c_void_p),
        ("key", c_void_p),
        ("value", c_void_p),
        ("kv_cache", c_void_p),
        ("output", c_void_p),
        ("cu_seqlens_q", c_void_p),
        ("seq_lens", c_void_p),
        ("block_tables", c_void_p),
        ("slot_mapping", c_void_p),
        ("image_spans", c_void_p),
        ("query_token_stride", c_int64),
        ("query_head_stride", c_int64),
        ("key_token_stride", c_int64),
        ("key_head_stride", c_int64),
        ("value_token_stride", c_int64),
        ("value_head_stride", c_int64),
        ("block_table_stride", c_int64),
        ("num_tokens", c_int32),
        ("num_seqs", c_int32),
        ("num_heads", c_int32),
        ("num_kv_heads", c_int32),
        ("head_dim", c_int32),
        ("sliding_window", c_int32),
        ("num_threads", c_int32),
        ("scale", c_float),
        ("soft_cap", c_float),
    )


class CpuAttention:
    """Satisfies `AttentionBackend` for bf16 and fp32 tensors.

    kv_cache_format  "auto": the tensors' dtype; "bfloat16": half as much where they are fp32; "int8": bytes, with a
                     step for each head of each token
    """

    kv_block_dim = 0

    def __init__(self, library: NativeLibrary, dtype: torch.dtype, *, kv_cache_format: KVFormat = "auto") -> None:
        if dtype not in ELEMENT_TYPES:
            raise ValueError(f"CPU attention works in {', '.join(map(str, ELEMENT_TYPES))}, not in {dtype}")
        if kv_cache_format == "fp8":
            raise ValueError("CPU attention keeps keys and values in their own dtype or in int8, not in fp8")
        self._is_int8 = kv_cache_format == "int8"
        self._cache_dtype = {"bfloat16": torch.bfloat16, "int8": torch.uint8}.get(kv_cache_format, dtype)
        self._attend = library.attend
        self._rotary = NativeKernels(library).rotary
        self._dtype = dtype

    def allocate_kv_cache(self, num_blocks: int, block_size: int, shape: AttentionShape) -> torch.Tensor:
        """A block's keys and values of each head, in the kernels' order: native/plain_cache.h and native/int8_cache.h.

        [num_blocks, num_kv_heads, 2 * 16 * head_dim] elements, or as many bytes and the 2 * 16 steps behind the keys
        """
        if block_size != BLOCK_SIZE:
            raise ValueError(f"CPU attention takes KV blocks of {BLOCK_SIZE} tokens, not {block_size}")
        head_dim = padded_head_dim(shape.head_dim)
        if head_dim > MAX_HEAD_DIM:
            raise ValueError(f"CPU attention takes heads of up to {MAX_HEAD_DIM} dimensions, not {shape.head_dim}")
        num_elements = 2 * BLOCK_SIZE * (head_dim + STEP_BYTES if self._is_int8 else head_dim)
        size = (num_blocks, shape.num_kv_heads, num_elements)
        return huge_page_zeros(math.prod(size), self._cache_dtype).view(size)

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cos_sin: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: AttentionMetadata,
        shape: AttentionShape,
    ) -> torch.Tensor:
        query, key = self._rotary(query, key, cos_sin)
        padding = padded_head_dim(shape.head_dim) - shape.head_dim
        if padding:
            query, key, value = (functional.pad(tensor, (0, padding)) for tensor in (query, key, value))
        num_tokens, num_heads, head_dim = query.shape
        query_strides, key_strides, value_strides = query.stride(), key.stride(), value.stride()
        assert query_strides[2] == key_strides[2] == value_strides[2] == 1
        assert query.dtype == key.dtype == value.dtype == self._dtype
        assert kv_cache.dtype == self._cache_dtype
        output = torch.empty((num_tokens, num_heads * head_dim), dtype=self._dtype)
        call = AttentionCall(
            query=query.data_ptr(),
            key=key.data_ptr(),
            value=value.data_ptr(),
            kv_cache=kv_cache.data_ptr(),
            output=output.data_ptr(),
            cu_seqlens_q=metadata.cu_seqlens_q.data_ptr(),
            seq_lens=metadata.seq_lens.data_ptr(),
            block_tables=metadata.block_tables.data_ptr(),
            slot_mapping=metadata.slot_mapping.data_ptr(),
            image_spans=None if metadata.image_spans is None else metadata.image_spans.data_ptr(),
            query_token_stride=query_strides[0],
            query_head_stride=query_strides[1],
            key_token_stride=key_strides[0],
            key_head_stride=key_strides[1],
            value_token_stride=value_strides[0],
            value_head_stride=value_strides[1],
            block_table_stride=metadata.block_tables.stride(0),
            num_tokens=num_tokens,
            num_seqs=metadata.seq_lens.shape[0],
            num_heads=num_heads,
            num_kv_heads=shape.num_kv_heads,
            head_dim=head_dim,
            sliding_window=shape.sliding_window or 0,
            num_threads=torch.get_num_threads(),
            scale=shape.scale,
            soft_cap=shape.soft_cap or 0.0,
        )
        self._attend(ELEMENT_TYPES[self._dtype], CACHE_TYPES[self._cache_dtype], ctypes.byref(call))
        if padding:
            output = output.view(num_tokens, num_heads, head_dim)[..., : shape.head_dim].flatten(1)
        return output


def huge_page_zeros(num_elements: int, dtype: torch.dtype) -> torch.Tensor:
    """Zeros on huge pages where the system has them: blocks are read in no order, and each costs a page look-up."""
    memory = mmap.mmap(-1, num_elements * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel built without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype)


def padded_head_dim(head_dim: int) -> int:
    return -(-head_dim // HEAD_DIM_MULTIPLE) * HEAD_DIM_MULTIPLE
