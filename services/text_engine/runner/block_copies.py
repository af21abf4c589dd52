"""Blocks of the KV cache copied, on the device and between it and the host."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from services.text_engine.core.block_copy import BlockCopy


def copy_blocks(
    copies: Iterable[BlockCopy],
    kv_caches: list[torch.Tensor],
    block_dim: int,
    host_caches: list[torch.Tensor] | None = None,
) -> None:
    """One after another: what one reads, a later one may write. On a GPU nothing waits: its stream keeps the order.

    kv_caches    one for each layer, in any layout that counts blocks in dimension `block_dim`
    host_caches  alike, with slots instead of blocks
    """
    for source, target, direction in copies:
        sources = host_caches if direction == "from_host" else kv_caches
        targets = host_caches if direction == "to_host" else kv_caches
        assert sources is not None
        assert targets is not None
        for source_cache, target_cache in zip(sources, targets, strict=True):
            target_cache.select(block_dim, target).copy_(source_cache.select(block_dim, source), non_blocking=True)
