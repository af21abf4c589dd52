"""The block pool: every block is free, referenced or cached, and never two of these."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.text_engine.core.block_pool import BlockPool, OutOfBlocks


def assert_counts_add_up(pool: BlockPool) -> None:
    assert pool.num_free + pool.num_referenced + pool.num_cached == pool.num_blocks
    assert pool.num_available == pool.num_free + pool.num_cached
    assert pool.num_referenced == sum(pool.ref_count(block) > 0 for block in range(pool.num_blocks))


def cached_block(pool: BlockPool, block_hash: bytes) -> int:
    """Allocate, publish and free one block, so that the pool keeps it for a later hit."""
    [block] = pool.allocate(1)
    pool.publish(block, block_hash)
    pool.free([block])
    return block


def test_a_new_pool_is_all_free():
    pool = BlockPool(7)
    assert (pool.num_free, pool.num_referenced, pool.num_cached) == (7, 0, 0)
    assert_counts_add_up(pool)


@pytest.mark.parametrize("num_blocks", [0, -1])
def test_a_pool_without_blocks_is_refused(num_blocks: int):
    with pytest.raises(ValueError, match=f"at least one block, not {num_blocks}"):
        BlockPool(num_blocks)


def test_all_blocks_can_be_handed_out_once_each():
    pool = BlockPool(5)
    assert sorted(pool.allocate(2) + pool.allocate(3)) == [0, 1, 2, 3, 4]
    assert pool.num_available == 0
    assert_counts_add_up(pool)


def test_asking_for_too_many_blocks_takes_none():
    pool = BlockPool(3)
    pool.allocate(1)
    with pytest.raises(OutOfBlocks, match="3 blocks asked for, 2 available"):
        pool.allocate(3)
    assert pool.num_free == 2
    assert_counts_add_up(pool)


def test_an_unpublished_block_is_free_again_once_nobody_holds_it():
    pool = BlockPool(2)
    [block] = pool.allocate(1)
    pool.share([block])
    pool.free([block])
    assert pool.ref_count(block) == 1
    assert pool.num_free == 1
    pool.free([block])
    assert pool.ref_count(block) == 0
    assert pool.num_free == 2
    assert_counts_add_up(pool)


def test_a_freed_block_can_still_be_hit_until_it_is_reused():
    pool = BlockPool(2)
    block = cached_block(pool, b"a")
    assert pool.lookup(b"a") == block
    assert (pool.num_free, pool.num_cached) == (1, 1)
    pool.allocate(2)
    assert pool.lookup(b"a") is None
    assert not pool.is_published(block)
    assert pool.num_evictions == 1
    assert_counts_add_up(pool)


def test_cached_blocks_are_reused_only_when_none_is_free():
    pool = BlockPool(3)
    block = cached_block(pool, b"a")
    assert block not in pool.allocate(2)
    assert pool.num_evictions == 0
    assert pool.allocate(1) == [block]
    assert pool.num_evictions == 1


def test_the_least_recently_used_cached_block_is_reused_first():
    pool = BlockPool(3)
    blocks = pool.allocate(3)
    for block, name in zip(blocks, (b"a", b"b", b"c"), strict=True):
        pool.publish(block, name)
    a, b, c = blocks
    pool.free([b, c, a])
    pool.share([b])  # a hit makes b the most recently used
    pool.free([b])
    assert [pool.allocate(1) for _ in range(3)] == [[c], [a], [b]]


def test_the_beginning_of_a_prefix_outlives_its_end_when_the_end_is_freed_first():
    pool = BlockPool(3)
    table = pool.allocate(3)
    for i, block in enumerate(table):
        pool.publish(block, b"prefix-%d" % i)
    pool.free(reversed(table))
    pool.allocate(1)
    assert [pool.lookup(b"prefix-%d" % i) for i in range(3)] == [table[0], table[1], None]


def test_a_hit_on_a_cached_block_protects_it_from_eviction():
    pool = BlockPool(2)
    block = cached_block(pool, b"a")
    pool.share([block])
    assert (pool.num_cached, pool.num_referenced) == (0, 1)
    assert pool.allocate(1) != [block]
    with pytest.raises(OutOfBlocks):
        pool.allocate(1)
    assert pool.lookup(b"a") == block


def test_a_shared_block_stays_until_its_last_holder_lets_go():
    pool = BlockPool(1)
    [block] = pool.allocate(1)
    pool.publish(block, b"a")
    pool.share([block])
    pool.free([block])
    assert (pool.num_referenced, pool.num_cached) == (1, 0)
    pool.free([block])
    assert (pool.num_referenced, pool.num_cached) == (0, 1)


@pytest.mark.parametrize("published", [False, True])
def test_freeing_a_block_twice_is_our_bug_and_asserts(published: bool):
    pool = BlockPool(2)
    [block] = pool.allocate(1)
    if published:
        pool.publish(block, b"a")
    pool.free([block])
    with pytest.raises(AssertionError, match=f"block {block} is freed more often"):
        pool.free([block])
    assert_counts_add_up(pool)


def test_sharing_a_block_that_is_free_is_our_bug_and_raises():
    pool = BlockPool(2)
    with pytest.raises((AssertionError, KeyError)):
        pool.share([0])
    assert_counts_add_up(pool)


def test_the_first_block_published_under_a_hash_keeps_the_name():
    pool = BlockPool(2)
    first, second = pool.allocate(2)
    pool.publish(first, b"a")
    pool.publish(second, b"a")
    assert pool.lookup(b"a") == first
    assert not pool.is_published(second)
    pool.free([second])
    assert (pool.num_free, pool.num_cached) == (1, 0)  # the twin is of no use to anybody


def test_a_published_block_is_not_renamed():
    pool = BlockPool(1)
    [block] = pool.allocate(1)
    pool.publish(block, b"a")
    pool.publish(block, b"b")
    assert pool.lookup(b"a") == block
    assert pool.lookup(b"b") is None


def test_a_reused_block_can_be_published_under_a_new_hash():
    pool = BlockPool(1)
    block = cached_block(pool, b"old")
    assert cached_block(pool, b"new") == block
    assert pool.lookup(b"old") is None
    assert pool.lookup(b"new") == block


@settings(max_examples=80, deadline=None, derandomize=True, database=None)
@given(data=st.data(), num_blocks=st.integers(1, 7))
def test_counts_references_and_least_recent_use_hold_under_any_operations(data: st.DataObject, num_blocks: int):
    pool = BlockPool(num_blocks)
    held: list[int] = []  # one entry per reference
    cached: list[int] = []  # the model of the eviction order, least recently used first
    name_of: dict[int, bytes] = {}
    num_names = 0
    for _ in range(data.draw(st.integers(1, 40))):
        operation = data.draw(st.sampled_from(["allocate", "free", "publish", "share"]))
        if operation == "allocate":
            count = data.draw(st.integers(0, pool.num_available))
            evicted = cached[: max(count - pool.num_free, 0)]
            blocks = pool.allocate(count)
            assert not set(blocks) & set(held), "a referenced block was handed out"
            assert set(evicted) <= set(blocks)
            for block in evicted:
                assert pool.lookup(name_of.pop(block)) is None
            cached = cached[len(evicted) :]
            held += blocks
        elif operation == "free" and held:
            block = data.draw(st.sampled_from(held))
            held.remove(block)
            pool.free([block])
            if block not in held and block in name_of:
                cached.append(block)
        elif operation == "publish" and held:
            block = data.draw(st.sampled_from(held))
            if block not in name_of:
                name_of[block] = b"%d" % num_names
                num_names += 1
                pool.publish(block, name_of[block])
        elif operation == "share" and name_of:
            block = pool.lookup(name_of[data.draw(st.sampled_from(sorted(name_of)))])
            assert block is not None
            pool.share([block])
            held.append(block)
            cached = [other for other in cached if other != block]
        assert_counts_add_up(pool)
        references = Counter(held)
        assert all(pool.ref_count(block) == references[block] for block in range(num_blocks))
        assert pool.num_cached == len(cached)
        assert all(pool.lookup(name) == block for block, name in name_of.items())


def test_after_forgetting_all_nothing_is_found_and_only_held_blocks_are_not_free():
    pool = BlockPool(5)
    cached_block(pool, b"a")
    [held] = pool.allocate(1)
    pool.publish(held, b"b")
    pool.forget_all()
    assert pool.lookup(b"a") is None
    assert pool.lookup(b"b") is None
    assert (pool.num_free, pool.num_cached, pool.num_referenced) == (4, 0, 1)
    assert_counts_add_up(pool)
    pool.publish(held, b"b")
    pool.free([held])
    assert pool.lookup(b"b") == held
    assert sorted(pool.allocate(5)) == list(range(5))
