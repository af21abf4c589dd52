"""Blocks of the KV cache copied, on the device and between it and the host."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence

import torch

from services.text_engine.core.block_copy import BlockCopy


def copy_blocks(
    copies: Iterable[BlockCopy],
    kv_caches: list[torch.Tensor],
    block_dim: int,
    host_caches: list[torch.Tensor] | None = None,
) -> None:
    """As if one after another: what one reads, a later one may write. On a GPU nothing waits: its stream keeps the
    order.

    kv_caches    one for each layer, in any layout that counts blocks in dimension `block_dim`
    host_caches  alike, with slots instead of blocks
    """
    for direction, group in itertools.groupby(copies, key=lambda copy: copy.direction):
        if direction == "on_device":
            for independent in _independent(group):
                _copy_on_device(independent, kv_caches, block_dim)
            continue
        assert host_caches is not None
        for source, target, _ in group:
            sources, targets = (kv_caches, host_caches) if direction == "to_host" else (host_caches, kv_caches)
            for source_cache, target_cache in zip(sources, targets, strict=True):
                target_cache.select(block_dim, target).copy_(source_cache.select(block_dim, source), non_blocking=True)


def _independent(copies: Iterable[BlockCopy]) -> Iterator[list[BlockCopy]]:
    """The copies in their order, as long runs as can be made at once: none reads or writes what an earlier one of its
    run has written."""
    run: list[BlockCopy] = []
    written: set[int] = set()
    for copy in copies:
        if copy.source in written or copy.target in written:
            yield run
            run, written = [], set()
        run.append(copy)
        written.add(copy.target)
    if run:
        yield run


def _copy_on_device(copies: Sequence[BlockCopy], kv_caches: list[torch.Tensor], block_dim: int) -> None:
    """Two calls a layer, however many choices fork from one prompt."""
    device = kv_caches[0].device
    blocks = torch.tensor([copy[:2] for copy in copies], pin_memory=device.type == "cuda")
    sources, targets = blocks.to(device, non_blocking=True).unbind(1)
    for kv_cache in kv_caches:
        # A block's elements eight bytes at a time, whatever they are: such calls take time by the element.
        rows = kv_cache.flatten(block_dim + 1).view(torch.int64)
        rows.index_copy_(block_dim, targets, rows.index_select(block_dim, sources))
