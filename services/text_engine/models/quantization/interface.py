"""What a format is: which tensors hold a matrix, and what they stand for."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass

import torch

from services.text_engine.kernels.grouped_weight import GroupedWeight

# The tensors of one matrix by the ends of their names, and its shape [out_features, in_features] -> the matrix
Unpack = Callable[[Mapping[str, torch.Tensor], tuple[int, int]], GroupedWeight]


@dataclass(frozen=True, slots=True)
class QuantizedFormat:
    """One way of storing matrices.

    name      for messages
    marker    a tensor "layers.0.mlp.up_proj.<marker>" says that the matrix is stored so; without it, it is a plain one
    tensors   the ends of the names of all tensors that a matrix may have
    unpack    raises KeyError for a tensor that is missing and ValueError for one that does not fit
    """

    name: str
    marker: str
    tensors: tuple[str, ...]
    unpack: Unpack

    def tensors_of(self, matrix: str, names: Container[str]) -> dict[str, str]:
        """Of those that hold "layers.0.mlp.up_proj": the end of the name -> the name; none if it is stored plain."""
        if f"{matrix}.{self.marker}" not in names:
            return {}
        return {end: f"{matrix}.{end}" for end in self.tensors if f"{matrix}.{end}" in names}


def unpack_words(words: torch.Tensor, bits: int, order: tuple[int, ...] | None = None) -> torch.Tensor:
    """words [rows, num_words] int32, 32 // bits numbers in each -> [rows, columns] uint8

    order  which column of a word's the number at each place is, from the lowest bits up; None: as they are
    """
    per_word = 32 // bits
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    numbers = ((words[:, :, None] >> shifts) & ((1 << bits) - 1)).to(torch.uint8)
    if order is not None:
        numbers = numbers[:, :, [order.index(column) for column in range(per_word)]]
    return numbers.flatten(1)


def affine(
    quants: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor,
    bits: int,
    group_size: int,
    input_order: torch.Tensor | None = None,
) -> GroupedWeight:
    """w = (quants - zeros) * scales. quants [out_features, in_features], scales and zeros [out_features, num_groups]"""
    scales = scales.float()
    is_symmetric = bool((zeros == 1 << (bits - 1)).all())
    minimums = None if is_symmetric else scales * -zeros.float()
    return GroupedWeight(quants, scales, minimums, bits, group_size, input_order)
