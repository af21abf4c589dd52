"""Rows as small whole numbers: how far a value may move, and that nothing else changes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shared.row_codec import dequantize_rows, quantize_rows


@given(
    num_rows=st.integers(1, 9),
    width=st.sampled_from([1, 3, 16, 61]),
    magnitude=st.sampled_from([1e-33, 1e-6, 0.02, 1.0, 300.0, 1e37]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 1000),
)
def test_no_value_moves_by_more_than_half_a_step_of_its_own_row(num_rows, width, magnitude, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    rows = (torch.randn(num_rows, width, generator=generator) * magnitude).to(dtype)
    stored = quantize_rows(rows)
    assert (stored.dtype, stored.shape) == (torch.int8, (num_rows, width + 4))
    allowed = rows.float().abs().amax(dim=1, keepdim=True) / 254 * (1 + 1e-5)
    assert ((dequantize_rows(stored) - rows.float()).abs() <= allowed).all()


@pytest.mark.parametrize("value", [0.0, 1e-44])
def test_a_row_of_nothing_comes_back_as_nothing(value: float):
    rows = torch.full((2, 5), value)
    assert (dequantize_rows(quantize_rows(rows)).abs() <= value).all()


def test_one_large_row_costs_the_others_nothing():
    rows = torch.stack((torch.linspace(-1, 1, 50), torch.linspace(-1e4, 1e4, 50)))
    assert (dequantize_rows(quantize_rows(rows))[0] - rows[0]).abs().max() <= 1 / 254 + 1e-6
