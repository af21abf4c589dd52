"""Speed of the CPU attention backend: `python -m bench.attention_cpu [--threads N] [--fp32] [--cache int8]`.

Decode is bound by memory and shown in GB/s of keys and values read, prefill by arithmetic and shown in GFLOP/s; beside
each stands torch's scaled_dot_product_attention on contiguous tensors of equal lengths, and the machine's own limit
measured in the same run. Both sides alternate, so that other work on the machine slows both alike, and both walk
through more layers than the caches hold, as a model does. With --cache ours is in fewer bits, torch's as it was; GB/s
are then of what each reads.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn import functional

from services.text_engine.attention.cpu_backend import BLOCK_SIZE, STEP_BYTES, CpuAttention
from services.text_engine.attention.interface import AttentionMetadata, AttentionShape
from services.text_engine.kernels.kv_layout import KVFormat
from services.text_engine.kernels.native_library import load_native

SHAPES = {"SmolLM2-135M (9/3 heads of 64)": (9, 3, 64), "7B (32/32 heads of 128)": (32, 32, 128)}
# (sequences, new tokens of each, context including them)
DECODE = [(batch, 1, context) for context in (512, 2048) for batch in (1, 8, 32)]
PREFILL = [(1, 512, 512), (1, 2048, 2048), (4, 512, 512)]
LAYERS_BYTES = 192 << 20
MAX_CACHE_BYTES = 2 << 30
SECONDS_PER_CASE = 0.6


@dataclass(frozen=True)
class Case:
    num_seqs: int
    num_new: int
    context: int
    shape: AttentionShape
    dtype: torch.dtype
    kv_cache_format: KVFormat

    @property
    def torch_bytes(self) -> int:
        """Of the keys and values."""
        return 2 * self.num_seqs * self.context * self.shape.num_kv_heads * self.shape.head_dim * self.dtype.itemsize

    @property
    def kv_bytes(self) -> int:
        """The same in our cache."""
        if self.kv_cache_format == "auto":
            return self.torch_bytes
        if self.kv_cache_format == "bfloat16":
            return self.torch_bytes // self.dtype.itemsize * 2
        return 2 * self.num_seqs * self.context * self.shape.num_kv_heads * (self.shape.head_dim + STEP_BYTES)

    @property
    def flops(self) -> float:
        """Of the visible half of the matrix only, for both products."""
        visible = self.num_new * (2 * self.context - self.num_new + 1) / 2
        return 4 * self.num_seqs * self.shape.num_heads * self.shape.head_dim * visible

    @property
    def num_layers(self) -> int:
        return max(1, min(LAYERS_BYTES // self.kv_bytes, 64))


def paged_attention(case: Case, attention: CpuAttention) -> Callable[[], object]:
    """One layer's call per invocation; the layers take turns."""
    shape = case.shape
    blocks_per_seq = -(-case.context // BLOCK_SIZE)
    num_blocks = case.num_seqs * blocks_per_seq
    tables = torch.randperm(num_blocks).int().view(case.num_seqs, blocks_per_seq)
    positions = torch.arange(case.context - case.num_new, case.context)
    slots = tables[:, positions // BLOCK_SIZE].long() * BLOCK_SIZE + positions % BLOCK_SIZE
    metadata = AttentionMetadata(
        cu_seqlens_q=torch.arange(0, case.num_seqs + 1, dtype=torch.int32) * case.num_new,
        seq_lens=torch.full((case.num_seqs,), case.context, dtype=torch.int32),
        block_tables=tables,
        slot_mapping=slots.flatten(),
    )
    caches = [attention.allocate_kv_cache(num_blocks, BLOCK_SIZE, shape) for _ in range(case.num_layers)]
    for cache in caches:  # four bytes below 64 are a small number, as a step should be
        cache.random_(0, 64) if case.kv_cache_format == "int8" else cache.normal_()
    num_tokens = case.num_seqs * case.num_new
    query = torch.randn(num_tokens, shape.num_heads, shape.head_dim).to(case.dtype)
    key, value = (torch.randn(num_tokens, shape.num_kv_heads, shape.head_dim).to(case.dtype) for _ in range(2))
    cos_sin = torch.cat((torch.ones(num_tokens, shape.head_dim // 2), torch.zeros(num_tokens, shape.head_dim // 2)), 1)
    layer = itertools.cycle(caches)
    return lambda: attention.attend(query, key, value, cos_sin, next(layer), metadata, shape)


def torch_attention(case: Case) -> Callable[[], object]:
    shape = case.shape
    query = torch.randn(case.num_seqs, shape.num_heads, case.num_new, shape.head_dim).to(case.dtype)
    kv_size = (2, case.num_seqs, shape.num_kv_heads, case.context, shape.head_dim)
    layer = itertools.cycle([torch.randn(kv_size).to(case.dtype) for _ in range(case.num_layers)])

    def attend() -> torch.Tensor:
        key, value = next(layer)
        return functional.scaled_dot_product_attention(
            query, key, value, is_causal=case.num_new > 1, enable_gqa=shape.num_heads != shape.num_kv_heads
        )

    return attend


def alternate(*calls: Callable[[], object]) -> list[float]:
    """Seconds of each call, taken in turns: the slowest of the quickest tenth, as other programs only add to a time."""
    times: list[list[float]] = [[] for _ in calls]
    end = time.perf_counter() + SECONDS_PER_CASE * len(calls)
    while time.perf_counter() < end or len(times[0]) < 5:
        for call, seconds in zip(calls, times, strict=True):
            start = time.perf_counter()
            call()
            seconds.append(time.perf_counter() - start)
    return [sorted(seconds)[len(seconds) // 10] for seconds in times]


def machine_limits(dtype: torch.dtype) -> tuple[float, float]:
    """(GB/s of a large read, GFLOP/s of a large matrix product)"""
    data = torch.ones(64 << 20)
    a, b = torch.randn(2, 1024, 1024).to(dtype)
    read_s, matmul_s = alternate(data.sum, lambda: a @ b)
    return data.nbytes / read_s / 1e9, 2 * 1024**3 / matmul_s / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--fp32", action="store_true", help="instead of bf16")
    parser.add_argument("--cache", choices=["auto", "bfloat16", "int8"], default="auto", help="what ours keeps")
    parser.add_argument("--shape", choices=[*SHAPES], help="only this one")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    dtype = torch.float32 if options.fp32 else torch.bfloat16
    library = load_native()
    if library is None:
        parser.exit(1)
    kv_cache_format: KVFormat = options.cache
    attention = CpuAttention(library, dtype, kv_cache_format=kv_cache_format)
    read_gbps, matmul_gflops = machine_limits(dtype)
    print(f"{options.threads} threads, {dtype}, cache {options.cache}, {library.instruction_set}")
    print(f"limits: read {read_gbps:.0f} GB/s, matmul {matmul_gflops:.0f} GFLOP/s\n")
    print(f"{'':38}{'ours':>10}{'torch':>10}{'ratio':>8}{'of limit':>10}")
    for name, (num_heads, num_kv_heads, head_dim) in SHAPES.items():
        if options.shape not in (None, name):
            continue
        print(name)
        shape = AttentionShape(num_heads, num_kv_heads, head_dim, head_dim**-0.5)
        for num_seqs, num_new, context in DECODE + PREFILL:
            case = Case(num_seqs, num_new, context, shape, dtype, kv_cache_format)
            if case.torch_bytes > MAX_CACHE_BYTES:
                continue
            ours_s, torch_s = alternate(paged_attention(case, attention), torch_attention(case))
            decode = num_new == 1
            amounts = (case.kv_bytes, case.torch_bytes) if decode else (case.flops, case.flops)
            limit, unit = (read_gbps, "GB/s") if decode else (matmul_gflops, "GF/s")
            speeds = [amount / seconds / 1e9 for amount, seconds in zip(amounts, (ours_s, torch_s), strict=True)]
            label = f"  {'decode' if decode else 'prefill'} {num_seqs} x {context}, {ours_s * 1e6:.0f} us"
            print(
                f"{label:38}{speeds[0]:6.0f} {unit}{speeds[1]:5.0f} {unit}"
                f"{torch_s / ours_s:7.1f}x{speeds[0] / limit:9.0%}"
            )


if __name__ == "__main__":
    main()
