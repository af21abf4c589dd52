"""The memory behind `core.host_blocks`: copies of KV blocks on the host, pinned where there is a GPU to copy from."""

from __future__ import annotations

import torch


class HostTier:
    """num_slots blocks for each layer, laid out as on the device.

    kv_caches   the device's, one per layer; only their shapes are looked at
    block_dim   the dimension of theirs that counts blocks
    """

    def __init__(self, kv_caches: list[torch.Tensor], block_dim: int, num_slots: int) -> None:
        self.num_slots = num_slots
        self.caches = [
            torch.empty(
                [num_slots if dim == block_dim else size for dim, size in enumerate(kv_cache.shape)],
                dtype=kv_cache.dtype,
                pin_memory=kv_cache.is_cuda,
            )
            for kv_cache in kv_caches
        ]
