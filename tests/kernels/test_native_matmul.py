"""Products with packed weights against fp64, and that a row's result does not depend on the rows around it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from services.text_engine.kernels.native_matmul import PackedLinear
from tests.kernels.native_libraries import INSTRUCTION_SETS, native_library

all_instruction_sets = pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
both_dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])


def normal(*size: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed)).to(dtype)


@all_instruction_sets
@both_dtypes
@settings(max_examples=40, deadline=None)
@given(
    num_rows=st.sampled_from([0, 1, 2, 5, 6, 7, 13, 48, 193]),
    out_features=st.sampled_from([1, 15, 16, 17, 63, 64, 65, 200, 576]),
    in_features=st.sampled_from([2, 6, 16, 30, 64, 576, 1026, 2050, 4100]),
    has_bias=st.booleans(),
    padding=st.sampled_from([0, 2]),
    seed=st.integers(0, 1000),
)
def test_it_equals_the_product(instruction_set, dtype, num_rows, out_features, in_features, has_bias, padding, seed):
    weight = normal(out_features, in_features, dtype=dtype, seed=seed)
    bias = normal(out_features, dtype=dtype, seed=seed + 1) if has_bias else None
    x = normal(num_rows, in_features + padding, dtype=dtype, seed=seed + 2)[:, :in_features]
    actual = PackedLinear(native_library(instruction_set), weight, bias)(x)
    expected = torch.nn.functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
    # The error grows with the length of the chain of additions and, as terms cancel, not with the result.
    torch.testing.assert_close(
        actual.double(), expected, rtol=torch.finfo(dtype).eps, atol=in_features * 3e-7, check_stride=True
    )


@all_instruction_sets
@both_dtypes
def test_a_row_gives_the_same_bits_in_any_batch_and_with_any_number_of_threads(instruction_set, dtype):
    linear = PackedLinear(native_library(instruction_set), normal(200, 2500, dtype=dtype, seed=0))
    x = normal(400, 2500, dtype=dtype, seed=1)
    expected = linear(x)
    num_threads = torch.get_num_threads()
    for threads, first, last in [(1, 0, 400), (3, 0, 400), (num_threads, 7, 8), (2, 391, 400), (num_threads, 100, 300)]:
        torch.set_num_threads(threads)
        part = linear(x[first:last])
        torch.set_num_threads(num_threads)
        assert torch.equal(part, expected[first:last])


@all_instruction_sets
@both_dtypes
@pytest.mark.parametrize("depth", [2048, 2000])
def test_rows_a_power_of_two_apart_give_the_same_bits_as_rows_that_are_not(instruction_set, dtype, depth):
    """Many of them are copied further apart first, since they would share few lines of the caches."""
    linear = PackedLinear(native_library(instruction_set), normal(70, depth, dtype=dtype, seed=0))
    x = normal(20, 2048, dtype=dtype, seed=1)[:, :depth]
    elsewhere = torch.zeros(20, depth + 34, dtype=dtype)[:, :depth].copy_(x)
    for num_rows in (20, 7, 6, 13):  # what is kept of a copy must not be in the next one's way
        assert torch.equal(linear(x[:num_rows]), linear(elsewhere[:num_rows]))


@all_instruction_sets
@both_dtypes
def test_more_such_rows_than_are_copied_at_a_time_give_the_same_bits(instruction_set, dtype):
    linear = PackedLinear(native_library(instruction_set), normal(17, 2048, dtype=dtype, seed=0))
    x = normal(1200, 2048, dtype=dtype, seed=1)
    assert torch.equal(linear(x), torch.cat([linear(x[row : row + 6]) for row in range(0, 1200, 6)]))


@all_instruction_sets
@both_dtypes
def test_a_row_that_stands_for_many_is_read_where_it_is(instruction_set, dtype):
    linear = PackedLinear(native_library(instruction_set), normal(70, 512, dtype=dtype, seed=0))
    row = normal(1, 512, dtype=dtype, seed=1)
    assert torch.equal(linear(row.expand(64, 512)), linear(row).expand(64, 70))


@all_instruction_sets
@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@settings(max_examples=15, deadline=None)
@given(
    num_rows=st.sampled_from([0, 1, 3, 7, 193]),
    out_features=st.sampled_from([1, 17, 64, 200]),
    in_features=st.sampled_from([1, 7, 64, 1026, 2050]),
    has_bias=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_weights_of_sixteen_bits_give_the_very_bits_of_the_same_weights_in_fp32(
    instruction_set, stored, num_rows, out_features, in_features, has_bias, seed
):
    weight = normal(out_features, in_features, dtype=stored, seed=seed)
    weight[0, :3] = torch.tensor([6e-8, -3e-5, 0.0])[:in_features]  # in fp16 below its smallest normal number
    bias = normal(out_features, dtype=torch.float32, seed=seed + 1) if has_bias else None
    x = normal(num_rows, in_features, dtype=torch.float32, seed=seed + 2)
    library = native_library(instruction_set)
    widened = PackedLinear(library, weight, bias, dtype=torch.float32)
    assert torch.equal(widened(x), PackedLinear(library, weight.float(), bias)(x))


@all_instruction_sets
def test_fp32_weights_are_not_narrowed_silently(instruction_set):
    with pytest.raises(ValueError, match="float32 weights are multiplied in their own dtype"):
        PackedLinear(native_library(instruction_set), normal(4, 8, dtype=torch.float32, seed=0), dtype=torch.bfloat16)


@all_instruction_sets
def test_an_odd_depth_is_refused_in_bf16(instruction_set):
    with pytest.raises(ValueError, match="even"):
        PackedLinear(native_library(instruction_set), normal(4, 7, dtype=torch.bfloat16, seed=0))
