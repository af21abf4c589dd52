"""What decides each row's token, as tensors: the argument of `sample` and of its twin in `reference`."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class SamplingTensors:
    """All [num_rows], contiguous, on the logits' device.

    temperatures  fp32; 0: the likeliest token
    top_ks        int32; 0 or less: all; 1: the likeliest token
    top_ps        fp32; 1: all; 0: the likeliest token
    min_ps        fp32; 0: all
    seeds         int64, the low 64 bits of any integer
    indices       int64, which of a request's choices
    positions     int64, the number of tokens generated before
    """

    temperatures: torch.Tensor
    top_ks: torch.Tensor
    top_ps: torch.Tensor
    min_ps: torch.Tensor
    seeds: torch.Tensor
    indices: torch.Tensor
    positions: torch.Tensor
