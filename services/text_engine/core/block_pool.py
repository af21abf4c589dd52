"""The KV cache's blocks: which are free, which are in use and by how many, which are kept for a later prefix hit.

Knows block numbers and hashes only; what is in a block, and how many tokens fit, is the caller's business.
`num_free + num_referenced + num_cached == num_blocks` after every call.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable


class OutOfBlocks(Exception):
    """More blocks were asked for than are available. Callers check `num_available` first."""


class BlockPool:
    """Reference-counted blocks with least-recently-used reuse of unreferenced, published ones."""

    def __init__(self, num_blocks: int) -> None:
        """Whoever keeps copies of blocks sets `on_evicted` and `on_unpublished`."""
        if num_blocks < 1:
            raise ValueError(f"a block pool needs at least one block, not {num_blocks}")
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))
        self._ref_counts = [0] * num_blocks
        self._hash_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}
        # Unreferenced blocks that still hold a published prefix, least recently used first.
        self._cached: OrderedDict[int, None] = OrderedDict()
        self.num_evictions = 0
        self.num_ever_used = 0  # the blocks from here on were not handed out since all were free and forgotten
        # (block, hash): it is about to be reused, and still holds what the hash says.
        self.on_evicted: Callable[[int, bytes], None] = lambda block, block_hash: None
        # (hash): what is known by it may be wrong.
        self.on_unpublished: Callable[[bytes], None] = lambda block_hash: None

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def num_referenced(self) -> int:
        return self.num_blocks - len(self._free) - len(self._cached)

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` can hand out now: free ones, then cached ones by eviction."""
        return len(self._free) + len(self._cached)

    def ref_count(self, block: int) -> int:
        return self._ref_counts[block]

    def ref_counts(self) -> list[int]:
        """How many hold each block; a block that nobody holds is free or cached."""
        return self._ref_counts.copy()

    def cached_blocks(self) -> list[int]:
        """Least recently used first, the next to be evicted."""
        return list(self._cached)

    def is_published(self, block: int) -> bool:
        return block in self._hash_of

    def allocate(self, count: int) -> list[int]:
        """Hand out `count` blocks, each with one reference; evicts cached blocks only when none is free."""
        if count > self.num_available:
            raise OutOfBlocks(f"{count} blocks asked for, {self.num_available} available")
        return [self._take() for _ in range(count)]

    def _take(self) -> int:
        if self._free:
            block = self._free.pop()
            self.num_ever_used = max(self.num_ever_used, block + 1)
        else:
            block, _ = self._cached.popitem(last=False)
            self.on_evicted(block, self._hash_of[block])
            self._unpublish(block)
            self.num_evictions += 1
        self._ref_counts[block] = 1
        return block

    def share(self, blocks: Iterable[int]) -> None:
        """One more reference to each block, found by `lookup`; takes cached ones out of the eviction order."""
        for block in blocks:
            if self._ref_counts[block] == 0:
                del self._cached[block]
            self._ref_counts[block] += 1

    def free(self, blocks: Iterable[int]) -> None:
        """Drop one reference to each block. Published blocks stay findable until reused, in the order given here:

        hand over a sequence's last block first, so that the beginning of a prefix outlives its end.
        """
        for block in blocks:
            assert self._ref_counts[block] > 0, f"block {block} is freed more often than it was handed out"
            self._ref_counts[block] -= 1
            if self._ref_counts[block] > 0:
                continue
            if block in self._hash_of:
                self._cached[block] = None
            else:
                self._free.append(block)

    def publish(self, block: int, block_hash: bytes) -> None:
        """Make a full, computed block findable. If the hash is known already, the first block keeps the name."""
        if block_hash in self._block_of or block in self._hash_of:
            return
        self._hash_of[block] = block_hash
        self._block_of[block_hash] = block

    def unpublish(self, blocks: Iterable[int]) -> None:
        """Make blocks that are in use unfindable: what they hold may be wrong."""
        for block in blocks:
            if block in self._hash_of:
                self.on_unpublished(self._hash_of[block])
                self._unpublish(block)

    def forget_all(self) -> None:
        """Make every block unfindable; those that nobody holds are free. If that is all of them, it is as at the start:
        the first ones are used first."""
        self._hash_of.clear()
        self._block_of.clear()
        self._free.extend(reversed(self._cached))
        self._cached.clear()
        if len(self._free) == self.num_blocks:
            self._free.sort(reverse=True)
            self.num_ever_used = 0

    def lookup(self, block_hash: bytes) -> int | None:
        return self._block_of.get(block_hash)

    def _unpublish(self, block: int) -> None:
        block_hash = self._hash_of.pop(block)
        del self._block_of[block_hash]
