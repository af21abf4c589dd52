"""Weight matrices, kept in whatever form the device multiplies fastest: `Linear` here, or one handed to the decoder."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

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


class Ranks(Protocol):
    """The processes that hold one model together, as one of them sees them; each method is called by all at once."""

    @property
    def index(self) -> int: ...

    @property
    def size(self) -> int: ...

    def share(self, x: torch.Tensor) -> torch.Tensor:
        """Rank 0's x, on every rank; may overwrite the others' x, which has the same shape."""
        ...

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """All ranks' x added up, on every rank; may overwrite x."""
        ...

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """x [num_rows, num_columns] of all ranks side by side, on rank 0: [num_rows, size * num_columns]; else x."""
        ...


class SummedProduct:
    """A product whose inputs are split over the ranks: each computes its share, and all get the sum."""

    def __init__(self, product: Product, ranks: Ranks) -> None:
        self._product = product
        self._ranks = ranks

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._ranks.sum(self._product(x))


class GatheredProduct:
    """A product whose outputs are split over the ranks, in equal parts but for the last; rank 0 gets all of them."""

    def __init__(self, product: Product, ranks: Ranks, *, num_outputs: int, num_outputs_of_a_rank: int) -> None:
        self._product = product
        self._ranks = ranks
        self._num_outputs = num_outputs
        self._num_outputs_of_a_rank = num_outputs_of_a_rank

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        y = self._product(x)
        padding = self._num_outputs_of_a_rank - y.shape[1]
        if padding:
            y = functional.pad(y, (0, padding))
        return self._ranks.gather(y)[:, : self._num_outputs]
