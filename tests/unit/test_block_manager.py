"""The block manager: prefix matching, admission, growth, publishing and release of one sequence's blocks."""

from __future__ import annotations

import pytest

from services.text_engine.core.block_copy import BlockCopy
from services.text_engine.core.block_manager import BlockManager, CachedPrefix
from services.text_engine.core.block_pool import BlockPool
from services.text_engine.core.sequence import ImageSpan, Sequence, SequenceStatus
from shared.sampling import SamplingParams

CAT, PIZZA = "c" * 64, "d" * 64
NOTHING = CachedPrefix([], 0)


def make_manager(num_blocks: int = 32, block_size: int = 16, *, caching: bool = True) -> BlockManager:
    return BlockManager(BlockPool(num_blocks), block_size, enable_prefix_caching=caching)


def make_sequence(num_tokens: int, *, images: tuple[ImageSpan, ...] = (), salt: bytes = b"") -> Sequence:
    token_ids = list(range(1000, 1000 + num_tokens))
    return Sequence("r", token_ids, num_tokens, SamplingParams(), 10_000, images=images, cache_salt=salt)


def compute(manager: BlockManager, sequence: Sequence, num_tokens: int | None = None) -> None:
    """Do to the blocks what one step does: make room, compute up to `num_tokens`, publish what became full."""
    before = sequence.num_computed_tokens
    end = sequence.num_tokens if num_tokens is None else num_tokens
    assert manager.grow(sequence, end)
    sequence.num_computed_tokens = end
    manager.publish_computed(sequence, before)


def run_whole(manager: BlockManager, sequence: Sequence) -> int:
    """Prefill a sequence on top of what is cached; how many tokens that was."""
    manager.start(sequence, manager.find_cached_prefix(sequence))
    num_cached = sequence.num_computed_tokens
    compute(manager, sequence)
    return num_cached


@pytest.mark.parametrize(("num_tokens", "num_blocks"), [(0, 0), (1, 1), (15, 1), (16, 1), (17, 2), (32, 2), (33, 3)])
def test_a_sequence_needs_a_block_for_every_started_sixteen_tokens(num_tokens: int, num_blocks: int):
    assert make_manager().num_blocks_for(num_tokens) == num_blocks


def test_the_longest_sequence_fills_the_whole_pool():
    manager = make_manager(num_blocks=7)
    assert manager.max_sequence_tokens == 112
    assert manager.can_start(make_sequence(112), NOTHING)
    assert not manager.can_start(make_sequence(113), NOTHING)


@pytest.mark.parametrize(("num_tokens", "num_cached"), [(15, 0), (16, 0), (17, 16), (32, 16), (48, 32)])
def test_the_last_token_is_never_cached(num_tokens: int, num_cached: int):
    manager = make_manager()
    for expected in (0, num_cached):
        sequence = make_sequence(num_tokens)
        assert run_whole(manager, sequence) == expected
        manager.release(sequence)
    # The chain stays whole for a longer prompt, whose last token is another one.
    assert run_whole(manager, make_sequence(num_tokens + 20)) == num_tokens // 16 * 16


@pytest.mark.parametrize("num_tokens", [15, 16, 17, 32, 48])
def test_a_repeated_prompt_finds_its_prefix_while_the_first_still_runs(num_tokens: int):
    manager = make_manager()
    run_whole(manager, first := make_sequence(num_tokens))
    run_whole(manager, second := make_sequence(num_tokens))
    num_common = (num_tokens - 1) // 16
    assert second.block_table[:num_common] == first.block_table[:num_common]
    assert not set(second.block_table[num_common:]) & set(first.block_table)


def test_without_prefix_caching_nothing_is_found_or_kept():
    manager = make_manager(caching=False)
    run_whole(manager, sequence := make_sequence(48))
    manager.release(sequence)
    assert manager.pool.num_free == 32
    assert manager.find_cached_prefix(make_sequence(48)) == NOTHING


def test_finding_a_prefix_takes_nothing():
    manager = make_manager()
    run_whole(manager, sequence := make_sequence(48))
    manager.release(sequence)
    manager.find_cached_prefix(make_sequence(48))
    assert manager.pool.num_referenced == 0


