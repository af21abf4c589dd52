"""Embedding rows in a quarter of fp32's bytes: whole numbers from -127 to 127, and a scale for each row.

Stored as int8 [num_rows, width + 4]; the last four bytes of a row are its scale, a little-endian fp32. A value moves by
at most half a step: 1/254 of the largest one in its row. A row that is made of several parts, which meet the text model
at different depths and may differ in size by as much, is stored as so many rows one behind the other.
"""

from __future__ import annotations

from typing import Final

import torch

SCALE_BYTES: Final = 4
LARGEST: Final = 127


def stored_width(part_size: int, num_parts: int = 1) -> int:
    """Bytes of a stored row of so many parts, each of `part_size` values."""
    return num_parts * (part_size + SCALE_BYTES)


def quantize_rows(rows: torch.Tensor, num_parts: int = 1) -> torch.Tensor:
    """rows [num_rows, num_parts * part_size] of any floating dtype, finite -> int8 [num_rows, num_parts * (part_size +
    4)] on the CPU
    """
    exact = torch.unflatten(rows.detach().float().cpu(), 1, (num_parts, -1)).flatten(0, 1)
    scales = exact.abs().amax(dim=1, keepdim=True) / LARGEST
    # A row of zeros, or of numbers that fp32 itself can barely hold, becomes zeros: any scale will do.
    divisors = torch.where(scales > torch.finfo(torch.float32).tiny, scales, 1.0)
    numbers = (exact / divisors).round().clamp(-LARGEST, LARGEST).to(torch.int8)
    stored = torch.cat((numbers, divisors.contiguous().view(torch.int8)), dim=1)
    return torch.unflatten(stored, 0, (-1, num_parts)).flatten(1)


def dequantize_rows(stored: torch.Tensor, num_parts: int = 1) -> torch.Tensor:
    """int8 [num_rows, num_parts * (part_size + 4)] on the CPU -> fp32 [num_rows, num_parts * part_size]"""
    parts = torch.unflatten(stored, 1, (num_parts, -1)).flatten(0, 1)
    scales = parts[:, -SCALE_BYTES:].clone(memory_format=torch.contiguous_format).view(torch.float32)
    values = parts[:, :-SCALE_BYTES].float() * scales
    return torch.unflatten(values, 0, (-1, num_parts)).flatten(1)
