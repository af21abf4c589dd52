"""The compiled elementwise kernels against their plain PyTorch twins, on odd sizes and strided views."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import structlog
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from services.text_engine.kernels import native_build, reference
from services.text_engine.kernels.native import NativeKernels
from services.text_engine.kernels.native_library import load_native
from tests.kernels.native_libraries import INSTRUCTION_SETS, native_library

EPS = 1e-6
all_instruction_sets = pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
both_dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
rows = st.sampled_from([0, 1, 2, 3, 17, 64])
dims = st.sampled_from([1, 2, 7, 8, 15, 16, 17, 33, 64, 576, 1537])
seeds = st.integers(0, 1000)


def normal(*size: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_nearly_identical(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal, but that a sum's order or an exponential's last bit may turn a rounding, in bf16 of few elements.

    A turned rounding of an intermediate is one unit in its last place; rounding the result can make two of it.
    """
    ulps = 8 if expected.dtype == torch.float32 else 2
    torch.testing.assert_close(actual, expected, rtol=ulps * torch.finfo(expected.dtype).eps, atol=1e-6)
    if expected.dtype == torch.bfloat16 and expected.numel() > 0:
        assert (actual != expected).float().mean() <= max(0.05, 1.5 / expected.numel())


# Not random: how many roundings turn is a matter of the numbers drawn.
examples = settings(max_examples=30, deadline=None, derandomize=True)


@all_instruction_sets
@both_dtypes
@examples
@given(num_rows=rows, dim=dims, seed=seeds, padding=st.sampled_from([0, 3]))
def test_rms_norm_equals_the_reference(instruction_set, dtype, num_rows, dim, seed, padding):
    x = normal(num_rows, dim + padding, dtype=dtype, seed=seed)[:, :dim]
    weight = normal(dim, dtype=dtype, seed=seed + 1)
    kernels = NativeKernels(native_library(instruction_set))
    assert_nearly_identical(kernels.rms_norm(x, weight, EPS), reference.rms_norm(x, weight, EPS))


@all_instruction_sets
@both_dtypes
def test_rms_norm_takes_the_heads_of_a_fused_projection(instruction_set, dtype):
    heads = normal(5, 12, 64, dtype=dtype, seed=0)[:, 3:9]
    weight = normal(64, dtype=dtype, seed=1)
    kernels = NativeKernels(native_library(instruction_set))
    assert_nearly_identical(kernels.rms_norm(heads, weight, EPS), reference.rms_norm(heads, weight, EPS))


@all_instruction_sets
@both_dtypes
@examples
@given(num_rows=rows, dim=dims, seed=seeds)
def test_add_rms_norm_equals_the_reference(instruction_set, dtype, num_rows, dim, seed):
    x, residual = (normal(num_rows, dim, dtype=dtype, seed=seed + i) for i in range(2))
    weight = normal(dim, dtype=dtype, seed=seed + 2)
    expected, expected_residual = reference.add_rms_norm(x, residual, weight, EPS)
    kernels = NativeKernels(native_library(instruction_set))
    actual, new_residual = kernels.add_rms_norm(x.clone(), residual.clone(), weight, EPS)
    assert torch.equal(new_residual, expected_residual)
    assert_nearly_identical(actual, expected)


@all_instruction_sets
@both_dtypes
@examples
@given(
    num_tokens=rows,
    num_heads=st.integers(1, 9),
    num_kv_heads=st.integers(1, 3),
    head_dim=st.sampled_from([2, 8, 16, 20, 64, 80, 96, 128]),
    seed=seeds,
)
def test_rotary_equals_the_reference_and_leaves_the_values_alone(
    instruction_set, dtype, num_tokens, num_heads, num_kv_heads, head_dim, seed
):
    fused = normal(num_tokens, num_heads + 2 * num_kv_heads, head_dim, dtype=dtype, seed=seed)
    query, key, value = fused.split([num_heads, num_kv_heads, num_kv_heads], dim=1)
    cos_sin = normal(num_tokens, head_dim, dtype=torch.float32, seed=seed + 1)
    expected = (*reference.rotary(query, key, cos_sin), value.clone())
    actual = NativeKernels(native_library(instruction_set)).rotary(query, key, cos_sin)
    for tensor, wanted in zip((*actual, value), expected, strict=True):
        assert torch.equal(tensor, wanted)


