"""Weight matrices, kept in whatever form the device multiplies fastest: `Linear` here, or one handed to the decoder."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from typing import Protocol

import torch
from torch.nn import functional

from services.text_engine.kernels.grouped_weight import GroupedWeight
from shared.device import has_bfloat16

# x [num_rows, in_features] -> [num_rows, out_features]
Product = Callable[[torch.Tensor], torch.Tensor]
# weight [out_features, in_features], bias [out_features] or None -> their product with any x
MakeProduct = Callable[[torch.Tensor, torch.Tensor | None], Product]
MakeQuantizedProduct = Callable[[GroupedWeight, torch.Tensor | None], Product]
Matrix = torch.Tensor | GroupedWeight
# matrices whose outputs stand side by side, bias of all of them or None -> their product with any x
MakeProductOfAll = Callable[[list[Matrix], torch.Tensor | None], Product]
# our name of a tensor, fused ones included -> the tensor; of a matrix that is only multiplied with -> as it is stored
ReadWeight = Callable[[str], torch.Tensor]
ReadMatrix = Callable[[str], list[Matrix]]
# a matrix's name, its product -> the product to use in its place
Adapt = Callable[[str, Product], Product]

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


class SideBySide:
    """Products of the same x, their outputs side by side: a fused matrix whose parts are not stored alike."""

    def __init__(self, products: list[Product]) -> None:
        self._products = products

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([product(x) for product in self._products], dim=1)


def product_maker(make_plain: MakeProduct, make_quantized: MakeQuantizedProduct) -> MakeProductOfAll:
    """Plain matrices are kept by the one, quantized ones by the other."""

    def make(matrix: Matrix, bias: torch.Tensor | None) -> Product:
        return make_quantized(matrix, bias) if isinstance(matrix, GroupedWeight) else make_plain(matrix, bias)

    def make_all(matrices: list[Matrix], bias: torch.Tensor | None) -> Product:
        if len(matrices) == 1:
            return make(matrices[0], bias)
        sizes = [m.out_features if isinstance(m, GroupedWeight) else m.shape[0] for m in matrices]
        ends = list(accumulate(sizes))
        biases = [None if bias is None else bias[end - size : end] for size, end in zip(sizes, ends, strict=True)]
        return SideBySide([make(matrix, part) for matrix, part in zip(matrices, biases, strict=True)])

    return make_all


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
