"""Evicted blocks on the host: which slot holds what, and that copies made in their order bring back what was there."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from services.text_engine.core.block_copy import BlockCopy
from services.text_engine.core.block_manager import BlockManager
from services.text_engine.core.block_pool import BlockPool
from services.text_engine.core.host_blocks import HostBlocks
from services.text_engine.core.prefix_hash import extend_block_hashes
from services.text_engine.core.sequence import Sequence
from shared.sampling import SamplingParams

BLOCK_SIZE = 4


def assert_counts_add_up(host: HostBlocks) -> None:
    assert host.num_free + host.num_held + host.num_taken == host.num_slots


def test_the_least_recently_used_copy_gives_its_slot_to_a_new_one():
    host = HostBlocks(2)
    first, second = host.put(b"a"), host.put(b"b")
    assert {first, second} == {0, 1}
    assert host.put(b"a") is None, "its copy is here already, and now the more recently used"
    assert host.put(b"c") == second
    assert (host.lookup(b"a"), host.lookup(b"b"), host.lookup(b"c")) == (first, None, second)
    assert_counts_add_up(host)


def test_a_slot_that_is_about_to_be_read_is_nobody_elses():
    host = HostBlocks(1)
    slot = host.put(b"a")
    assert host.take(b"a") == slot
    assert host.put(b"b") is None
    assert_counts_add_up(host)
    host.give_back(0)
    assert host.lookup(b"a") == slot
    assert host.put(b"b") == slot


def test_what_may_be_wrong_is_forgotten():
    host = HostBlocks(3)
    for name in (b"a", b"b"):
        host.put(name)
    host.forget(b"a")
    host.forget(b"never here")
    assert (host.lookup(b"a"), host.num_free) == (None, 2)
    host.forget_all()
    assert (host.lookup(b"b"), host.num_free) == (None, 3)


class Machine:
    """A manager, and the memory that its copies move: what each block and each slot holds, by hash."""

    def __init__(self, num_blocks: int, num_slots: int) -> None:
        self.host = HostBlocks(num_slots)
        self.manager = BlockManager(BlockPool(num_blocks), BLOCK_SIZE, host=self.host)
        self.device: dict[int, bytes] = {}
        self.slots: dict[int, bytes] = {}

    def run(self, sequence: Sequence) -> int:
        """Prefill in one step, end; how many tokens need not be computed."""
        manager = self.manager
        prefix = manager.find_cached_prefix(sequence)
        assert manager.can_start(sequence, prefix)
        manager.start(sequence, prefix)
        num_cached = sequence.num_computed_tokens
        assert manager.grow(sequence, sequence.num_tokens)
        self.copy(manager.take_copies())
        hashes = extend_block_hashes(sequence, BLOCK_SIZE)
        for i, block in enumerate(sequence.block_table):
            if i < num_cached // BLOCK_SIZE:
                assert self.device[block] == hashes[i], "a hit holds what it is said to hold"
            else:
                self.device[block] = hashes[i] if i < len(hashes) else b"partly filled"
        sequence.num_computed_tokens = sequence.num_tokens
        manager.publish_computed(sequence, num_cached)
        manager.release(sequence)
        return num_cached

    def copy(self, copies: list[BlockCopy]) -> None:
        for source, target, direction in copies:
            if direction == "to_host":
                self.slots[target] = self.device[source]
            else:
                assert direction == "from_host"
                self.device[target] = self.slots[source]

    def check(self) -> None:
        pool = self.manager.pool
        assert pool.num_free + pool.num_referenced + pool.num_cached == pool.num_blocks
        assert pool.num_referenced == 0
        assert_counts_add_up(self.host)
        assert self.host.num_taken == 0
        for block_hash, slot in self.host._slots.items():
            assert self.slots[slot] == block_hash


def sequence_of(family: int, num_tokens: int) -> Sequence:
    token_ids = [1000 * family + i for i in range(num_tokens)]
    return Sequence("r", token_ids, num_tokens, SamplingParams(), 10_000)


def test_a_prefix_that_was_evicted_comes_back_from_the_host():
    machine = Machine(num_blocks=4, num_slots=8)
    assert machine.run(sequence_of(1, 14)) == 0
    assert machine.run(sequence_of(2, 14)) == 0
    assert machine.run(sequence_of(1, 14)) == 12
    machine.check()
    assert machine.host.num_hits > 0


def test_without_room_on_the_host_it_is_computed_again():
    machine = Machine(num_blocks=4, num_slots=0)
    machine.run(sequence_of(1, 14))
    machine.run(sequence_of(2, 14))
    assert machine.run(sequence_of(1, 14)) == 0
    machine.check()


@settings(deadline=None)
@given(
    num_blocks=st.integers(5, 9),
    num_slots=st.integers(0, 7),
    wishes=st.lists(st.tuples(st.integers(1, 4), st.integers(1, 20)), max_size=30),
    resets=st.sets(st.integers(0, 29), max_size=2),
)
def test_whatever_comes_every_hit_holds_what_it_is_said_to_hold(
    num_blocks: int, num_slots: int, wishes: list[tuple[int, int]], resets: set[int]
):
    machine = Machine(num_blocks, num_slots)
    for number, (family, num_tokens) in enumerate(wishes):
        if number in resets:
            machine.manager.forget_all()
            assert machine.manager.find_cached_prefix(sequence_of(family, num_tokens)).blocks == []
        machine.run(sequence_of(family, num_tokens))
        machine.check()


def test_a_block_that_may_be_wrong_is_wrong_on_the_host_too():
    machine = Machine(num_blocks=4, num_slots=8)
    machine.run(sequence_of(1, 14))
    machine.run(sequence_of(2, 14))
    again = sequence_of(1, 14)
    machine.manager.start(again, machine.manager.find_cached_prefix(again))
    machine.copy(machine.manager.take_copies())
    machine.manager.pool.unpublish(again.block_table)
    machine.manager.release(again)
    assert machine.run(sequence_of(1, 14)) == 0
