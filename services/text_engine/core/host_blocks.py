"""A second place for cached blocks: host memory, for a device whose own is short. Which slot holds which block's copy.

Knows hashes and slot numbers only. What is to be copied is decided here and in the block manager, in the order in which
it has to happen; the runner does it before the step's own work.
"""

from __future__ import annotations

from collections import OrderedDict


class HostBlocks:
    """Slots with least-recently-used reuse. `num_free + num_held + num_taken == num_slots` after every call."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.num_hits = 0
        self._free = list(range(num_slots - 1, -1, -1))
        self._slots: OrderedDict[bytes, int] = OrderedDict()
        self._taken: dict[int, bytes] = {}

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_held(self) -> int:
        return len(self._slots)

    @property
    def num_taken(self) -> int:
        return len(self._taken)

    def lookup(self, block_hash: bytes) -> int | None:
        return self._slots.get(block_hash)

    def put(self, block_hash: bytes) -> int | None:
        """Where to copy a block to; None: its copy is here already, or every slot is taken."""
        if block_hash in self._slots:
            self._slots.move_to_end(block_hash)
            return None
        if self._free:
            slot = self._free.pop()
        elif self._slots:
            _, slot = self._slots.popitem(last=False)
        else:
            return None
        self._slots[block_hash] = slot
        return slot

    def take(self, block_hash: bytes) -> int:
        """The slot of a copy that is about to be read: nobody else gets it until `give_back`."""
        slot = self._slots.pop(block_hash)
        self._taken[slot] = block_hash
        self.num_hits += 1
        return slot

    def give_back(self, slot: int) -> None:
        """What is read from the slot comes before whatever is written to it from now on."""
        self._slots[self._taken.pop(slot)] = slot

    def forget(self, block_hash: bytes) -> None:
        """The copy may be wrong."""
        slot = self._slots.pop(block_hash, None)
        if slot is not None:
            self._free.append(slot)

    def forget_all(self) -> None:
        assert not self._taken
        self._free.extend(self._slots.values())
        self._slots.clear()
