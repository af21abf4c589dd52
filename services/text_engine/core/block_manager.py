"""Gives sequences their blocks: prefix matching, growth, publishing and release.

Decides nothing about order or fairness; the scheduler asks and acts on the answers.
"""

from __future__ import annotations

from services.text_engine.core.block_pool import BlockPool
from services.text_engine.core.prefix_hash import extend_block_hashes
from services.text_engine.core.sequence import Sequence


class BlockManager:
    """Maps sequences onto a BlockPool, `block_size` tokens a block."""

    def __init__(self, pool: BlockPool, block_size: int, *, enable_prefix_caching: bool = True) -> None:
        self.pool = pool
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching

    @property
    def max_sequence_tokens(self) -> int:
        """The longest sequence that fits when it is alone."""
        return self.pool.num_blocks * self.block_size

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def find_cached_prefix(self, sequence: Sequence) -> list[int]:
        """Blocks of the longest published prefix, without taking them.

        The last token is never covered: it is always recomputed, or there would be no logits to sample from.
        """
        return self._find_cached(sequence, 0)

    def _find_cached(self, sequence: Sequence, first: int) -> list[int]:
        """Published blocks that hold the sequence's blocks `first` and on, up to the first that is missing."""
        if not self.enable_prefix_caching:
            return []
        hashes = extend_block_hashes(sequence, self.block_size)
        blocks: list[int] = []
        for i in range(first, (sequence.num_tokens - 1) // self.block_size):
            block = self.pool.lookup(hashes[i])
            if block is None:
                break
            blocks.append(block)
        return blocks

    def can_start(self, sequence: Sequence, cached_prefix: list[int], *, num_extra: int = 0) -> bool:
        """Whether the pool can hold all tokens of a waiting sequence, so that its prefill will not be cut short.

        num_extra   blocks that others would give back for it; negative: those to be kept for others
        """
        num_needed = self.num_blocks_for(sequence.num_tokens) - len(cached_prefix)
        num_revived = sum(self.pool.ref_count(block) == 0 for block in cached_prefix)
        return num_needed + num_revived <= self.pool.num_available + num_extra

    def start(self, sequence: Sequence, cached_prefix: list[int]) -> None:
        """Give a waiting sequence its cached prefix; its computation goes on behind it."""
        assert not sequence.block_table
        assert sequence.num_computed_tokens == 0
        self.pool.share(cached_prefix)
        sequence.block_table = list(cached_prefix)
        sequence.num_computed_tokens = len(cached_prefix) * self.block_size

    def adopt_cached(self, sequence: Sequence) -> int:
        """Let a running sequence go on from blocks that another one has published since it started.

        Its own, partly filled last block is given back. Returns the number of tokens it need not compute.
        """
        first = sequence.num_computed_tokens // self.block_size
        found = self._find_cached(sequence, first)
        if not found:
            return 0
        self.pool.share(found)
        self.pool.free(reversed(sequence.block_table[first:]))
        sequence.block_table[first:] = found
        num_saved = (first + len(found)) * self.block_size - sequence.num_computed_tokens
        sequence.num_computed_tokens += num_saved
        return num_saved

    def grow(self, sequence: Sequence, num_tokens: int) -> bool:
        """Make room for the first `num_tokens` tokens; False, with nothing taken, if the pool cannot."""
        num_missing = self.num_blocks_for(num_tokens) - len(sequence.block_table)
        if num_missing <= 0:
            return True
        if num_missing > self.pool.num_available:
            return False
        sequence.block_table += self.pool.allocate(num_missing)
        return True

    def publish_computed(self, sequence: Sequence, num_computed_before: int) -> None:
        """Make the blocks that became full since `num_computed_before` findable by later sequences."""
        if not self.enable_prefix_caching:
            return
        first = num_computed_before // self.block_size
        last = sequence.num_computed_tokens // self.block_size
        if first == last:
            return
        hashes = extend_block_hashes(sequence, self.block_size)
        for i in range(first, last):
            self.pool.publish(sequence.block_table[i], hashes[i])

    def release(self, sequence: Sequence) -> None:
        """Take all blocks back; published ones stay cached, the prefix's beginning longest."""
        self.pool.free(reversed(sequence.block_table))
        sequence.block_table = []
        sequence.num_computed_tokens = 0
