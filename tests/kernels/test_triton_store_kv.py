"""The Triton kernel that rotates and stores, in the interpreter: against the PyTorch rotation and torch's own fp8."""

from __future__ import annotations

import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from services.text_engine.kernels import reference
from services.text_engine.kernels.kv_layout import KVFormat, KVLayout
from tests.kernels.stored_kv import poison, stored_keys_and_values

pytest.importorskip("triton")

from services.text_engine.kernels.store_kv import store_kv

BLOCK_SIZE = 16
NUM_BLOCKS = 4
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def new_tokens(num_tokens: int, num_heads: int, layout: KVLayout, seed: int = 0) -> list[torch.Tensor]:
    """(query, key, value), views into one buffer, and cos_sin."""
    generator = torch.Generator().manual_seed(seed)
    size = (num_tokens, num_heads + 2 * layout.num_kv_heads, layout.head_dim)
    fused = torch.randn(size, generator=generator).to(layout.dtype)
    cos_sin = torch.randn(num_tokens, layout.head_dim, generator=generator)
    return [*fused.split([num_heads, layout.num_kv_heads, layout.num_kv_heads], dim=1), cos_sin]


def scattered_slots(num_tokens: int, seed: int = 0) -> torch.Tensor:
    return torch.randperm(NUM_BLOCKS * BLOCK_SIZE, generator=torch.Generator().manual_seed(seed))[:num_tokens]


def layout_of(num_kv_heads: int, head_dim: int, dtype: torch.dtype, kv_format: KVFormat = "auto") -> KVLayout:
    return KVLayout(num_kv_heads, head_dim, BLOCK_SIZE, dtype, kv_format)


@settings(max_examples=12, deadline=None)
@given(
    num_tokens=st.sampled_from([1, 2, 17, 31]),
    heads=st.sampled_from([(1, 1), (4, 1), (9, 3), (7, 1), (8, 8)]),
    head_dim=st.sampled_from([2, 20, 64, 80, 96, 128, 256]),
    dtype=st.sampled_from(list(DTYPES.values())),
    seed=st.integers(0, 100),
)
def test_queries_are_rotated_in_place_and_keys_and_values_stored(num_tokens, heads, head_dim, dtype, seed):
    layout = layout_of(heads[1], head_dim, dtype)
    query, key, value, cos_sin = new_tokens(num_tokens, heads[0], layout, seed)
    expected_query, expected_key = reference.rotary(query, key, cos_sin)
    expected_value = value.clone()
    cache = layout.allocate(NUM_BLOCKS, torch.device("cpu"))
    slots = scattered_slots(num_tokens, seed)
    store_kv(query, key, value, cos_sin, cache, slots, layout)
    keys, values = stored_keys_and_values(cache, layout)
    # A fused multiply-add rounds once where the reference rounds twice.
    tolerance = {"rtol": 2 * torch.finfo(dtype).eps, "atol": 1e-6}
    torch.testing.assert_close(query, expected_query, **tolerance)
    torch.testing.assert_close(keys[slots], expected_key.float(), **tolerance)
    assert torch.equal(values[slots], expected_value.float())
    untouched = torch.ones(NUM_BLOCKS * BLOCK_SIZE, dtype=torch.bool).index_fill(0, slots, value=False)
    assert not keys[untouched].any()
    assert not values[untouched].any()


@pytest.mark.parametrize("kv_format", ["auto", "fp8", "int8"])
def test_padding_is_stored_nowhere_but_its_query_is_rotated(kv_format):
    layout = layout_of(2, 32, torch.float32, kv_format)
    query, key, value, cos_sin = new_tokens(5, 4, layout)
    expected_query, _ = reference.rotary(query, key, cos_sin)
    cache = poison(layout.allocate(NUM_BLOCKS, torch.device("cpu")), layout)
    before = cache.clone()
    store_kv(query, key, value, cos_sin, cache, torch.full((5,), -1), layout)
    torch.testing.assert_close(query, expected_query)
    torch.testing.assert_close(cache, before, equal_nan=True, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("head_dim", [20, 64])
def test_fp8_bytes_are_torchs_nearest_e4m3_numbers(dtype, head_dim):
    layout = layout_of(2, head_dim, dtype, "fp8")
    query, key, value, cos_sin = new_tokens(17, 4, layout)
    value[:, 0] *= torch.logspace(-6, 0, head_dim).to(dtype)  # subnormal e4m3 numbers too
    expected = [value.float(), reference.rotary(query, key, cos_sin)[1].float()]
    cache = layout.allocate(NUM_BLOCKS, torch.device("cpu"))
    slots = scattered_slots(17)
    store_kv(query, key, value, cos_sin, cache, slots, layout)
    keys, values = (part[slots] for part in stored_keys_and_values(cache, layout))
    for stored, exact in ((values, expected[0]), (keys, expected[1])):
        largest = exact.abs().amax(-1, keepdim=True)
        nearest = (exact * (448 / largest)).to(torch.float8_e4m3fn).float() * largest / 448
        # What lies between two numbers may fall to the other one where rotation or factor were rounded otherwise.
        step = exact.abs() / 8 + largest / 448 * 2**-9
        assert ((stored - nearest).abs() <= step * 1.01).all()
        assert torch.isclose(stored, nearest, rtol=1e-5, atol=0).float().mean() > 0.98


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_int8_rows_are_within_half_a_step(dtype):
    layout = layout_of(3, 20, dtype, "int8")
    query, key, value, cos_sin = new_tokens(17, 3, layout)
    value *= torch.logspace(-3, 3, 17)[:, None, None].to(dtype)  # each row has its own scale
    expected_value, expected_key = value.float(), reference.rotary(query, key, cos_sin)[1].float()
    cache = layout.allocate(NUM_BLOCKS, torch.device("cpu"))
    slots = scattered_slots(17)
    store_kv(query, key, value, cos_sin, cache, slots, layout)
    keys, values = (part[slots] for part in stored_keys_and_values(cache, layout))
    for stored, exact in ((values, expected_value), (keys, expected_key)):
        half_step = exact.abs().amax(-1, keepdim=True) / 127 / 2
        assert ((stored - exact).abs() <= half_step * 1.001 + exact.abs() * torch.finfo(dtype).eps).all()


@pytest.mark.parametrize("kv_format", ["fp8", "int8"])
def test_a_row_of_zeros_stays_one_and_no_nan_is_ever_stored(kv_format):
    layout = layout_of(1, 32, torch.float32, kv_format)
    query, key, value, cos_sin = new_tokens(2, 1, layout)
    key[0] = value[0] = 0
    value[1] = torch.nan
    cache = layout.allocate(NUM_BLOCKS, torch.device("cpu"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # NaN as an integer is anything
        store_kv(query, key, value, cos_sin, cache, torch.tensor([3, 20]), layout)
    keys, values = stored_keys_and_values(cache, layout)
    assert not keys[3].any()
    assert not values[3].any()
    bytes_stored = cache[..., : 2 * BLOCK_SIZE * layout.row_stride]
    assert not (bytes_stored.contiguous().view(torch.float8_e4m3fn).isnan().any() and kv_format == "fp8")


def test_a_block_size_that_is_no_power_of_two_is_refused():
    with pytest.raises(ValueError, match="not of 12"):
        KVLayout(1, 64, 12, torch.float16, "auto")
