"""Rows as small whole numbers: how far a value may move, and that nothing else changes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shared.row_codec import dequantize_rows, quantize_rows, stored_width


@given(
    num_rows=st.integers(1, 9),
    width=st.sampled_from([1, 3, 16, 61]),
    num_parts=st.integers(1, 4),
    magnitude=st.sampled_from([1e-30, 1e-6, 0.02, 1.0, 300.0, 1e37]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 1000),
)
def test_no_value_moves_by_more_than_half_a_step_of_its_own_part(num_rows, width, num_parts, magnitude, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    parts = (torch.randn(num_rows, num_parts, width, generator=generator) * magnitude).to(dtype)
    stored = quantize_rows(parts.flatten(1), num_parts)
    assert (stored.dtype, stored.shape) == (torch.int8, (num_rows, stored_width(width, num_parts)))
    allowed = parts.float().abs().amax(dim=2, keepdim=True) / 254 * (1 + 1e-5)
    assert ((dequantize_rows(stored, num_parts).view_as(parts) - parts.float()).abs() <= allowed).all()


@pytest.mark.parametrize("value", [0.0, 1e-44])
def test_a_row_of_nothing_comes_back_as_nothing(value: float):
    rows = torch.full((2, 5), value)
    assert (dequantize_rows(quantize_rows(rows)).abs() <= value).all()


def test_one_large_row_costs_the_others_nothing():
    rows = torch.stack((torch.linspace(-1, 1, 50), torch.linspace(-1e4, 1e4, 50)))
    assert (dequantize_rows(quantize_rows(rows))[0] - rows[0]).abs().max() <= 1 / 254 + 1e-6


def test_a_large_part_of_a_row_costs_its_other_parts_nothing():
    """Rows for the depths of a text model, where numbers grow from layer to layer."""
    parts = torch.stack((torch.linspace(-0.02, 0.02, 50), torch.linspace(-300, 300, 50)))
    first = dequantize_rows(quantize_rows(parts.view(1, 100), 2), 2)[0, :50]
    assert (first - parts[0]).abs().max() <= 0.02 / 254 + 1e-8


def test_a_row_of_one_part_is_stored_as_ever():
    """Entries of other models stay readable."""
    stored = quantize_rows(torch.tensor([[0.75, -1.0, 0.25]]))
    scale = torch.tensor([1 / 127]).view(torch.int8)
    assert stored.tolist() == [[95, -127, 32, *scale.tolist()]]
