"""How the paged KV cache lies in memory for the Triton kernels; `store_kv` writes it, `paged_attention` reads it.

    [num_blocks, num_kv_heads, 2, block_size, row]      a block's keys for one head, then its values

All that one tile of attention wants of a block is one contiguous run, and a row starts at a multiple of 16 bytes, so
that every thread moves 16 bytes at once: `row` is head_dim rounded up to 16 elements. What lies past head_dim is never
read.

A quantized cache has bytes for elements, and for each row (the head of a token) its largest magnitude a in fp32, behind
the values of each (block, head): block_size of the keys, then of the values. A byte e stands for

    a * (e - 128) / 127     int8
    a * e4m3(e) / 448       fp8

A row's scale depends on that row alone: nothing has to be calibrated, and a cached value is the same bits in whatever
order its block was filled. The bytes of the values lie transposed, [row, block_size]: tensor cores take bytes only in
the order of the sum, and the values' sum runs over positions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

KVFormat = Literal["auto", "bfloat16", "fp8", "int8"]  # these kernels have no other 16 bits than the model's own
ROW_MULTIPLE = 16
SCALE_BYTES = 4
LARGEST = {"auto": 1.0, "fp8": 448.0, "int8": 127.0}


@dataclass(frozen=True, slots=True)
class KVLayout:
    """One layer's cache. Strides and offsets count elements of `element_dtype`, `scales_offset` counts floats.

    dtype   the model's; the cache's too with format "auto"
    """

    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype
    format: KVFormat

    def __post_init__(self) -> None:
        if self.block_size < 4 or self.block_size & (self.block_size - 1):
            raise ValueError(f"the Triton kernels take KV blocks of a power of two of tokens, not of {self.block_size}")

    @property
    def is_quantized(self) -> bool:
        return self.format != "auto"

    @property
    def element_dtype(self) -> torch.dtype:
        return torch.uint8 if self.is_quantized else self.dtype

    @property
    def row_stride(self) -> int:
        return -(-self.head_dim // ROW_MULTIPLE) * ROW_MULTIPLE

    @property
    def head_stride(self) -> int:
        scales = 2 * self.block_size * SCALE_BYTES if self.is_quantized else 0
        return 2 * self.block_size * self.row_stride + scales

    @property
    def scales_offset(self) -> int:
        """From the start of a (block, head) to its keys' scales."""
        return 2 * self.block_size * self.row_stride // SCALE_BYTES

    @property
    def largest(self) -> float:
        """The largest magnitude of a stored element, which stands for the row's own."""
        return LARGEST[self.format]

    def allocate(self, num_blocks: int, device: torch.device) -> torch.Tensor:
        """[num_blocks, num_kv_heads, head_stride] zeros: no NaN may ever lie in it"""
        return torch.zeros((num_blocks, self.num_kv_heads, self.head_stride), dtype=self.element_dtype, device=device)

    def scales(self, kv_cache: torch.Tensor) -> torch.Tensor:
        """The whole cache as floats; where there are no scales any tensor will do."""
        return kv_cache.view(torch.float32) if self.is_quantized else kv_cache

    def check(self, kv_cache: torch.Tensor) -> None:
        assert kv_cache.shape[1:] == (self.num_kv_heads, self.head_stride), kv_cache.shape
        assert kv_cache.dtype == self.element_dtype
        assert kv_cache.is_contiguous()
        assert kv_cache.data_ptr() % 16 == 0
