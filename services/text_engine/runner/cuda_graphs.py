"""Decode steps as CUDA graphs: the hundreds of launches of a forward pass become one.

A graph is captured for each of a few numbers of tokens and reads its inputs from fixed memory. A step is padded to the
next size: padding rows belong to no sequence, store nothing and see nothing. A graph has room for as many sequences as
tokens, so rows with drafts, of fewer sequences, fit it as well. What is captured ends with the decoder's last norm;
which rows need logits differs from step to step.

All of it runs on any device, and is tested with a `Capture` that simply runs the function again.
"""

from __future__ import annotations

import bisect
import time
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
import torch

from services.text_engine.attention.interface import AttentionMetadata
from services.text_engine.models.config import ModelConfig
from services.text_engine.runner.batch_tensors import BatchArrays, BatchTensors, Packing
from shared.cuda_capture import Capture, Replay
from shared.log import get_logger

log = get_logger(__name__)

SIZE_STEP: Final = 8
GRAPH_BYTES: Final = 16 << 20  # what a graph of some hundred launches takes beside its tensors, seen in other engines

Forward = Callable[[BatchTensors], torch.Tensor]


def graph_sizes(max_num_tokens: int) -> list[int]:
    """1, 2, 4, then every eighth, and max_num_tokens itself."""
    sizes = {1, 2, 4, *range(SIZE_STEP, max_num_tokens + 1, SIZE_STEP), max_num_tokens}
    return sorted(size for size in sizes if size <= max_num_tokens)


def graph_memory_bytes(config: ModelConfig, max_num_tokens: int, dtype: torch.dtype) -> int:
    """An estimate of what the graphs will hold, for planning: their tensors share one pool, as large as the largest."""
    per_token = 4 * config.hidden_size + 2 * config.num_heads * config.head_dim + 3 * config.intermediate_size
    return GRAPH_BYTES * len(graph_sizes(max_num_tokens)) + max_num_tokens * per_token * dtype.itemsize


class Graphs:
    """A forward pass, captured for several numbers of tokens: one for each sequence, and its drafts.

    forward             from a batch, padded, to hidden rows [num_tokens, hidden_size]
    max_blocks          of any sequence
    has_grid_positions  whether positions have three coordinates
    """

    def __init__(
        self,
        forward: Forward,
        sizes: Sequence[int],
        *,
        max_blocks: int,
        device: torch.device,
        capture: Capture,
        has_grid_positions: bool = False,
    ) -> None:
        started = time.monotonic()
        free_before = _free_bytes(device)
        self._sizes = sorted(sizes)
        self._max_blocks = max_blocks
        self._device = device
        self._has_grid_positions = has_grid_positions
        # The largest first: the smaller ones find room in what it has left of the pool.
        self._captured = {size: self._record(forward, size, capture) for size in reversed(self._sizes)}
        log.info(
            "CUDA graphs captured" if device.type == "cuda" else "decode steps recorded",
            sizes=len(self._sizes),
            largest=self._sizes[-1],
            seconds=round(time.monotonic() - started, 1),
            mib=(free_before - _free_bytes(device)) >> 20,
        )

    def fit(self, arrays: BatchArrays) -> bool:
        """Adapters' rows differ from step to step: what was captured is the model itself."""
        return (
            arrays.is_decode
            and arrays.adapter_of_token is None
            and arrays.num_tokens <= self._sizes[-1]
            and arrays.block_tables.shape[1] <= self._max_blocks
        )

    def run(self, arrays: BatchArrays) -> tuple[torch.Tensor, torch.Tensor]:
        """For a batch that fits: hidden rows [num_tokens, hidden_size], good until the next run, and its sampling_rows
        on the device."""
        size = self._sizes[bisect.bisect_left(self._sizes, arrays.num_tokens)]
        inputs, replay = self._captured[size]
        inputs.fill(arrays)
        hidden = replay()[: arrays.num_tokens]
        return hidden, inputs.tensors.sampling_rows[: len(arrays.sampling_rows)]

    def _record(self, forward: Forward, size: int, capture: Capture) -> tuple[_Inputs, Replay]:
        inputs = _Inputs(size, self._max_blocks, self._device, has_grid_positions=self._has_grid_positions)
        return inputs, capture.record(lambda: forward(inputs.tensors))


class _Inputs:
    """The fixed memory that one graph reads.

    tensors   views of it; cu_seqlens_q stays at the last real row for padding rows, which are in no sequence then
    """

    def __init__(self, size: int, max_blocks: int, device: torch.device, *, has_grid_positions: bool) -> None:
        self._size = size
        self._device = device
        self._rows: list[tuple[torch.dtype, tuple[int, ...]]] = [
            (torch.int64, (size,)),
            (torch.int64, (3, size) if has_grid_positions else (size,)),
            (torch.int64, (size,)),
            (torch.int64, (size,)),
            (torch.int32, (size + 1,)),
            (torch.int32, (size,)),
        ]
        packing = Packing(self._rows)
        self._buffer = torch.zeros(packing.size_bytes, dtype=torch.uint8, device=device)
        token_ids, positions, sampling_rows, slot_mapping, cu_seqlens, seq_lens = packing.views(self._buffer)
        slot_mapping.fill_(-1)
        self._block_tables = torch.zeros((size, max_blocks), dtype=torch.int32, device=device)
        self.tensors = BatchTensors(
            token_ids=token_ids,
            positions=positions,
            sampling_rows=sampling_rows,
            attention=AttentionMetadata(
                cu_seqlens_q=cu_seqlens,
                seq_lens=seq_lens,
                block_tables=self._block_tables,
                slot_mapping=slot_mapping,
            ),
        )

    def fill(self, arrays: BatchArrays) -> None:
        """One copy to the device, of what is used only, and two on it; nothing waits."""
        num_seqs, num_blocks = arrays.block_tables.shape
        padding, seq_padding = self._size - arrays.num_tokens, self._size - num_seqs
        packing = Packing([*self._rows, (torch.int32, (num_seqs, num_blocks))])
        packed = packing.pack(
            [
                np.pad(arrays.token_ids, (0, padding)),
                np.pad(arrays.positions, [(0, 0)] * (arrays.positions.ndim - 1) + [(0, padding)]),
                np.pad(arrays.sampling_rows, (0, self._size - len(arrays.sampling_rows))),
                np.pad(arrays.slot_mapping, (0, padding), constant_values=-1),
                np.pad(arrays.cu_seqlens_q, (0, seq_padding), mode="edge"),
                np.pad(arrays.seq_lens, (0, seq_padding)),
                arrays.block_tables,
            ],
            pin_memory=self._device.type == "cuda",
        ).to(self._device, non_blocking=True)
        self._buffer.copy_(packed[: len(self._buffer)])
        self._block_tables[:num_seqs, :num_blocks].copy_(packing.views(packed)[-1])


def _free_bytes(device: torch.device) -> int:
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 0