def test_a_shared_block_outlives_either_holder():
    manager = make_manager()
    run_whole(manager, first := make_sequence(48))
    run_whole(manager, second := make_sequence(48))
    shared = second.block_table[0]
    assert manager.pool.ref_count(shared) == 2
    manager.release(first)
    assert manager.pool.ref_count(shared) == 1
    assert manager.find_cached_prefix(make_sequence(48)).blocks == second.block_table[:2]
    manager.release(second)
    assert manager.pool.num_referenced == 0
    assert manager.pool.num_available == manager.pool.num_blocks


def test_release_leaves_nothing_behind_but_the_tokens():
    manager = make_manager()
    run_whole(manager, sequence := make_sequence(40))
    manager.release(sequence)
    assert (sequence.block_table, sequence.num_computed_tokens, sequence.num_tokens) == ([], 0, 40)
    assert (manager.pool.num_cached, manager.pool.num_free) == (2, 30)


def test_growing_takes_only_what_is_missing():
    manager = make_manager(block_size=4)
    sequence = make_sequence(40)
    manager.start(sequence, NOTHING)
    for num_tokens, num_blocks in [(1, 1), (4, 1), (5, 2), (3, 2), (13, 4)]:
        assert manager.grow(sequence, num_tokens)
        assert len(sequence.block_table) == num_blocks
    assert len(set(sequence.block_table)) == 4


def test_growing_beyond_the_pool_is_refused_and_takes_nothing():
    manager = make_manager(num_blocks=3)
    sequence = make_sequence(64)
    manager.start(sequence, NOTHING)
    assert manager.grow(sequence, 32)
    assert not manager.grow(sequence, 64)
    assert len(sequence.block_table) == 2
    assert manager.pool.num_free == 1


def test_a_block_can_be_found_only_once_it_is_full_and_computed():
    manager = make_manager()
    sequence = make_sequence(64)
    manager.start(sequence, NOTHING)
    for end, num_found in [(15, 0), (16, 1), (31, 1), (47, 2), (64, 3)]:
        compute(manager, sequence, end)
        assert len(manager.find_cached_prefix(make_sequence(64)).blocks) == num_found


def test_blocks_filled_by_an_answer_serve_the_next_turn_of_a_chat():
    manager = make_manager(block_size=4)
    run_whole(manager, turn := make_sequence(6))
    for _ in range(7):
        turn.token_ids.append(1000 + turn.num_tokens)
        compute(manager, turn)
    manager.release(turn)
    assert run_whole(manager, make_sequence(20)) == 12


def test_a_running_sequence_goes_on_from_blocks_that_another_has_published_meanwhile():
    manager = make_manager(block_size=4)
    behind, ahead = make_sequence(22), make_sequence(22)
    for sequence in (behind, ahead):
        manager.start(sequence, NOTHING)
    compute(manager, behind, 6)
    own = list(behind.block_table)
    compute(manager, ahead, 22)
    assert manager.adopt_cached(behind) == 20 - 6
    assert behind.num_computed_tokens == 20
    assert behind.block_table == [own[0], *ahead.block_table[1:5]]
    assert manager.pool.ref_count(own[1]) == 0  # its own half-filled block is given back
    assert manager.adopt_cached(behind) == 0
    manager.release(behind)
    manager.release(ahead)
    assert manager.pool.num_available == manager.pool.num_blocks


def test_nothing_is_adopted_without_prefix_caching():
    manager = make_manager(block_size=4, caching=False)
    behind = make_sequence(22)
    run_whole(manager, make_sequence(22))
    manager.start(behind, NOTHING)
    compute(manager, behind, 6)
    assert manager.adopt_cached(behind) == 0
    assert behind.num_computed_tokens == 6


def test_a_gap_in_the_chain_ends_the_prefix():
    manager = make_manager(num_blocks=4, block_size=4)
    run_whole(manager, sequence := make_sequence(16))
    manager.release(sequence)
    manager.pool.allocate(2)  # evicts the end of the prefix first
    assert len(manager.find_cached_prefix(make_sequence(17)).blocks) == 2


def test_starting_counts_the_cached_blocks_it_revives():
    """A cached block that a new sequence shares can no longer be evicted to make room for the same sequence."""
    manager = make_manager(num_blocks=4, block_size=4)
    run_whole(manager, first := make_sequence(8))
    manager.release(first)
    other = make_sequence(4, salt=b"other")
    run_whole(manager, other)
    assert (manager.pool.num_free, manager.pool.num_cached) == (1, 2)

    prefix = manager.find_cached_prefix(longer := make_sequence(13))
    assert len(prefix.blocks) == 2
    assert not manager.can_start(longer, prefix)  # 2 revived and 2 new ones, but only 3 available
    assert manager.can_start(make_sequence(12), manager.find_cached_prefix(make_sequence(12)))


