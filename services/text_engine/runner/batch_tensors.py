"""A scheduled batch as tensors: one flat row per token, and where each sequence's keys and values go."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from services.text_engine.attention.interface import AttentionMetadata
from services.text_engine.core.batch import Batch


@dataclass(frozen=True, slots=True)
class BatchTensors:
    """All on the model's device.

    token_ids      [num_tokens] int64
    positions      [num_tokens] int64
    sampling_rows  [num_sampling] int64; the last row of each sequence that reaches its end, in batch order
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    sampling_rows: torch.Tensor
    attention: AttentionMetadata


def build_batch_tensors(batch: Batch, block_size: int, device: torch.device) -> BatchTensors:
    items = batch.scheduled
    num_new = np.array([item.num_new_tokens for item in items], dtype=np.int32)
    ends = np.array([item.end for item in items], dtype=np.int32)
    cu_seqlens = np.zeros(len(items) + 1, dtype=np.int32)
    np.cumsum(num_new, out=cu_seqlens[1:])
    total = int(cu_seqlens[-1])

    token_ids = np.empty(total, dtype=np.int64)
    block_tables = np.zeros((len(items), max(-(-item.end // block_size) for item in items)), dtype=np.int32)
    for i, item in enumerate(items):
        sequence = item.sequence
        if item.num_new_tokens == 1:
            token_ids[cu_seqlens[i]] = sequence.token_ids[item.start]
        else:
            token_ids[cu_seqlens[i] : cu_seqlens[i + 1]] = sequence.token_ids[item.start : item.end]
        num_blocks = -(-item.end // block_size)
        block_tables[i, :num_blocks] = sequence.block_table[:num_blocks]

    row_of_token = np.repeat(np.arange(len(items)), num_new)
    positions = np.arange(total, dtype=np.int64) + np.repeat(ends - cu_seqlens[1:], num_new)
    blocks = block_tables[row_of_token, positions // block_size].astype(np.int64)
    sampling_rows = np.array([cu_seqlens[i + 1] - 1 for i, item in enumerate(items) if item.samples], dtype=np.int64)

    def to_device(array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(device, non_blocking=True)

    return BatchTensors(
        token_ids=to_device(token_ids),
        positions=to_device(positions),
        sampling_rows=to_device(sampling_rows),
        attention=AttentionMetadata(
            cu_seqlens_q=to_device(cu_seqlens),
            seq_lens=to_device(ends),
            block_tables=to_device(block_tables),
            slot_mapping=to_device(blocks * block_size + positions % block_size),
        ),
    )
