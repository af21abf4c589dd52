"""The elementwise Triton kernels, interpreted, against their plain PyTorch twins, on odd sizes and strided views."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from services.text_engine.kernels import reference
from services.text_engine.kernels.merge_rows import merge_rows
from services.text_engine.kernels.triton_kernels import TritonKernels

# An exponential's overflow is the right answer on the way to a sigmoid of 0.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
EPS = 1e-6
kernels = TritonKernels()
all_dtypes = pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"]
)
rows = st.sampled_from([0, 1, 2, 3, 17])
dims = st.sampled_from([1, 2, 15, 16, 17, 31, 64, 127, 576, 1537])
seeds = st.integers(0, 1000)
# Not random: how many roundings turn is a matter of the numbers drawn.
examples = settings(max_examples=25, deadline=None, derandomize=True)


def normal(*size: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_nearly_identical(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal, but that a sum's order or an exponential's last bit may turn a rounding, in 16 bits of few elements.

    A turned rounding of an intermediate is one unit in its last place; rounding the result can make two of it.
    """
    assert actual.dtype == expected.dtype
    ulps = 8 if expected.dtype == torch.float32 else 2
    torch.testing.assert_close(actual, expected, rtol=ulps * torch.finfo(expected.dtype).eps, atol=1e-6)
    if expected.dtype != torch.float32 and expected.numel() > 0:
        assert (actual != expected).float().mean() <= max(0.05, 1.5 / expected.numel())


@all_dtypes
@examples
@given(num_rows=rows, dim=dims, seed=seeds, padding=st.sampled_from([0, 3]))
def test_rms_norm_equals_the_reference(dtype, num_rows, dim, seed, padding):
    x = normal(num_rows, dim + padding, dtype=dtype, seed=seed)[:, :dim]
    weight = normal(dim, dtype=dtype, seed=seed + 1)
    assert_nearly_identical(kernels.rms_norm(x, weight, EPS), reference.rms_norm(x, weight, EPS))


@all_dtypes
@examples
@given(
    num_tokens=rows,
    num_heads=st.sampled_from([1, 3, 8]),
    others=st.sampled_from([0, 1, 5]),
    head_dim=st.sampled_from([16, 64, 80, 96, 128]),
    seed=seeds,
)
def test_rms_norm_takes_the_heads_of_a_fused_projection(dtype, num_tokens, num_heads, others, head_dim, seed):
    fused = normal(num_tokens, others + num_heads + 2, head_dim, dtype=dtype, seed=seed)
    heads = fused[:, others : others + num_heads]
    weight = normal(head_dim, dtype=dtype, seed=seed + 1)
    normed = kernels.rms_norm(heads, weight, EPS)
    assert normed.is_contiguous()
    assert_nearly_identical(normed, reference.rms_norm(heads, weight, EPS))


@all_dtypes
def test_rms_norm_takes_any_strides_at_all(dtype):
    x = normal(33, 5, dtype=dtype, seed=0).t()
    weight = normal(33, dtype=dtype, seed=1)
    assert_nearly_identical(kernels.rms_norm(x, weight, EPS), reference.rms_norm(x, weight, EPS))


@all_dtypes
@examples
@given(num_rows=rows, dim=dims, seed=seeds)
def test_add_rms_norm_equals_the_reference(dtype, num_rows, dim, seed):
    x, residual = (normal(num_rows, dim, dtype=dtype, seed=seed + i) for i in range(2))
    weight = normal(dim, dtype=dtype, seed=seed + 2)
    expected, expected_residual = reference.add_rms_norm(x, residual, weight, EPS)
    actual, new_residual = kernels.add_rms_norm(x.clone(), residual.clone(), weight, EPS)
    assert torch.equal(new_residual, expected_residual)
    assert_nearly_identical(actual, expected)


def test_a_row_too_long_for_a_program_is_refused():
    with pytest.raises(AssertionError, match="do not fit"):
        kernels.rms_norm(torch.ones(1, 20000), torch.ones(20000), EPS)


@all_dtypes
@examples
@given(num_rows=rows, dim=dims, seed=seeds, scale=st.sampled_from([0.01, 1.0, 30.0]), padding=st.sampled_from([0, 3]))
def test_silu_mul_equals_the_reference(dtype, num_rows, dim, seed, scale, padding):
    gate_up = (normal(num_rows, 2 * dim + padding, dtype=dtype, seed=seed) * scale)[:, : 2 * dim]
    assert_nearly_identical(kernels.silu_mul(gate_up), reference.silu_mul(gate_up))


@all_dtypes
@examples
@given(num_rows=rows, dim=dims, seed=seeds, scale=st.sampled_from([0.01, 1.0, 3.0]))
def test_gelu_tanh_mul_equals_the_reference(dtype, num_rows, dim, seed, scale):
    gate_up = normal(num_rows, 2 * dim, dtype=dtype, seed=seed) * scale
    actual, expected = kernels.gelu_tanh_mul(gate_up), reference.gelu_tanh_mul(gate_up)
    # Of a negative gate torch computes 1 + tanh(u) with cancellation, which leaves 1e-7 of its size; ours does not.
    torch.testing.assert_close(actual, expected, rtol=4 * torch.finfo(dtype).eps, atol=1e-6 * scale * scale)


@pytest.mark.parametrize("name", ["silu_mul", "gelu_tanh_mul"])
def test_a_gate_keeps_its_limits(name):
    gate = torch.tensor([-3e4, -200.0, -100.0, -0.0, 0.0, 100.0, 3e4, torch.inf, torch.nan])
    gate_up = torch.stack((gate, torch.ones_like(gate)), dim=1)
    actual, expected = getattr(kernels, name)(gate_up), getattr(reference, name)(gate_up)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-30, equal_nan=True)


@all_dtypes
@examples
@given(
    num_tokens=st.sampled_from([1, 15, 16, 17]),
    dim=dims,
    num_images=st.sampled_from([0, 1, 5, 13]),
    index_dtype=st.sampled_from([torch.int32, torch.int64]),
    rows_dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=seeds,
)
def test_merge_rows_equals_the_reference(dtype, num_tokens, dim, num_images, index_dtype, rows_dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    hidden = normal(num_tokens, dim, dtype=dtype, seed=seed)
    image_rows = normal(29, dim + 3, dtype=rows_dtype, seed=seed + 1)[:, :dim]
    num_entries = min(num_images, num_tokens)
    token_index = torch.randperm(num_tokens, generator=generator)[:num_entries].to(index_dtype)
    row_index = torch.randint(0, 29, (num_entries,), generator=generator).to(index_dtype)
    token_index[::3] = -1
    row_index[1::5] = -1
    expected = reference.merge_rows(hidden, image_rows, token_index, row_index)
    merged = merge_rows(hidden, image_rows, token_index, row_index)
    assert merged is hidden
    assert torch.equal(merged, expected)


def test_a_row_gives_the_same_bits_in_any_batch():
    gate_up = normal(70, 2 * 256, dtype=torch.bfloat16, seed=0)
    weight = normal(2 * 256, dtype=torch.bfloat16, seed=1)
    many, normed = kernels.silu_mul(gate_up), kernels.rms_norm(gate_up, weight, EPS)
    for row in (0, 7, 69):
        alone = gate_up[row : row + 1]
        assert torch.equal(many[row : row + 1], kernels.silu_mul(alone))
        assert torch.equal(normed[row : row + 1], kernels.rms_norm(alone, weight, EPS))
