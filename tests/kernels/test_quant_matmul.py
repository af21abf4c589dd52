"""Products with int4 and int8 weights, interpreted, against the dequantized weights; and the ways into our layout."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from services.text_engine.kernels.grouped_weight import quantize
from services.text_engine.kernels.quant_layout import (
    Int4Weight,
    Int8Weight,
    QuantizedWeight,
    from_grouped,
    pack_int4,
    quantize_int8,
)
from services.text_engine.kernels.quant_matmul import (
    MAX_TILES,
    QuantLinear,
    choose_tile,
    make_arrivals,
    quant_matmul,
)
from services.text_engine.kernels.reference import dequantize
from services.text_engine.models.quantization import awq, gptq

CPU = torch.device("cpu")
both_dtypes = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
seeds = st.integers(0, 1000)
examples = settings(max_examples=15, deadline=None, derandomize=True)


def random_int4(in_features: int, out_features: int, group_size: int, *, seed: int, dtype=torch.float16) -> Int4Weight:
    generator = torch.Generator().manual_seed(seed)
    num_groups = 1 if group_size == -1 else -(-in_features // group_size)
    quants = torch.randint(0, 16, (in_features, out_features), generator=generator)
    zeros = torch.randint(0, 17, (num_groups, out_features), generator=generator)
    scales = (torch.rand(num_groups, out_features, generator=generator) * 0.02 + 0.001).to(dtype)
    return pack_int4(quants, scales, zeros, group_size)


def assert_multiplies(weight: QuantizedWeight, num_rows: int, dtype: torch.dtype, *, seed: int, has_bias: bool) -> None:
    """Against the product in double: one rounding of the result, and fp32 sums over at most 2,000 inputs."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num_rows, weight.in_features, generator=generator).to(dtype)
    bias = torch.randn(weight.out_features, generator=generator).to(dtype) if has_bias else None
    arrivals = make_arrivals(CPU)
    actual = quant_matmul(x, weight, bias, arrivals)
    expected = x.double() @ dequantize(weight).double().t() + (0 if bias is None else bias.double())
    assert actual.dtype == dtype
    torch.testing.assert_close(actual.double(), expected, rtol=torch.finfo(dtype).eps, atol=1e-4)
    assert not arrivals.any(), "the counters are ready for the next product"


@both_dtypes
@examples
@given(
    num_rows=st.sampled_from([1, 2, 15, 16, 17, 65]),
    in_features=st.sampled_from([64, 96, 128, 200, 576]),
    out_features=st.sampled_from([1, 15, 17, 64, 131]),
    group_size=st.sampled_from([32, 64, 128, -1]),
    scale_dtype=st.sampled_from([torch.float16, torch.bfloat16]),
    has_bias=st.booleans(),
    seed=seeds,
)
def test_int4_equals_the_product_with_dequantized_weights(
    dtype, num_rows, in_features, out_features, group_size, scale_dtype, has_bias, seed
):
    weight = random_int4(in_features, out_features, group_size, seed=seed, dtype=scale_dtype)
    assert_multiplies(weight, num_rows, dtype, seed=seed, has_bias=has_bias)


@both_dtypes
@examples
@given(
    num_rows=st.sampled_from([1, 2, 15, 16, 17, 65]),
    in_features=st.sampled_from([16, 96, 128, 200, 576]),
    out_features=st.sampled_from([1, 15, 17, 64, 131]),
    has_bias=st.booleans(),
    seed=seeds,
)
def test_int8_equals_the_product_with_dequantized_weights(dtype, num_rows, in_features, out_features, has_bias, seed):
    weight = torch.randn(out_features, in_features, generator=torch.Generator().manual_seed(seed)) * 0.1
    assert_multiplies(quantize_int8(weight), num_rows, dtype, seed=seed, has_bias=has_bias)


@pytest.mark.parametrize(("num_rows", "num_chunks"), [(1, 19), (17, 19), (1, 33)])
@pytest.mark.parametrize("bits", [4, 8])
def test_split_inputs_add_up(num_rows, num_chunks, bits):
    in_features = 128 * num_chunks  # the last split has fewer chunks than the others, or none
    if bits == 4:
        weight: QuantizedWeight = random_int4(in_features, 70, 128, seed=0)
    else:
        weight = quantize_int8(torch.randn(70, in_features, generator=torch.Generator().manual_seed(0)) * 0.1)
    assert choose_tile(num_rows, 70, num_chunks).split_k > 2
    assert_multiplies(weight, num_rows, torch.bfloat16, seed=1, has_bias=True)


