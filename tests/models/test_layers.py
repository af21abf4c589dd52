"""`Linear` multiplies alike however it keeps its weight; dtypes are chosen by what the device can do."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from services.text_engine.models.layers import Linear
from shared.device import choose_dtype, has_bfloat16

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_rows", [1, 2, 17, 32, 257])
@pytest.mark.parametrize("has_bias", [False, True])
@torch.inference_mode()
def test_a_linear_layer_is_torchs(dtype: torch.dtype, num_rows: int, has_bias: bool):
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(96, 64, generator=generator).to(dtype)
    bias = torch.randn(96, generator=generator).to(dtype) if has_bias else None
    x = torch.randn(num_rows, 64, generator=generator).to(dtype)
    want = functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
    got = Linear(weight, bias)(x)
    assert got.dtype == dtype
    tolerance = 1e-5 if dtype == torch.float32 else 2**-8  # one rounding of the result
    torch.testing.assert_close(got.double(), want, rtol=tolerance, atol=tolerance)


def test_auto_is_the_widest_used_format_that_the_cpu_multiplies_in_hardware():
    want = torch.bfloat16 if has_bfloat16(CPU) else torch.float32
    assert choose_dtype("auto", CPU) == want


@pytest.mark.parametrize("name", ["bfloat16", "float32"])
def test_a_dtype_asked_for_is_given(name: str):
    assert choose_dtype(name, CPU) == getattr(torch, name)


def test_an_unknown_dtype_names_the_known_ones():
    with pytest.raises(ValueError, match="dtype=int4 is not one of auto, bfloat16, float16, float32"):
        choose_dtype("int4", CPU)


def test_half_precision_on_a_cpu_is_refused():
    with pytest.raises(ValueError, match="dtype=float16 is for GPUs"):
        choose_dtype("float16", CPU)
