"""The adapters that are loaded, and what they add: y[rows] += (x[rows] @ A.T) @ B.T, for each adapter's own rows.

The products of the model itself stay as they are, quantized or not, and are computed for all rows at once; a step in
which no adapter takes part pays nothing but a look at an empty list. Products that are fused stay so: of an adapter the
A's of their parts are stacked, and the B's stand on the diagonal of one matrix.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from services.text_engine.models.config import ModelConfig
from services.text_engine.models.layers import MakeProduct, Product
from services.text_engine.models.lora.adapter_files import ADAPTABLE, AdapterFiles, LowRank
from services.text_engine.models.sharding import Shard
from services.text_engine.models.weights import parameter_shapes, unfused

RANK_MULTIPLE: Final = 8  # keeps the rows between the two products aligned for every kernel

Rows = slice | torch.Tensor


class LowRankProduct:
    """What one adapter adds to one product.

    down   of [rank, in_features]
    up     of [out_features, rank]
    """

    def __init__(self, down: Product, up: Product) -> None:
        self._down = down
        self._up = up

    def add_to(self, y: torch.Tensor, x: torch.Tensor, rows: Rows) -> None:
        """x [num_tokens, in_features]; y [num_tokens, out_features], of which `rows` are changed"""
        if isinstance(rows, slice):
            y[rows] += self._up(self._down(x[rows]))
        else:
            y.index_add_(0, rows, self._up(self._down(x.index_select(0, rows))))


class LoadedAdapters:
    """The adapters of one rank's part of a model, by number; 0 is the model itself.

    config        the whole model's
    make_product  keeps a plain matrix for its products, in `dtype` on `device`
    groups        of the step that is being computed: for each adapter its rows and what it adds to each product
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        make_product: MakeProduct,
        dtype: torch.dtype,
        device: torch.device,
        shard: Shard | None = None,
    ) -> None:
        self.groups: list[tuple[Rows, Mapping[str, LowRankProduct]]] = []
        self._config = config
        self._shard = shard
        self._shapes = parameter_shapes(config if shard is None else shard.config(config))
        self._make_product = make_product
        self._dtype = dtype
        self._device = device
        self._product_names: list[str] = []
        self._products: dict[int, dict[str, LowRankProduct]] = {}

    def adapt(self, name: str, product: Product) -> Product:
        """The product of the matrix `name`, fused or not, with what adapters add to it."""
        self._product_names.append(name)
        return AdaptedProduct(product, name, self)

    def put(self, number: int, files: AdapterFiles) -> None:
        """Hold an adapter under a number that is not in use."""
        assert number > 0
        assert number not in self._products
        made = ((name, self._low_rank_product(name, files.matrices)) for name in self._product_names)
        self._products[number] = {name: product for name, product in made if product is not None}

    def remove(self, number: int) -> None:
        del self._products[number]

    def bytes_of(self, rank: int) -> int:
        """About the memory of an adapter of this rank that adapts every matrix."""
        shapes = (shape for name, shape in self._shapes.items() if ADAPTABLE.fullmatch(name))
        return sum(rank * sum(shape) for shape in shapes) * self._dtype.itemsize

    @contextmanager
    def applied(self, adapter_of_token: NDArray[np.int32] | None) -> Iterator[None]:
        """While the body runs, rows get what their adapter adds. adapter_of_token [num_tokens]; None: they have none"""
        if adapter_of_token is None:
            yield
            return
        numbers = np.unique(adapter_of_token[adapter_of_token > 0]).tolist()
        self.groups = [(self._rows(adapter_of_token == number), self._products[number]) for number in numbers]
        try:
            yield
        finally:
            self.groups = []

    def _rows(self, is_its: NDArray[np.bool_]) -> Rows:
        """is_its [num_tokens], of which at least one is true"""
        rows = np.flatnonzero(is_its)
        first, last = int(rows[0]), int(rows[-1])
        if last - first + 1 == len(rows):
            return slice(first, last + 1)
        return torch.from_numpy(rows).to(self._device)

    def _low_rank_product(self, name: str, matrices: Mapping[str, LowRank]) -> LowRankProduct | None:
        parts = [part.removesuffix(".weight") for part in unfused(f"{name}.weight")]
        mine = {part: self._of_this_rank(part, matrices[part]) for part in parts if part in matrices}
        if not mine:
            return None
        rank = sum(down.shape[0] for down, _ in mine.values())
        shapes = [self._shapes[f"{part}.weight"] for part in parts]
        down = torch.zeros(-(-rank // RANK_MULTIPLE) * RANK_MULTIPLE, shapes[0][1])
        up = torch.zeros(sum(rows for rows, _ in shapes), len(down))
        output = inner = 0
        for part, (num_rows, _) in zip(parts, shapes, strict=True):
            if part in mine:
                its_down, its_up = mine[part]
                down[inner : inner + len(its_down)] = its_down
                up[output : output + num_rows, inner : inner + len(its_down)] = its_up
                inner += len(its_down)
            output += num_rows
        return LowRankProduct(self._kept(down), self._kept(up))

    def _of_this_rank(self, part: str, low_rank: LowRank) -> LowRank:
        """Outputs are split with B, inputs with A: the ranks' sums are then those of the whole."""
        piece = None if self._shard is None else self._shard.part(f"{part}.weight", self._config)
        if piece is None:
            return low_rank
        if len(piece) == 1:
            return LowRank(low_rank.down, low_rank.up[piece[0]])
        return LowRank(low_rank.down[:, piece[1]], low_rank.up)

    def _kept(self, matrix: torch.Tensor) -> Product:
        return self._make_product(matrix.to(self._device, self._dtype), None)


class AdaptedProduct:
    """The model's own product, and to each adapter's rows what it adds."""

    def __init__(self, product: Product, name: str, adapters: LoadedAdapters) -> None:
        self._product = product
        self._name = name
        self._adapters = adapters

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [num_rows, in_features] -> [num_rows, out_features]"""
        y = self._product(x)
        for rows, products in self._adapters.groups:
            added = products.get(self._name)
            if added is not None:
                added.add_to(y, x, rows)
        return y
