"""Embedding rows in a quarter of fp32's bytes: whole numbers from -127 to 127, and a scale for each row.

Stored as int8 [num_rows, width + 4]; the last four bytes of a row are its scale, a little-endian fp32. A value moves by
at most half a step: 1/254 of the largest one in its row.
"""

from __future__ import annotations

from typing import Final

import torch

SCALE_BYTES: Final = 4
LARGEST: Final = 127


def quantize_rows(rows: torch.Tensor) -> torch.Tensor:
    """rows [num_rows, width] of any floating dtype, finite -> int8 [num_rows, width + 4] on the CPU"""
    exact = rows.detach().float().cpu()
    scales = exact.abs().amax(dim=1, keepdim=True) / LARGEST
    # A row of zeros, or of numbers that fp32 itself can barely hold, becomes zeros: any scale will do.
    divisors = torch.where(scales > torch.finfo(torch.float32).tiny, scales, 1.0)
    numbers = (exact / divisors).round().clamp(-LARGEST, LARGEST).to(torch.int8)
    return torch.cat((numbers, divisors.contiguous().view(torch.int8)), dim=1)


def dequantize_rows(stored: torch.Tensor) -> torch.Tensor:
    """int8 [num_rows, width + 4] on the CPU -> fp32 [num_rows, width]"""
    scales = stored[:, -SCALE_BYTES:].clone(memory_format=torch.contiguous_format).view(torch.float32)
    return stored[:, :-SCALE_BYTES].float() * scales