def test_a_row_gives_the_same_bits_beside_any_neighbours():
    weight = random_int4(1024, 40, 128, seed=0)
    x = torch.randn(16, 1024, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    product = QuantLinear(weight, None, make_arrivals(CPU))
    together = product(x)
    for row in (0, 7, 15):
        assert torch.equal(product(x[row : row + 1]), together[row : row + 1])


def test_the_counters_reach_for_every_tile_of_split_inputs():
    for out_features in (1, 64, 4096, 16000, 28672):
        for num_chunks in (1, 8, 33, 200):
            for num_rows in (1, 16, 17, 64):
                tile = choose_tile(num_rows, out_features, num_chunks)
                num_tiles = -(-num_rows // tile.block_m) * -(-out_features // tile.block_n)
                assert tile.split_k == 1 or num_tiles <= MAX_TILES


def test_fp32_activations_are_refused():
    with pytest.raises(AssertionError, match="float32"):
        quant_matmul(torch.ones(1, 64), random_int4(64, 16, 64, seed=0), None, make_arrivals(CPU))


# --- layouts ----------------------------------------------------------------------------------------------------------


def packed_words(nibbles: torch.Tensor) -> torch.Tensor:
    """nibbles [..., 8], lowest first -> [...] int32"""
    words = sum(nibbles[..., i].long() << (4 * i) for i in range(8))
    return ((words + 2**31) % 2**32 - 2**31).to(torch.int32)


def random_parts(in_features: int, out_features: int, group_size: int) -> tuple[torch.Tensor, ...]:
    """quants, zeros, scales"""
    generator = torch.Generator().manual_seed(in_features)
    quants = torch.randint(0, 16, (in_features, out_features), generator=generator)
    zeros = torch.randint(0, 16, (in_features // group_size, out_features), generator=generator)
    scales = torch.rand(in_features // group_size, out_features, generator=generator).to(torch.float16)
    return quants, zeros, scales


def plain_dequantize(quants, zeros, scales, groups) -> torch.Tensor:
    return ((quants - zeros[groups]) * scales[groups].float()).t()


@pytest.mark.parametrize("group_size", [32, 64, 128])
def test_awq_checkpoints_keep_their_weights(group_size):
    quants, zeros, scales = random_parts(256, 48, group_size)
    order = [0, 2, 4, 6, 1, 3, 5, 7]

    def pack(values: torch.Tensor) -> torch.Tensor:
        return packed_words(values.view(values.shape[0], -1, 8)[..., order])

    stored = {"qweight": pack(quants), "qzeros": pack(zeros), "scales": scales}
    weight = from_grouped(awq.unpack(stored, (48, 256), group_size=group_size))
    assert isinstance(weight, Int4Weight)
    groups = torch.arange(256) // group_size
    assert torch.equal(dequantize(weight), plain_dequantize(quants, zeros, scales, groups))


@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.parametrize("less_one", [False, True])
def test_gptq_checkpoints_keep_their_weights(act_order, less_one):
    quants, zeros, scales = random_parts(256, 48, 64)
    groups = torch.arange(256) // 64
    if act_order:
        groups = groups[torch.randperm(256, generator=torch.Generator().manual_seed(0))]
    qweight = packed_words(quants.view(-1, 8, 48).transpose(1, 2))
    qzeros = packed_words(zeros.view(zeros.shape[0], -1, 8))
    stored = {"qweight": qweight, "qzeros": qzeros, "scales": scales, "g_idx": groups.to(torch.int32)}
    weight = from_grouped(gptq.unpack(stored, (48, 256), bits=4, group_size=64, zero_offset=int(less_one)))
    assert isinstance(weight, Int4Weight)
    assert torch.equal(dequantize(weight), plain_dequantize(quants, zeros + less_one, scales, groups))
    assert (weight.input_order is not None) == act_order
    assert_multiplies(weight, 3, torch.bfloat16, seed=0, has_bias=False)


@pytest.mark.parametrize(
    ("bits", "kind", "kept_as"),
    [
        (4, "symmetric", Int4Weight),
        (4, "zero is a step", Int4Weight),
        (4, "any", Int8Weight),
        (8, "symmetric", Int8Weight),
    ],
)
def test_a_quantized_matrix_is_kept_in_the_smallest_layout_that_can_say_it(bits, kind, kept_as):
    plain = torch.randn(40, 192, generator=torch.Generator().manual_seed(0))
    size = None if bits == 8 else 32
    grouped = quantize(
        plain, bits=bits, group_size=size, symmetric=kind == "symmetric", whole_zeros=kind == "zero is a step"
    )
    weight = from_grouped(grouped)
    assert isinstance(weight, kept_as)
    rounding = 0.02 if kind == "any" else 2e-3  # int8 anew; fp16 scales
    torch.testing.assert_close(dequantize(weight), grouped.dequantize(), rtol=rounding, atol=rounding)


def test_int8_is_within_half_a_step_and_keeps_rows_of_zeros():
    weight = torch.randn(30, 77, generator=torch.Generator().manual_seed(0))
    weight[3] = 0
    error = (dequantize(quantize_int8(weight)) - weight).abs()
    assert (error <= weight.abs().amax(1, keepdim=True) / 127 * 0.5001).all()


@pytest.mark.parametrize(
    ("group_size", "scale_dtype", "named"),
    [(48, torch.float16, "groups of 48"), (64, torch.float32, "float32"), (32, torch.float16, "wanted")],
)
def test_a_layout_that_is_not_ours_to_read_is_refused(group_size, scale_dtype, named):
    quants = torch.zeros(128, 16, dtype=torch.uint8)
    with pytest.raises(ValueError, match=named):
        pack_int4(quants, torch.ones(2, 16, dtype=scale_dtype), torch.zeros(2, 16, dtype=torch.uint8), group_size)
