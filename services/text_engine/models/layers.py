"""Weight matrices, kept in whatever form the device multiplies fastest: `Linear` here, or one handed to the decoder."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional

from shared.device import has_bfloat16

# x [num_rows, in_features] -> [num_rows, out_features]
Product = Callable[[torch.Tensor], torch.Tensor]
# weight [out_features, in_features], bias [out_features] or None -> their product with any x
MakeProduct = Callable[[torch.Tensor, torch.Tensor | None], Product]

# oneDNN picks its block layout for about this many rows; from 1 to 256 rows the choice made no measurable difference.
PACKED_FOR_NUM_ROWS = 32


class Linear:
    """y = x @ weight.T + bias, without gradients.

    On CPUs with bf16 arithmetic a bf16 weight is repacked once into oneDNN's blocked layout and the plain one dropped.
    On Zen 5, one thread, SmolLM2-135M's shapes: 1.6 to 2.9 times faster for one row, 1.1 to 1.3 for 32, no slower for
    256. Other weights stay as they are.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        """weight [out_features, in_features], bias [out_features]"""
        self.out_features, self.in_features = weight.shape
        self._bias = bias
        self._is_packed = weight.dtype == torch.bfloat16 and weight.device.type == "cpu" and has_bfloat16(weight.device)
        self._weight: torch.Tensor = (
            torch.ops.mkldnn._reorder_linear_weight(weight, PACKED_FOR_NUM_ROWS) if self._is_packed else weight
        )

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [num_rows, in_features] -> [num_rows, out_features]"""
        if self._is_packed:
            y: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")
            return y
        return functional.linear(x, self._weight, self._bias)
