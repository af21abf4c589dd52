"""The CPU's KV cache of bytes: what is stored, what it costs, and how little is lost. That attention over it is right,
and the same in any batch, is in test_cpu_attention, with the other kinds of cache.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from services.text_engine.attention.cpu_backend import BLOCK_SIZE, CpuAttention
from services.text_engine.attention.torch_reference import TorchReferenceAttention
from tests.kernels.native_libraries import INSTRUCTION_SETS, native_library
from tests.kernels.test_cpu_attention import KINDS, Kind, Sequences, chunked, no_rotation, run, shape_of, whole

CPU = torch.device("cpu")
FP32, BF16 = (kind for kind in KINDS if kind.kv_cache_format == "int8")
all_instruction_sets = pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
int8_kinds = pytest.mark.parametrize("kind", [FP32, BF16], ids=lambda kind: kind.name)
head_dims = st.sampled_from([8, 16, 20, 64, 80, 96, 128, 256])


def unpacked(cache: torch.Tensor, head_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The order of int8_cache.h undone.

    returns  bytes [2, num_blocks, 16, num_kv_heads, head_dim] and steps [2, num_blocks, 16, num_kv_heads, 1]
    """
    num_blocks, num_kv_heads, _ = cache.shape
    padded = -(-head_dim // 16) * 16
    keys, steps, values = cache.split([16 * padded, 2 * 16 * 4, 16 * padded], dim=2)
    order = [0, 2, 1, 3]  # of four elements in a word
    keys = keys.reshape(num_blocks, num_kv_heads, padded // 4, 16, 4)[..., order].permute(0, 3, 1, 2, 4).flatten(3)
    values = values.reshape(num_blocks, num_kv_heads, 4, padded, 4)[..., order].permute(0, 2, 4, 1, 3).flatten(1, 2)
    steps = steps.contiguous().view(torch.float32).view(num_blocks, num_kv_heads, 2, 16, 1).permute(2, 0, 3, 1, 4)
    return torch.stack((keys, values))[..., :head_dim], steps


@all_instruction_sets
@int8_kinds
@settings(max_examples=15, deadline=None)
@given(head_dim=head_dims, length=st.integers(1, 70), seed=st.integers(0, 1000))
def test_what_is_stored_is_what_the_twin_stores(
    instruction_set: str, kind: Kind, head_dim: int, length: int, seed: int
) -> None:
    sequences = Sequences(shape_of(4, 2, head_dim), [length], kind, seed)
    qkv, metadata = sequences.step([(0, length)])
    native, twin = kind.attention(instruction_set), TorchReferenceAttention(kind.dtype, CPU, kv_cache_format="int8")
    caches = [each.allocate_kv_cache(sequences.num_blocks, BLOCK_SIZE, sequences.shape) for each in (native, twin)]
    expected = twin.attend(*qkv, no_rotation(qkv[0]), caches[1], metadata, sequences.shape)
    actual = native.attend(*qkv, no_rotation(qkv[0]), caches[0], metadata, sequences.shape)
    slots = metadata.slot_mapping
    quants, steps = (each.flatten(1, 2)[:, slots] for each in unpacked(caches[0], head_dim))
    stored = caches[1].flatten(1, 2)[:, slots]
    assert torch.equal(quants, stored[..., :head_dim])
    assert torch.equal(steps, stored.view(torch.float32)[..., -1:])
    torch.testing.assert_close(actual, expected, rtol=0, atol=kind.tolerance)


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
def test_a_block_takes_a_byte_for_each_number_and_a_step_for_each_head_of_a_token(head_dim: int):
    library = native_library(next(iter(INSTRUCTION_SETS)))
    shape = shape_of(6, 3, head_dim)
    for dtype in (torch.float32, torch.bfloat16):
        plain = CpuAttention(library, dtype).allocate_kv_cache(5, BLOCK_SIZE, shape).nbytes
        assert plain == 5 * 3 * 2 * 16 * head_dim * dtype.itemsize
        int8 = CpuAttention(library, dtype, kv_cache_format="int8").allocate_kv_cache(5, BLOCK_SIZE, shape).nbytes
        assert int8 == 5 * 3 * 2 * 16 * (head_dim + 4)


@all_instruction_sets
@int8_kinds
@pytest.mark.parametrize("outlier", [1.0, 20.0], ids=["even channels", "one channel of 20 times"])
def test_little_is_lost_against_a_cache_in_fp32(instruction_set: str, kind: Kind, outlier: float):
    exact = Kind("exact", torch.float32, "auto", 0.0)
    sequences = {each: Sequences(shape_of(6, 2, 64), [300, 41], each) for each in (exact, kind)}
    for each in sequences.values():
        for tensor in (*each.keys, *each.values):
            tensor[..., 5] *= outlier
        for tensor in each.queries:
            tensor[..., 5] /= outlier
    found = run(sequences[kind], instruction_set, chunked([300, 41], 64))
    for row, output in enumerate(found):
        expected = sequences[exact].expected(row)
        error = (output.double() - expected).square().mean().sqrt() / expected.square().mean().sqrt()
        assert error < (0.012 if outlier == 1.0 else 0.05)


@all_instruction_sets
@int8_kinds
@pytest.mark.parametrize("number", [float("nan"), float("inf")], ids=["NaN", "infinity"])
def test_a_number_that_no_byte_stands_for_reaches_those_who_see_it_and_nobody_else(
    instruction_set: str, kind: Kind, number: float
):
    sequences = Sequences(shape_of(2, 2, 32), [40, 9], kind)
    sequences.keys[0][21, 1, 3] = sequences.values[0][21, 1, 3] = number
    first, second = run(sequences, instruction_set, whole([40, 9]))
    of_heads = first.view(40, 2, 32)
    assert torch.isfinite(of_heads[:21]).all()
    assert torch.isfinite(of_heads[:, 0]).all()
    assert torch.isfinite(second).all()
    # A key of NaN has no weight with AVX2, all of it with AVX-512, whatever the kind of cache.
    sequences = Sequences(shape_of(2, 2, 32), [40, 9], kind)
    sequences.values[0][21, 1, 3] = number
    first, _ = run(sequences, instruction_set, whole([40, 9]))
    assert first.view(40, 2, 32)[21:, 1].isnan().all()


@all_instruction_sets
@int8_kinds
def test_heads_of_zeros_and_of_next_to_nothing_give_zeros(instruction_set: str, kind: Kind):
    sequences = Sequences(shape_of(2, 1, 32), [20], kind)
    sequences.keys[0][:] = 0
    sequences.values[0][:] = 1e-38
    [output] = run(sequences, instruction_set, whole([20]))
    assert torch.equal(output, torch.zeros_like(output))


def test_a_format_that_a_cpu_lacks_is_refused():
    with pytest.raises(ValueError, match="not in fp8"):
        CpuAttention(native_library(next(iter(INSTRUCTION_SETS))), torch.bfloat16, kv_cache_format="fp8")
    with pytest.raises(ValueError, match="not in fp8"):
        TorchReferenceAttention(torch.bfloat16, CPU, kv_cache_format="fp8")
