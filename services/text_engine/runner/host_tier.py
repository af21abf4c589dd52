"""The memory behind `core.host_blocks`: copies of KV blocks on the host, pinned where there is a GPU to copy from."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from services.text_engine.core.host_blocks import BlockCopy


def host_tier_pays(device: torch.device) -> bool:
    """Whether the device has memory of its own: a CPU's KV cache is on the host already."""
    return device.type != "cpu"


class HostTier:
    """num_slots blocks for each layer, laid out as on the device.

    kv_caches   the device's, one per layer; only their shapes are looked at
    block_dim   the dimension of theirs that counts blocks
    """

    def __init__(self, kv_caches: list[torch.Tensor], block_dim: int, num_slots: int) -> None:
        self._block_dim = block_dim
        self.num_slots = num_slots
        self._host_caches = [
            torch.empty(
                [num_slots if dim == block_dim else size for dim, size in enumerate(kv_cache.shape)],
                dtype=kv_cache.dtype,
                pin_memory=kv_cache.is_cuda,
            )
            for kv_cache in kv_caches
        ]

    def copy(self, copies: Iterable[BlockCopy], kv_caches: list[torch.Tensor]) -> None:
        """One after another: a slot may be read, then written. On a GPU nothing waits: its stream keeps the order."""
        for block, slot, to_host in copies:
            for host_cache, kv_cache in zip(self._host_caches, kv_caches, strict=True):
                on_host = host_cache.select(self._block_dim, slot)
                on_device = kv_cache.select(self._block_dim, block)
                source, target = (on_device, on_host) if to_host else (on_host, on_device)
                target.copy_(source, non_blocking=True)
