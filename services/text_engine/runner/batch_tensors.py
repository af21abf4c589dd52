"""A scheduled batch as arrays, then tensors: one flat row per token, and where each sequence's keys and values go."""

from __future__ import annotations

import math
from collections.abc import Sequence as AbstractSequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from services.text_engine.attention.interface import AttentionMetadata
from services.text_engine.core.batch import Batch
from services.text_engine.core.block_copy import BlockCopy
from services.text_engine.runner.grid_positions import grid_positions

ALIGNMENT = 16  # bytes; what the kernels read in one go
MAX_DECODE_ROW = 16  # tokens of a row with a draft; a prompt's last few are as good as one


@dataclass(frozen=True, slots=True)
class BatchArrays:
    """What every rank needs to know of a step, on the host. Shapes as in `BatchTensors` and `AttentionMetadata`.

    num_image_rows  rows of the batch that hold an image's embedding instead of their token's
    prompt_rows     [num_scored] int64; rows of every `scored_positions`, in batch order; None: there are none
    adapter_of_token  [num_tokens] int32; numbers of LoRA adapters, 0 for the model itself; None: it is all of them
    copies          of blocks, before anything else
    """

    token_ids: NDArray[np.int64]
    positions: NDArray[np.int64]
    sampling_rows: NDArray[np.int64]
    cu_seqlens_q: NDArray[np.int32]
    seq_lens: NDArray[np.int32]
    block_tables: NDArray[np.int32]
    slot_mapping: NDArray[np.int64]
    image_spans: NDArray[np.int32] | None = None
    num_image_rows: int = 0
    prompt_rows: NDArray[np.int64] | None = None
    adapter_of_token: NDArray[np.int32] | None = None
    copies: AbstractSequence[BlockCopy] = ()

    @property
    def num_seqs(self) -> int:
        return len(self.seq_lens)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def is_decode(self) -> bool:
        """One new token for each sequence, or, with drafts, a few; and none of them an image's."""
        if self.num_image_rows or self.image_spans is not None:
            return False
        return self.num_tokens == self.num_seqs or int(np.diff(self.cu_seqlens_q).max()) <= MAX_DECODE_ROW