def test_starting_counts_blocks_that_others_hold_only_once():
    manager = make_manager(num_blocks=4, block_size=4)
    run_whole(manager, make_sequence(8))
    prefix = manager.find_cached_prefix(longer := make_sequence(13))
    assert manager.can_start(longer, prefix)  # 2 shared with a running sequence, 2 new
    manager.start(longer, prefix)
    assert manager.grow(longer, 13)
    assert manager.pool.num_available == 0


def test_another_picture_of_equal_size_shares_only_the_text_before_it():
    """Case D7: cat, cat, pizza, pizza, cat."""
    manager = make_manager(block_size=4)
    cached = []
    for image in (CAT, CAT, PIZZA, PIZZA, CAT):
        sequence = make_sequence(30, images=(ImageSpan(image, 10, 8),))
        cached.append(run_whole(manager, sequence))
        manager.release(sequence)
    assert cached == [0, 28, 8, 28, 28]
    assert run_whole(manager, make_sequence(30)) == 8


# --- choices of one request -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_tokens", "num_shared", "is_copied"), [(1, 0, False), (4, 0, True), (5, 1, False), (7, 1, True)]
)
@pytest.mark.parametrize("caching", [True, False])
def test_another_choice_shares_whole_blocks_and_copies_the_one_that_both_will_write_to(
    num_tokens: int, num_shared: int, is_copied: bool, caching: bool
):
    manager = make_manager(block_size=4, caching=caching)
    first, other = make_sequence(num_tokens), make_sequence(num_tokens)
    other.choices = first.choices = [first, other]
    compute(manager, first)
    first.status = SequenceStatus.RUNNING
    manager.start(other, manager.find_cached_prefix(other))
    assert other.num_computed_tokens == num_tokens - 1
    assert other.block_table[:num_shared] == first.block_table[:num_shared]
    copies = [BlockCopy(first.block_table[num_shared], other.block_table[num_shared])] if is_copied else []
    assert manager.take_copies() == copies
    assert len(other.block_table) == num_shared + is_copied
    for sequence in (first, other):
        manager.release(sequence)
    assert manager.pool.num_referenced == 0


def test_a_choice_that_begins_again_goes_by_its_own_words():
    """Preempted, it has words of its own behind the prompt: what the first choice holds there is no use."""
    manager = make_manager(block_size=4)
    first, other = make_sequence(7), make_sequence(7)
    other.choices = first.choices = [first, other]
    compute(manager, first)
    first.status = SequenceStatus.RUNNING
    other.token_ids += [1, 2, 3]
    assert manager.find_cached_prefix(other) == CachedPrefix(first.block_table[:1], 4)


def test_a_choice_may_begin_where_any_other_one_has_come():
    manager = make_manager(block_size=4, caching=False)
    choices = [make_sequence(7) for _ in range(3)]
    for choice in choices:
        choice.choices = choices
    first, second, third = choices
    for choice in (first, second):
        compute(manager, choice)
        choice.status = SequenceStatus.RUNNING
    manager.release(first)
    first.status = SequenceStatus.FINISHED
    assert third.to_fork_from() is second
    assert manager.find_cached_prefix(third) == CachedPrefix(second.block_table[:1], 6, second.block_table[1])


@pytest.mark.parametrize(
    ("status", "num_computed", "waits"),
    [
        (SequenceStatus.WAITING, 0, True),
        (SequenceStatus.RUNNING, 4, True),
        (SequenceStatus.RUNNING, 6, False),
        (SequenceStatus.FINISHED, 0, False),
    ],
)
def test_a_choice_waits_for_one_before_it_that_computes_the_prompt(
    status: SequenceStatus, num_computed: int, waits: bool
):
    first, second = make_sequence(7), make_sequence(7)
    first.choices = second.choices = [first, second]
    first.status, first.num_computed_tokens = status, num_computed
    assert second.awaits_another_choice == waits
    assert not first.awaits_another_choice


def test_a_choice_does_not_wait_for_one_that_was_set_aside_in_the_middle_of_its_answer():
    first, second = make_sequence(7), make_sequence(7)
    first.choices = second.choices = [first, second]
    first.token_ids += [1, 2]
    assert not second.awaits_another_choice
