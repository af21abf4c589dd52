"""Memory for KV blocks before anybody writes to them: a page that is touched for the first time costs its step time.

Usually that is a few hundredths of a millisecond for 2 MiB. Where memory is in pieces, or a virtual machine's host has
yet to find it, it is tens of milliseconds, and every layer's cache comes to a new page in the same step. So an idle
engine, and each rank of one, has the pages of the next blocks ready. It does not take all of the cache's memory at
once: a machine that serves little keeps what it does not use.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from typing import Final

import torch

from shared.resources import available_memory_bytes

AHEAD_BYTES: Final = 512 << 20  # over all layers, beyond the last block ever used
PIECE_BYTES: Final = 2 << 20  # of one layer at a time: a huge page
SPARED_BYTES: Final = 1 << 30  # of the machine's or the container's memory: what is used may still need it
_MADV_POPULATE_WRITE: Final = 23  # Linux 5.14; pages are mapped as if they were written to, what is in them stays


class MemoryAhead:
    """kv_caches  one for each layer; in host memory with their blocks in order, or there is nothing to do"""

    def __init__(self, kv_caches: list[torch.Tensor], block_dim: int) -> None:
        self._kv_caches = kv_caches
        self._num_blocks = kv_caches[0].shape[block_dim]
        self._num_blocks_ahead = AHEAD_BYTES * self._num_blocks // sum(kv_cache.nbytes for kv_cache in kv_caches)
        self._num_bytes_ready = [0] * len(kv_caches)
        self._works = block_dim == 0 and sys.platform == "linux" and kv_caches[0].device.type == "cpu"

    def advance(self, num_used_blocks: int) -> bool:
        """Get the memory of one more piece, where most is missing. False: enough is ready, or none can be had so.

        num_used_blocks  blocks from here on were never written to
        """
        num_wanted = min(self._num_blocks, num_used_blocks + self._num_blocks_ahead)
        missing = [
            kv_cache.nbytes * num_wanted // self._num_blocks - num_ready
            for kv_cache, num_ready in zip(self._kv_caches, self._num_bytes_ready, strict=True)
        ]
        most = max(missing)
        if not self._works or most <= 0 or not _can_spare():
            return False
        layer = missing.index(most)
        address = self._kv_caches[layer].data_ptr() + self._num_bytes_ready[layer]
        self._works = _populate(address, min(PIECE_BYTES, most))
        self._num_bytes_ready[layer] += min(PIECE_BYTES, most)
        return self._works


def _can_spare() -> bool:
    available = available_memory_bytes()
    return available is None or available > SPARED_BYTES


def _populate(address: int, num_bytes: int) -> bool:
    """False: this kernel cannot."""
    start = address // mmap.PAGESIZE * mmap.PAGESIZE
    end = address + num_bytes
    libc = ctypes.CDLL(None)
    return bool(libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), _MADV_POPULATE_WRITE) == 0)
