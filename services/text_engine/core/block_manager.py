"""Gives sequences their blocks: prefix matching, growth, publishing and release.

Decides nothing about order or fairness; the scheduler asks and acts on the answers.
"""

from __future__ import annotations

from dataclasses import dataclass

from services.text_engine.core.block_copy import BlockCopy
from services.text_engine.core.block_pool import BlockPool
from services.text_engine.core.host_blocks import HostBlocks
from services.text_engine.core.prefix_hash import extend_block_hashes
from services.text_engine.core.sequence import Sequence


@dataclass(frozen=True, slots=True)
class CachedPrefix:
    """What a waiting sequence need not compute.

    blocks      whole ones, in order; one that is on the host only stands there as the complement of its slot, `~slot`,
                which is negative
    num_tokens  in them, and at the beginning of `tail_block`
    tail_block  of another choice, which goes on writing to it: to be copied; None: nothing is behind the whole blocks
    """

    blocks: list[int]
    num_tokens: int
    tail_block: int | None = None


class BlockManager:
    """Maps sequences onto a BlockPool, `block_size` tokens a block.

    host    where evicted blocks are copied to and found again; None: they are computed again
    """

    def __init__(
        self,
        pool: BlockPool,
        block_size: int,
        *,
        enable_prefix_caching: bool = True,
        host: HostBlocks | None = None,
    ) -> None:
        self.pool = pool
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.host = host
        self._copies: list[BlockCopy] = []
        if host is not None:
            pool.on_evicted, pool.on_unpublished = self._save, host.forget
        self.num_queried_tokens = 0  # of prompts that looked for a prefix when they started
        self.num_hit_tokens = 0  # those of them that need not be computed
        self.image_blocks: set[int] = set()  # those last published with image positions in them, for the status page

    @property
    def max_sequence_tokens(self) -> int:
        """The longest sequence that fits when it is alone."""
        return self.pool.num_blocks * self.block_size

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def find_cached_prefix(self, sequence: Sequence) -> CachedPrefix:
        """The longest prefix that is published, or held by another choice of the request, without taking its blocks.

        It covers `sequence.max_cached_tokens` at most.
        """
        if (choice := sequence.to_fork_from()) is not None:
            return self._fork(sequence, choice.block_table)
        blocks = self._find_cached(sequence, 0, self.host)
        return CachedPrefix(blocks, len(blocks) * self.block_size)

    def _fork(self, sequence: Sequence, block_table: list[int]) -> CachedPrefix:
        """The prompt but for its last token, out of blocks that hold it: what is whole is shared, what is not is copied
        (copy on write, but at once: the next token is written there)."""
        num_tokens = sequence.num_prompt_tokens - 1
        num_whole = num_tokens // self.block_size
        tail_block = block_table[num_whole] if num_tokens % self.block_size else None
        return CachedPrefix(block_table[:num_whole], num_tokens, tail_block)

    def _find_cached(self, sequence: Sequence, first: int, host: HostBlocks | None) -> list[int]:
        """Published blocks that hold the sequence's blocks `first` and on, up to the first that is missing."""
        if not self.enable_prefix_caching:
            return []
        hashes = extend_block_hashes(sequence, self.block_size)
        blocks: list[int] = []
        for i in range(first, sequence.max_cached_tokens // self.block_size):
            block = self.pool.lookup(hashes[i])
            if block is None and host is not None and (slot := host.lookup(hashes[i])) is not None:
                block = ~slot
            if block is None:
                break
            blocks.append(block)
        return blocks

    def can_start(self, sequence: Sequence, prefix: CachedPrefix, *, num_extra: int = 0) -> bool:
        """Whether the pool can hold all tokens of a waiting sequence, so that its prefill will not be cut short.

        num_extra   blocks that others would give back for it; negative: those to be kept for others
        """
        here = [block for block in prefix.blocks if block >= 0]
        num_needed = self.num_blocks_for(sequence.num_tokens) - len(here)
        num_revived = sum(self.pool.ref_count(block) == 0 for block in here)
        return num_needed + num_revived <= self.pool.num_available + num_extra

    def start(self, sequence: Sequence, prefix: CachedPrefix) -> None:
        """Give a waiting sequence its cached prefix; its computation goes on behind it."""
        assert not sequence.block_table
        assert sequence.num_computed_tokens == 0
        self.pool.share(block for block in prefix.blocks if block >= 0)
        sequence.block_table = self._load(sequence, prefix.blocks)
        if prefix.tail_block is not None:
            (copy,) = self.pool.allocate(1)
            self._copies.append(BlockCopy(prefix.tail_block, copy))
            sequence.block_table.append(copy)
        sequence.num_computed_tokens = prefix.num_tokens
        if self.enable_prefix_caching:
            self.num_queried_tokens += sequence.num_tokens
            self.num_hit_tokens += sequence.num_computed_tokens

    def _load(self, sequence: Sequence, blocks: list[int]) -> list[int]:
        """The same prefix, all of it on the device: what is on the host is copied before the step computes."""
        if self.host is None or all(block >= 0 for block in blocks):
            return list(blocks)
        missing = [i for i, block in enumerate(blocks) if block < 0]
        # Taken first: making room for them may bring other blocks to the host, and not in their place.
        slots = [self.host.take(sequence.block_hashes[i]) for i in missing]
        table = list(blocks)
        for i, slot, block in zip(missing, slots, self.pool.allocate(len(missing)), strict=True):
            self._copies.append(BlockCopy(slot, block, "from_host"))
            self.host.give_back(slot)
            self.pool.publish(block, sequence.block_hashes[i])
            self._note_image(sequence, i, block)
            table[i] = block
        return table

    def _save(self, block: int, block_hash: bytes) -> None:
        """A block is about to be reused: keep its copy."""
        assert self.host is not None
        slot = self.host.put(block_hash)
        if slot is not None:
            self._copies.append(BlockCopy(block, slot, "to_host"))

    def take_copies(self) -> list[BlockCopy]:
        """What is to be copied, in this order, before anything else is written to any block."""
        copies, self._copies = self._copies, []
        return copies

    def adopt_cached(self, sequence: Sequence) -> int:
        """Let a running sequence go on from blocks that another one has published since it started.

        Its own, partly filled last block is given back. Returns the number of tokens it need not compute.
        """
        first = sequence.num_computed_tokens // self.block_size
        found = self._find_cached(sequence, first, host=None)
        if not found:
            return 0
        self.pool.share(found)
        self.pool.free(reversed(sequence.block_table[first:]))
        sequence.block_table[first:] = found
        num_saved = (first + len(found)) * self.block_size - sequence.num_computed_tokens
        sequence.num_computed_tokens += num_saved
        self.num_hit_tokens += num_saved
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

    def trim(self, sequence: Sequence) -> None:
        """Take back the blocks behind its computed tokens, which rejected drafts were written to."""
        num_blocks = self.num_blocks_for(sequence.num_computed_tokens)
        self.pool.free(reversed(sequence.block_table[num_blocks:]))
        del sequence.block_table[num_blocks:]

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
            block = sequence.block_table[i]
            self.pool.publish(block, hashes[i])
            self._note_image(sequence, i, block)

    def _note_image(self, sequence: Sequence, index: int, block: int) -> None:
        """Remember whether a block that holds the sequence's block `index` has image positions in it."""
        start = index * self.block_size
        if sequence.images and sequence.images_between(start, start + self.block_size):
            self.image_blocks.add(block)
        elif self.image_blocks:
            self.image_blocks.discard(block)

    def forget_all(self) -> None:
        """No later sequence finds what has been published until now."""
        self.pool.forget_all()
        self.image_blocks.clear()
        if self.host is not None:
            self.host.forget_all()

    def release(self, sequence: Sequence) -> None:
        """Take all blocks back; published ones stay cached, the prefix's beginning longest."""
        self.pool.free(reversed(sequence.block_table))
        sequence.block_table = []
        sequence.num_computed_tokens = 0
