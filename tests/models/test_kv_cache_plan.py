"""How many blocks fit, and what is said when they are too few. Case D32."""

from __future__ import annotations

import pytest

from services.text_engine.runner.kv_cache import KVCacheTooSmall, plan_kv_cache
from shared.settings import SettingRefused
from shared.sizes import parse_size


def plan(budget_blocks: int, max_model_len: int | None, **changes: int):
    return plan_kv_cache(
        budget_bytes=budget_blocks * 1000,
        bytes_per_block=1000,
        model_max_len=changes.get("model_max_len", 8192),
        max_model_len=max_model_len,
        max_num_seqs=changes.get("max_num_seqs", 64),
    )


def test_a_promise_that_the_cache_cannot_keep_stops_the_start_with_both_numbers():
    with pytest.raises(KVCacheTooSmall, match=r"1600 tokens.*4096.*kv-cache-memory.*max-model-len"):
        plan(100, 4096)


def test_no_memory_at_all_stops_the_start():
    with pytest.raises(KVCacheTooSmall, match="0 tokens"):
        plan(0, None)


def test_exactly_enough_starts():
    assert plan(256, 4096).num_blocks == 256


def test_a_small_cache_lowers_a_limit_that_nobody_asked_for():
    assert plan(100, None).max_model_len == 1600


def test_no_more_is_taken_than_every_running_sequence_could_use():
    assert plan(10_000, 160, max_num_seqs=4).num_blocks == 40


def test_a_limit_beyond_the_models_positions_is_refused():
    with pytest.raises(SettingRefused, match="max_model_len=9000 is more than the 8192 tokens"):
        plan(10_000, 9000)


@pytest.mark.parametrize(
    ("text", "size"),
    [("1024", 1024), ("2GiB", 2 << 30), ("512 MiB", 512 << 20), ("1.5g", 1_500_000_000), ("4GB", 4 * 10**9)],
)
def test_sizes_are_read_with_the_usual_units(text: str, size: int):
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "-1", "2 TiB", "1e9"])
def test_other_sizes_are_refused(text: str):
    with pytest.raises(ValueError, match="is not a size"):
        parse_size(text)