@all_instruction_sets
@both_dtypes
@examples
@given(num_rows=rows, dim=dims, seed=seeds, scale=st.sampled_from([0.01, 1.0, 30.0]))
def test_silu_mul_equals_the_reference(instruction_set, dtype, num_rows, dim, seed, scale):
    gate_up = normal(num_rows, 2 * dim, dtype=dtype, seed=seed) * scale
    kernels = NativeKernels(native_library(instruction_set))
    assert_nearly_identical(kernels.silu_mul(gate_up), reference.silu_mul(gate_up))


@all_instruction_sets
@both_dtypes
@examples
@given(num_rows=rows, dim=dims, seed=seeds, scale=st.sampled_from([0.01, 1.0, 30.0]))
def test_gelu_tanh_mul_equals_the_reference(instruction_set, dtype, num_rows, dim, seed, scale):
    gate_up = normal(num_rows, 2 * dim, dtype=dtype, seed=seed) * scale
    actual = NativeKernels(native_library(instruction_set)).gelu_tanh_mul(gate_up)
    # In fp64: where 1 + tanh(x) cancels, the reference in fp32 has few digits left.
    gate, up = gate_up.double().chunk(2, dim=-1)
    activated = gate * torch.sigmoid(2 * math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3))
    rtol = 1e-4 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(actual.double(), activated * up, rtol=rtol, atol=1e-30)


@all_instruction_sets
@both_dtypes
def test_gelu_keeps_its_limits(instruction_set, dtype):
    gate = torch.tensor([-3e38, -200.0, -10.0, -0.0, 0.0, 10.0, 3e38, torch.inf, torch.nan])
    gate_up = torch.stack((gate, torch.ones_like(gate)), dim=1).to(dtype)
    actual = NativeKernels(native_library(instruction_set)).gelu_tanh_mul(gate_up)
    expected = reference.gelu_tanh_mul(gate_up)
    torch.testing.assert_close(actual, expected, rtol=1e-2, atol=1e-30, equal_nan=True)


@all_instruction_sets
@both_dtypes
def test_silu_keeps_its_limits(instruction_set, dtype):
    gate = torch.tensor([-3e38, -200.0, -100.0, -0.0, 0.0, 100.0, 3e38, torch.inf, torch.nan])
    gate_up = torch.stack((gate, torch.ones_like(gate)), dim=1).to(dtype)
    actual = NativeKernels(native_library(instruction_set)).silu_mul(gate_up)
    expected = reference.silu_mul(gate_up)
    torch.testing.assert_close(actual, expected, rtol=1e-2, atol=1e-30, equal_nan=True)


@all_instruction_sets
def test_a_row_gives_the_same_bits_in_any_batch(instruction_set):
    kernels = NativeKernels(native_library(instruction_set))
    gate_up = normal(300, 2 * 1536, dtype=torch.bfloat16, seed=0)
    weight = normal(2 * 1536, dtype=torch.bfloat16, seed=1)
    many, normed = kernels.silu_mul(gate_up), kernels.rms_norm(gate_up, weight, EPS)
    for row in (0, 7, 299):
        alone = gate_up[row : row + 1]
        assert torch.equal(many[row : row + 1], kernels.silu_mul(alone))
        assert torch.equal(normed[row : row + 1], kernels.rms_norm(alone, weight, EPS))


def test_the_kernels_run_on_the_one_openmp_runtime_that_torch_loaded():
    for instruction_set in INSTRUCTION_SETS:
        native_library(instruction_set)
    mapped = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines()}
    runtimes = [path for path in mapped if Path(path).name.startswith(("libgomp", "libiomp5", "libomp"))]
    assert len(runtimes) == 1, runtimes


def test_an_up_to_date_library_is_not_compiled_again(monkeypatch):
    native_library(next(iter(INSTRUCTION_SETS)))
    monkeypatch.setenv("CXX", "/nonexistent/compiler")
    for target in INSTRUCTION_SETS.values():
        assert native_build.build(target).exists()


def test_without_a_compiled_library_there_is_none_and_the_log_names_the_remedy(monkeypatch, tmp_path):
    monkeypatch.setattr(native_build, "library_dirs", lambda: (tmp_path, tmp_path))
    with structlog.testing.capture_logs() as lines:
        assert load_native() is None
    assert "native_build" in lines[-1]["remedy"]


def test_the_best_library_of_this_cpu_is_loaded():
    for instruction_set in INSTRUCTION_SETS:
        native_library(instruction_set)
    library = load_native()
    assert library is not None
    assert library.instruction_set == next(iter(INSTRUCTION_SETS))
