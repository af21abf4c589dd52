"""What holds between two steps of any engine, whatever has happened to it."""

from __future__ import annotations

from collections import Counter

from services.text_engine.core.block_pool import BlockPool
from services.text_engine.core.prefix_hash import extend_block_hashes
from services.text_engine.core.sequence import Sequence, SequenceStatus
from services.text_engine.engine import Engine


def check_engine(engine: Engine) -> None:
    check_pool(engine.scheduler.blocks.pool)
    _check_blocks_of_sequences(engine)
    _check_queues(engine)
    _check_requests(engine)
    _check_embeddings(engine)
    host = engine.scheduler.blocks.host
    if host is not None:
        assert host.num_free + host.num_held == host.num_slots


def check_pool(pool: BlockPool) -> None:
    """Each block is in exactly one of three places, and a hash names exactly one block."""
    assert pool.num_free + pool.num_referenced + pool.num_cached == pool.num_blocks
    ref_counts = pool.ref_counts()
    free, cached = pool._free, pool.cached_blocks()
    referenced = [block for block, count in enumerate(ref_counts) if count > 0]
    assert sorted([*free, *cached, *referenced]) == list(range(pool.num_blocks)), "a block is lost, or in two places"
    assert all(pool.is_published(block) for block in cached)
    assert not any(pool.is_published(block) for block in free), "a free block can be found"
    assert pool._block_of == {block_hash: block for block, block_hash in pool._hash_of.items()}


def _check_blocks_of_sequences(engine: Engine) -> None:
    scheduler, blocks = engine.scheduler, engine.scheduler.blocks
    pool, block_size = blocks.pool, blocks.block_size
    holders = Counter(block for sequence in scheduler.running for block in sequence.block_table)
    assert pool.ref_counts() == [holders[block] for block in range(pool.num_blocks)], "references are not holders"
    for sequence in scheduler.running:
        table = sequence.block_table
        assert len(set(table)) == len(table)
        assert len(table) == blocks.num_blocks_for(sequence.num_computed_tokens)
        hashes = extend_block_hashes(sequence, block_size)
        for i, block in enumerate(table):
            if pool.is_published(block):
                assert (i + 1) * block_size <= sequence.num_computed_tokens, "a block is published before it is full"
                assert pool._hash_of[block] == hashes[i], "a block is published as something else"
    assert 0 <= blocks.num_hit_tokens <= blocks.num_queried_tokens


def _check_queues(engine: Engine) -> None:
    scheduler = engine.scheduler
    assert len(scheduler.running) <= scheduler.max_num_seqs
    for queue, status in ((scheduler.running, SequenceStatus.RUNNING), (scheduler.waiting, SequenceStatus.WAITING)):
        assert all(sequence.status is status for sequence in queue)
        orders = [sequence.order for sequence in queue]
        assert orders == sorted(set(orders)), "a queue is out of order, or holds somebody twice"
    for sequence in scheduler.waiting:
        assert (sequence.block_table, sequence.num_computed_tokens) == ([], 0)
    for sequence in scheduler.running:
        assert 0 <= sequence.num_computed_tokens < sequence.num_tokens < sequence.max_total_tokens


def _check_requests(engine: Engine) -> None:
    """What is queued is what is left of the requests, and nothing else."""
    unfinished: list[Sequence] = []
    for state in engine._requests.values():
        assert not all(choice.finished for choice in state.choices), "a request that is over was not forgotten"
        unfinished += [choice.sequence for choice in state.choices if not choice.finished]
    queued = [*engine.scheduler.running, *engine.scheduler.waiting]
    assert len(queued) == len(unfinished)
    assert set(queued) == set(unfinished)


def _check_embeddings(engine: Engine) -> None:
    store = engine.embeddings
    needed: dict[str, set[str]] = {}
    for request_id, state in engine._requests.items():
        for ref in state.request.image_refs:
            needed.setdefault(ref.image_key, set()).add(request_id)
    assert {key: entry.needed_by for key, entry in store._entries.items()} == needed
    assert store._idle.keys().isdisjoint(needed)
    assert store.num_idle_bytes == sum(rows.nbytes for rows in store._idle.values()) <= store._max_idle_bytes