@dataclass(frozen=True, slots=True)
class BatchTensors:
    """All on the model's device.

    token_ids      [num_tokens] int64
    positions      [num_tokens] int64; [3, num_tokens] where they have three coordinates
    sampling_rows  [num_sampling] int64; the last rows of each sequence that reaches its end, in batch order: one, and
                   one more for each draft token
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    sampling_rows: torch.Tensor
    attention: AttentionMetadata


def build_batch_arrays(batch: Batch, block_size: int, *, has_grid_positions: bool = False) -> BatchArrays:
    """has_grid_positions   whether the model's positions have three coordinates"""
    items = batch.scheduled
    num_new = np.array([item.num_new_tokens for item in items], dtype=np.int32)
    ends = np.array([item.end for item in items], dtype=np.int32)
    cu_seqlens = np.zeros(len(items) + 1, dtype=np.int32)
    np.cumsum(num_new, out=cu_seqlens[1:])
    total = int(cu_seqlens[-1])

    token_ids = np.empty(total, dtype=np.int64)
    block_tables = np.zeros((len(items), max(-(-item.end // block_size) for item in items)), dtype=np.int32)
    num_image_rows = 0
    image_spans = None
    prompt_rows: list[int] = []
    adapters = [item.sequence.adapter for item in items]
    for i, item in enumerate(items):
        sequence = item.sequence
        if item.num_new_tokens == 1:
            token_ids[cu_seqlens[i]] = sequence.token_ids[item.start]
        else:
            token_ids[cu_seqlens[i] : cu_seqlens[i + 1]] = item.token_ids
        num_blocks = -(-item.end // block_size)
        block_tables[i, :num_blocks] = sequence.block_table[:num_blocks]
        prompt_rows += [int(cu_seqlens[i]) + position - item.start for position in item.scored_positions]
        for span in sequence.images_between(item.start, item.end):
            first, last = max(span.start, item.start), min(span.end, item.end)
            num_image_rows += last - first
            if span.attention == "bidirectional":
                if image_spans is None:
                    image_spans = np.zeros((total, 2), dtype=np.int32)
                offset = cu_seqlens[i] - item.start
                image_spans[offset + first : offset + last] = span.start, span.end

    ends_q = cu_seqlens[1:].tolist()
    row_of_token = np.repeat(np.arange(len(items)), num_new)
    indices = np.arange(total, dtype=np.int64) + np.repeat(ends - cu_seqlens[1:], num_new)
    blocks = block_tables[row_of_token, indices // block_size].astype(np.int64)
    positions = indices
    if has_grid_positions:
        positions = np.concatenate([grid_positions(i.sequence.images, i.start, i.end) for i in items], axis=1)
    return BatchArrays(
        token_ids=token_ids,
        positions=positions,
        sampling_rows=np.array(
            [row for i, item in enumerate(items) for row in range(ends_q[i] - item.num_sampling_rows, ends_q[i])],
            dtype=np.int64,
        ),
        cu_seqlens_q=cu_seqlens,
        seq_lens=ends,
        block_tables=block_tables,
        slot_mapping=blocks * block_size + indices % block_size,
        image_spans=image_spans,
        num_image_rows=num_image_rows,
        prompt_rows=np.array(prompt_rows, dtype=np.int64) if prompt_rows else None,
        adapter_of_token=np.repeat(np.array(adapters, dtype=np.int32), num_new) if any(adapters) else None,
        copies=batch.copies,
    )


def to_tensors(arrays: BatchArrays, device: torch.device) -> BatchTensors:
    """The batch on `device`. On a GPU one asynchronous copy out of pinned memory; nothing waits for it."""
    host: list[NDArray[np.generic]] = [
        arrays.token_ids,
        arrays.positions,
        arrays.sampling_rows,
        arrays.slot_mapping,
        arrays.cu_seqlens_q,
        arrays.seq_lens,
        arrays.block_tables,
    ]
    if arrays.image_spans is not None:
        host.append(arrays.image_spans)
    if device.type == "cpu":
        tensors = [torch.from_numpy(array) for array in host]
    else:
        packing = Packing.of(host)
        tensors = packing.views(packing.pack(host, pin_memory=True).to(device, non_blocking=True))
    token_ids, positions, sampling_rows, slot_mapping, cu_seqlens, seq_lens, block_tables, *image_spans = tensors
    return BatchTensors(
        token_ids=token_ids,
        positions=positions,
        sampling_rows=sampling_rows,
        attention=AttentionMetadata(
            cu_seqlens_q=cu_seqlens,
            seq_lens=seq_lens,
            block_tables=block_tables,
            slot_mapping=slot_mapping,
            image_spans=image_spans[0] if image_spans else None,
        ),
    )


class Packing:
    """Several arrays laid one after another in one buffer, so that one copy takes them all to a device.

    torch's allocator of pinned memory does not hand out a buffer again before the copies from it are over.
    """

    def __init__(self, parts: AbstractSequence[tuple[torch.dtype, tuple[int, ...]]]) -> None:
        """parts: dtype and shape of each array"""
        self._parts = list(parts)
        self._offsets = []
        self.size_bytes = 0
        for dtype, shape in self._parts:
            self._offsets.append(self.size_bytes)
            size = dtype.itemsize * math.prod(shape)
            self.size_bytes += -(-size // ALIGNMENT) * ALIGNMENT

    @classmethod
    def of(cls, arrays: AbstractSequence[NDArray[np.generic]]) -> Packing:
        return cls([(torch.from_numpy(array).dtype, array.shape) for array in arrays])

    def pack(self, arrays: AbstractSequence[NDArray[np.generic]], *, pin_memory: bool) -> torch.Tensor:
        """[size_bytes] uint8 on the host; each array has the shape of its part."""
        buffer = torch.empty(self.size_bytes, dtype=torch.uint8, pin_memory=pin_memory)
        for view, array in zip(self.views(buffer), arrays, strict=True):
            view.numpy()[...] = array
        return buffer

    def views(self, buffer: torch.Tensor) -> list[torch.Tensor]:
        """The parts of a buffer [size_bytes] uint8, on whatever device it is."""
        return [
            buffer[offset : offset + dtype.itemsize * math.prod(shape)].view(dtype).view(shape)
            for offset, (dtype, shape) in zip(self._offsets, self._parts, strict=True)
        ]
