"""Compiled products with quantized weights, in every instruction set of this CPU, within what rounding may cost."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from services.text_engine.kernels.grouped_weight import GroupedWeight, quantize, stack, whole_input
from services.text_engine.kernels.native_quantized import NativeQuantizedLinear, UnpackingLinear
from tests.kernels.native_libraries import INSTRUCTION_SETS, native_library

all_instruction_sets = pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
both_dtypes = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
examples = settings(max_examples=40, deadline=None, derandomize=True)


def normal(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def random_weight(
    out_features: int, in_features: int, *, bits: int, group_size: int | None, has_minimums: bool, seed: int
) -> GroupedWeight:
    """Groups of very different scales, zeros among them."""
    generator = torch.Generator().manual_seed(seed)
    size = group_size or whole_input(in_features)
    groups = (out_features, -(-in_features // size))
    scales = torch.rand(groups, generator=generator) * 10.0 ** -torch.randint(0, 5, groups, generator=generator)
    scales[0] = 0.0
    minimums = torch.randn(groups, generator=generator) * scales * 8 if has_minimums else None
    quants = torch.randint(0, 1 << bits, (out_features, in_features), generator=generator, dtype=torch.uint8)
    return GroupedWeight(quants, scales, minimums, bits, size)


def bound(x: torch.Tensor, weight: GroupedWeight) -> torch.Tensor:
    """[num_rows, out_features], the most that a product may be off: half a step for every input's rounding, scales and
    minimums rounded to fp16, the result to its dtype, and fp32 sums."""
    values = weight.dequantize().double()
    padding = (0, -x.shape[1] % 16)
    blocks = torch.nn.functional.pad(x.double(), padding).view(len(x), -1, 16).abs().amax(2)
    blocks = torch.nn.functional.pad(blocks, (0, blocks.shape[1] % 2)).view(len(x), -1, 2).amax(2)  # of 32, at most
    steps = blocks.repeat_interleave(32, 1)[:, : x.shape[1]] / 127
    size = weight.group_size
    largest = torch.maximum(weight.scales.abs() * (1 << weight.bits), weight.all_minimums().abs()).double()
    largest = largest.repeat_interleave(size, 1)[:, : x.shape[1]]
    magnitude = x.double().abs() + steps
    rounding = steps / 2 @ values.abs().t() + magnitude @ largest.t() * (2.0**-10 + x.shape[1] * 2.0**-23)
    return (
        rounding
        + (x.double() @ values.t()).abs() * torch.finfo(x.dtype).eps
        + largest.amax(1) * 2.0**-24 * magnitude.sum(1, keepdim=True)
        + 1e-30
    )


@all_instruction_sets
@both_dtypes
@examples
@given(
    num_rows=st.sampled_from([1, 2, 5, 6, 7, 13, 48]),
    out_features=st.sampled_from([1, 15, 16, 17, 33, 200]),
    in_features=st.sampled_from([1, 16, 31, 70, 576, 1100]),
    bits=st.sampled_from([4, 8]),
    group_size=st.sampled_from([None, 16, 32, 48, 128]),
    has_minimums=st.booleans(),
    has_bias=st.booleans(),
    padding=st.sampled_from([0, 3]),
    seed=st.integers(0, 1000),
)
def test_it_equals_the_product_but_for_rounding(
    instruction_set, dtype, num_rows, out_features, in_features, bits, group_size, has_minimums, has_bias, padding, seed
):
    weight = random_weight(
        out_features, in_features, bits=bits, group_size=group_size, has_minimums=has_minimums, seed=seed
    )
    bias = normal(out_features, seed=seed + 1, dtype=dtype) if has_bias else None
    x = normal(num_rows, in_features + padding, seed=seed + 2, dtype=dtype)[:, :in_features]
    x[0] *= 100
    actual = NativeQuantizedLinear(native_library(instruction_set), weight, bias)(x)
    expected = x.double() @ weight.dequantize().double().t()
    allowed = bound(x, weight)
    if bias is not None:
        expected += bias.double()
        allowed += expected.abs() * torch.finfo(dtype).eps
    assert actual.dtype == dtype
    assert ((actual.double() - expected).abs() <= allowed).all()


@all_instruction_sets
@pytest.mark.parametrize("bits", [4, 8])
def test_a_row_gives_the_same_bits_in_any_batch_and_with_any_number_of_threads(instruction_set, bits):
    weight = quantize(normal(200, 1500, seed=0), bits=bits, group_size=32, symmetric=bits == 8)
    linear = NativeQuantizedLinear(native_library(instruction_set), weight)
    x = normal(100, 1500, seed=1, dtype=torch.bfloat16)
    expected = linear(x)
    num_threads = torch.get_num_threads()
    for threads, first, last in [(1, 0, 100), (3, 0, 100), (num_threads, 7, 8), (2, 91, 100), (num_threads, 30, 70)]:
        torch.set_num_threads(threads)
        part = linear(x[first:last])
        torch.set_num_threads(num_threads)
        assert torch.equal(part, expected[first:last])


@all_instruction_sets
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_spoils_its_own_row_and_no_other(instruction_set, value):
    weight = quantize(normal(40, 100, seed=0), bits=4, group_size=32, symmetric=False)
    x = normal(3, 100, seed=1)
    x[1, 5] = value
    y = NativeQuantizedLinear(native_library(instruction_set), weight)(x)
    assert torch.isfinite(y).all(1).tolist() == [True, False, True]


@all_instruction_sets
def test_it_holds_no_more_than_the_packed_weights(instruction_set):
    weight = quantize(normal(640, 1024, seed=0), bits=4, group_size=32, symmetric=False)
    linear = NativeQuantizedLinear(native_library(instruction_set), weight)
    assert linear.size_bytes == 640 * 1024 // 2 + 640 * 1024 // 32 * 4 + 640 * 4


@examples
@given(
    out_features=st.sampled_from([1, 7, 512, 513]),
    in_features=st.sampled_from([1, 31, 96, 130]),
    bits=st.sampled_from([4, 8]),
    group_size=st.sampled_from([None, 16, 32]),
    has_minimums=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_the_plain_product_is_exact(out_features, in_features, bits, group_size, has_minimums, seed):
    weight = random_weight(
        out_features, in_features, bits=bits, group_size=group_size, has_minimums=has_minimums, seed=seed
    )
    bias, x = normal(out_features, seed=seed), normal(5, in_features, seed=seed + 1)
    expected = torch.nn.functional.linear(x, weight.dequantize(), bias)
    torch.testing.assert_close(UnpackingLinear(weight, bias)(x), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("linear", [UnpackingLinear, *(INSTRUCTION_SETS)])
def test_inputs_in_another_order_are_picked_in_it(linear):
    make = UnpackingLinear if linear is UnpackingLinear else lambda w: NativeQuantizedLinear(native_library(linear), w)
    weight = random_weight(40, 96, bits=4, group_size=32, has_minimums=True, seed=3)
    order = torch.randperm(96, generator=torch.Generator().manual_seed(4))
    shuffled = GroupedWeight(weight.quants, weight.scales, weight.minimums, 4, 32, order)
    x = normal(3, 96, seed=5)
    assert torch.equal(make(shuffled)(x), make(weight)(x[:, order]))
    torch.testing.assert_close(shuffled.dequantize()[:, order], weight.dequantize())


@examples
@given(
    out_features=st.sampled_from([1, 5]),
    in_features=st.sampled_from([1, 31, 32, 100]),
    bits=st.sampled_from([4, 8]),
    group_size=st.sampled_from([None, 16, 32]),
    kind=st.sampled_from(["symmetric", "between limits", "with zero a step"]),
    seed=st.integers(0, 1000),
)
def test_quantizing_moves_no_weight_by_more_than_half_a_step(out_features, in_features, bits, group_size, kind, seed):
    plain = normal(out_features, in_features, seed=seed)
    plain[0, 0] = 0.0
    weight = quantize(
        plain,
        bits=bits,
        group_size=group_size,
        symmetric=kind == "symmetric",
        whole_zeros=kind == "with zero a step",
    )
    steps = weight.scales.repeat_interleave(weight.group_size, 1)[:, :in_features]
    most = (
        1.0 if kind == "with zero a step" else 0.5
    )  # moving the limits to whole steps may cost the outermost another half
    assert ((weight.dequantize() - plain).abs() <= steps * most * 1.001 + 1e-6).all()
    if kind != "between limits":
        assert weight.dequantize()[0, 0] == 0.0


def test_quantizing_what_was_quantized_changes_nothing():
    """So a checkpoint that was unpacked from 4 bits can be packed again without loss."""
    once = quantize(normal(64, 96, seed=0), bits=4, group_size=32, symmetric=False)
    again = quantize(once.dequantize(), bits=4, group_size=32, symmetric=False)
    torch.testing.assert_close(again.dequantize(), once.dequantize(), rtol=1e-5, atol=1e-6)


def test_parts_stack_in_their_order():
    parts = [random_weight(n, 64, bits=4, group_size=32, has_minimums=True, seed=n) for n in (3, 16, 1)]
    assert torch.equal(stack(parts).dequantize(), torch.cat([part.dequantize() for part in parts]))
    assert not parts[0].fits(random_weight(3, 64, bits=8, group_size=32, has_minimums=True, seed=0))
