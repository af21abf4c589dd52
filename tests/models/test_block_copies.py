"""Blocks of the KV cache copied many at a time: as if one after another, in two calls a layer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from services.text_engine.attention.cpu_backend import CpuAttention
from services.text_engine.attention.interface import AttentionBackend, AttentionShape
from services.text_engine.attention.torch_reference import TorchReferenceAttention
from services.text_engine.attention.triton_backend import TritonAttention
from services.text_engine.core.block_copy import BlockCopy
from services.text_engine.kernels.kv_layout import KVFormat
from services.text_engine.runner.block_copies import copy_blocks
from tests.kernels.native_libraries import INSTRUCTION_SETS, native_library

CPU = torch.device("cpu")
NUM_BLOCKS = 7
LAYOUTS = ["reference", "cpu", "triton"]


def backend_of(layout: str, kv_cache_format: KVFormat) -> AttentionBackend:
    if layout == "reference":
        return TorchReferenceAttention(torch.float32, CPU, kv_cache_format=kv_cache_format)
    if layout == "cpu":
        library = native_library(next(iter(INSTRUCTION_SETS)))
        return CpuAttention(library, torch.float32, kv_cache_format=kv_cache_format)
    return TritonAttention(torch.float32, CPU, max_num_seqs=2, kv_cache_format=kv_cache_format)


def caches_of(backend: AttentionBackend, num_layers: int) -> list[torch.Tensor]:
    shape = AttentionShape(num_heads=3, num_kv_heads=3, head_dim=12, scale=0.25)
    caches = [backend.allocate_kv_cache(NUM_BLOCKS, 16, shape) for _ in range(num_layers)]
    for cache in caches:
        cache.view(torch.uint8).copy_(torch.randint(0, 100, cache.view(torch.uint8).shape))
    return caches


def one_after_another(copies: list[BlockCopy], caches: list[torch.Tensor], host: list[torch.Tensor], dim: int) -> None:
    for source, target, direction in copies:
        for cache, slots in zip(caches, host, strict=True):
            read, written = (slots if direction == "from_host" else cache), (slots if direction == "to_host" else cache)
            written.select(dim, target).copy_(read.select(dim, source).clone())


blocks = st.integers(0, NUM_BLOCKS - 1)
any_copy = st.builds(BlockCopy, blocks, blocks, st.sampled_from(["on_device", "on_device", "to_host", "from_host"]))


@pytest.mark.parametrize("kv_cache_format", ["auto", "int8"])
@pytest.mark.parametrize("layout", LAYOUTS)
@given(copies=st.lists(any_copy, max_size=12))
@settings(max_examples=40, deadline=None)
def test_copies_together_leave_what_they_leave_one_after_another(
    layout: str, kv_cache_format: KVFormat, copies: list[BlockCopy]
):
    backend = backend_of(layout, kv_cache_format)
    dim = backend.kv_block_dim
    caches, host = caches_of(backend, 2), caches_of(backend, 2)
    expected, expected_host = ([cache.clone() for cache in each] for each in (caches, host))
    one_after_another(copies, expected, expected_host, dim)
    copy_blocks(copies, caches, dim, host)
    for found, wanted in zip([*caches, *host], [*expected, *expected_host], strict=True):
        assert torch.equal(found.view(torch.uint8), wanted.view(torch.uint8))


class Writes(TorchDispatchMode):
    """Counts the calls that write to a tensor."""

    num_calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num_calls += "copy_" in str(func)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_however_many_choices_fork_from_a_prompt_each_layer_is_written_to_once(layout: str):
    backend = backend_of(layout, "auto")
    caches = caches_of(backend, 4)
    with Writes() as writes:
        copy_blocks([BlockCopy(0, target) for target in range(1, NUM_BLOCKS)], caches, backend.kv_block_dim)
    assert writes.num_calls == len(caches)
