"""Linear layers in int8 on a CPU: weights rounded per output channel, inputs per row as they come, sums exact in int32.

A row's result depends on nothing but that row, so a batch does not change it. What it saves and what it costs is
measured by `python -m bench.int8_tower`.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

LARGEST = 127.0  # -128 stays unused: both signs reach equally far
SMALLEST_SCALE = 1e-30  # of a row of zeros, which must not become 0 / 0


class Int8Linear(nn.Module):
    """nn.Linear with int8 products: [..., in_features] -> [..., out_features], dtype as it came in."""

    def __init__(self, linear: nn.Linear, *, has_vnni: bool) -> None:
        """has_vnni   the CPU adds four int8 products to an int32 in one instruction

        Without it oneDNN adds pairs in int16, which may saturate; the same integers are then multiplied as fp32.
        """
        super().__init__()
        weight = linear.weight.detach().float()
        scales = _scales(weight)
        # Plain attributes: the scales stay fp32, whatever dtype the model is moved to.
        self._weight = _compact(_rounded(weight, scales).T)  # [in_features, out_features] int8
        self._scales = scales.squeeze(1)  # [out_features] fp32
        self._bias = torch.zeros(len(weight)) if linear.bias is None else linear.bias.detach().float()
        self._has_vnni = has_vnni

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1]).float()
        scales = _scales(rows)
        sums = self._product(_rounded(rows, scales)).mul_(scales)
        out = torch.addcmul(self._bias, sums, self._scales).to(x.dtype)
        return torch.unflatten(out, 0, x.shape[:-1])

    def _product(self, rows: Tensor) -> Tensor:
        """whole numbers of int8's range [num_rows, in_features] -> whole numbers [num_rows, out_features], both fp32"""
        if self._has_vnni:
            return torch._int_mm(_compact(rows), self._weight).float()
        return rows @ self._weight.float()


def quantize_linears(module: nn.Module) -> None:
    """Replace every nn.Linear under `module`, whose weights are on the CPU."""
    has_vnni = torch.cpu._is_vnni_supported()
    for name, child in module.named_children():
        if isinstance(child, nn.Linear):
            setattr(module, name, Int8Linear(child, has_vnni=has_vnni))
        else:
            quantize_linears(child)


def _scales(matrix: Tensor) -> Tensor:
    """[rows, columns] -> [rows, 1]: what one step of int8 is worth in each row"""
    return matrix.abs().amax(dim=1, keepdim=True).div_(LARGEST).clamp_(min=SMALLEST_SCALE)


def _rounded(matrix: Tensor, scales: Tensor) -> Tensor:
    return (matrix / scales).round_()


def _compact(matrix: Tensor) -> Tensor:
    """As int8 in memory of its own: a lone row or column may count as contiguous whatever its strides are, and
    torch._int_mm reads wrong memory where both are 1."""
    return torch.empty(matrix.shape, dtype=torch.int8).copy_(matrix)
