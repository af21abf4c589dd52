"""Between the sampler and a GPU: what decides each row's token, sent in one copy; the tokens, brought back in one."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as AbstractSequence

import numpy as np
import torch
from numpy.typing import NDArray

from services.text_engine.core.sequence import Sequence
from services.text_engine.kernels.sampling_tensors import SamplingTensors
from services.text_engine.runner.batch_tensors import Packing

MAX_VOCAB_SIZE = 2**18  # beyond, `kernels.sample` could not keep its sums exact

# logits [num_rows, at least vocab_size] fp32, vocab_size -> token_ids [num_rows] int64, is_finite [num_rows] bool
DrawTokens = Callable[[torch.Tensor, int, SamplingTensors], tuple[torch.Tensor, torch.Tensor]]


def sampling_tensors(
    sequences: AbstractSequence[Sequence], seeds: AbstractSequence[int], device: torch.device
) -> SamplingTensors:
    """Nothing waits for the copy. seeds: any integers, of which the low 64 bits count"""
    params = [sequence.sampling for sequence in sequences]
    columns: list[NDArray[np.generic]] = [
        np.array([0.0 if p.is_greedy else p.temperature for p in params], dtype=np.float32),
        np.array([min(p.top_k, MAX_VOCAB_SIZE) for p in params], dtype=np.int32),
        np.array([p.top_p for p in params], dtype=np.float32),
        np.array([p.min_p for p in params], dtype=np.float32),
        np.array([seed % 2**64 for seed in seeds], dtype=np.uint64).view(np.int64),
        np.array([sequence.index for sequence in sequences], dtype=np.int64),
        np.array([sequence.num_generated_tokens for sequence in sequences], dtype=np.int64),
    ]
    packing = Packing.of(columns)
    packed = packing.pack(columns, pin_memory=device.type == "cuda").to(device, non_blocking=True)
    return SamplingTensors(*packing.views(packed))


def to_host(token_ids: torch.Tensor) -> list[int]:
    """The one thing of a step that the host waits for."""
    if token_ids.device.type == "cpu":
        return [int(token_id) for token_id in token_ids.tolist()]
    host = torch.empty(token_ids.shape, dtype=token_ids.dtype, pin_memory=True)
    host.copy_(token_ids, non_blocking=True)
    arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
    arrived.record()
    arrived.synchronize()
    return [int(token_id) for token_id in host.tolist()]
