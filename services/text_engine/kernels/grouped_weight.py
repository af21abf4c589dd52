"""`GroupedWeight`: a quantized matrix in the one form that every format is read into and every product packs from.

It exists at load only, one matrix at a time, a byte for each weight.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch.nn import functional

# The products round their inputs to int8 in blocks of the second; the first where groups are that small.
BLOCK_SIZES = (16, 32)


@dataclass(frozen=True, slots=True)
class GroupedWeight:
    """w[n, k] = scales[n, g] * quants[n, k] + minimums[n, g], where g = k // group_size

    quants       [out_features, in_features] uint8, below 2 ** bits
    scales       [out_features, num_groups] fp32
    minimums     alike; None: the quants' zero is 2 ** (bits - 1)
    bits         4 or 8
    group_size   a multiple of 16; the last group may have fewer inputs
    input_order  [in_features] int64: which input of the layer is input k here (GPTQ's act-order); None: k itself
    """

    quants: torch.Tensor
    scales: torch.Tensor
    minimums: torch.Tensor | None
    bits: int
    group_size: int
    input_order: torch.Tensor | None = None

    def __post_init__(self) -> None:
        if self.group_size % BLOCK_SIZES[0]:
            raise ValueError(f"groups of {self.group_size} weights; multiples of {BLOCK_SIZES[0]} are supported")
        wanted = (self.out_features, -(-self.in_features // self.group_size))
        if self.scales.shape != wanted or (self.minimums is not None and self.minimums.shape != wanted):
            raise ValueError(
                f"scales of shape {tuple(self.scales.shape)} for weights of shape {tuple(self.quants.shape)} in groups "
                f"of {self.group_size}; {wanted} is needed"
            )

    @property
    def out_features(self) -> int:
        return self.quants.shape[0]

    @property
    def in_features(self) -> int:
        return self.quants.shape[1]

    @property
    def zero(self) -> int:
        """Of the quants, where there are no minimums."""
        return 1 << (self.bits - 1)

    def all_minimums(self) -> torch.Tensor:
        return self.scales * -self.zero if self.minimums is None else self.minimums

    def dequantize(self) -> torch.Tensor:
        """[out_features, in_features] fp32, in the layer's order of inputs"""
        values = dequantize_rows(self.quants, self.scales, self.all_minimums(), self.group_size)
        if self.input_order is None:
            return values
        return torch.empty_like(values).index_copy_(1, self.input_order, values)

    def to(self, device: torch.device) -> GroupedWeight:
        minimums = None if self.minimums is None else self.minimums.to(device)
        order = None if self.input_order is None else self.input_order.to(device)
        return replace(
            self,
            quants=self.quants.to(device),
            scales=self.scales.to(device),
            minimums=minimums,
            input_order=order,
        )

    def rows(self, rows: slice | torch.Tensor) -> GroupedWeight:
        """Some of the outputs, or all in another order."""
        minimums = None if self.minimums is None else self.minimums[rows]
        return replace(self, quants=self.quants[rows], scales=self.scales[rows], minimums=minimums)

    def columns(self, columns: slice) -> GroupedWeight:
        """Some of the inputs. Raises ValueError where that cuts a group."""
        first, stop, _ = columns.indices(self.in_features)
        whole = stop == self.in_features or stop % self.group_size == 0
        if self.input_order is not None or first % self.group_size or not whole:
            order = "" if self.input_order is None else ", in an order of their own (act-order)"
            raise ValueError(
                f"inputs {first} to {stop} of a matrix quantized in groups of {self.group_size}{order}: the ranks of "
                "tensor_parallel_size cannot share it; use fewer of them, or a checkpoint with smaller groups"
            )
        groups = slice(first // self.group_size, -(-stop // self.group_size))
        minimums = None if self.minimums is None else self.minimums[:, groups]
        return replace(self, quants=self.quants[:, columns], scales=self.scales[:, groups], minimums=minimums)

    def fits(self, other: GroupedWeight) -> bool:
        """Whether the outputs of both can be one matrix's."""
        mine, its = self.input_order, other.input_order
        same_order = mine is its if mine is None or its is None else torch.equal(mine, its)
        same_kind = (self.bits, self.group_size, self.minimums is None) == (
            other.bits,
            other.group_size,
            other.minimums is None,
        )
        return same_kind and same_order and self.in_features == other.in_features


def stack(parts: list[GroupedWeight]) -> GroupedWeight:
    """One below the other; all must fit the first."""
    if len(parts) == 1:
        return parts[0]
    minimums = [part.minimums for part in parts if part.minimums is not None]
    return replace(
        parts[0],
        quants=torch.cat([part.quants for part in parts]),
        scales=torch.cat([part.scales for part in parts]),
        minimums=torch.cat(minimums) if minimums else None,
    )


def dequantize_rows(
    quants: torch.Tensor, scales: torch.Tensor, minimums: torch.Tensor, group_size: int
) -> torch.Tensor:
    """[num_rows, in_features] fp32; `GroupedWeight` says what the arguments are"""
    num_rows, in_features = quants.shape
    padded = functional.pad(quants, (0, -in_features % group_size)).view(num_rows, -1, group_size)
    values = padded.float().mul_(scales[:, :, None]).add_(minimums[:, :, None])
    return values.view(num_rows, -1)[:, :in_features]


def quantize(
    weight: torch.Tensor, *, bits: int, group_size: int | None, symmetric: bool, whole_zeros: bool = False
) -> GroupedWeight:
    """Round a plain matrix, each group of each output between its own limits.

    weight        [out_features, in_features], floating point
    group_size    None: the whole input
    symmetric     between minus and plus the largest magnitude; else between the smallest and the largest weight
    whole_zeros   where not symmetric: a weight of zero is one of the steps
    """
    out_features, in_features = weight.shape
    size = group_size or whole_input(in_features)
    num_groups = -(-in_features // size)
    # Where a group is not full its last weight is repeated, which moves no limit.
    padding = num_groups * size - in_features
    padded = torch.cat((weight, weight[:, -1:].expand(-1, padding)), 1).float().view(out_features, num_groups, size)
    tiny = torch.finfo(torch.float32).tiny
    if symmetric:
        largest = (1 << (bits - 1)) - 1
        scales = (padded.abs().amax(2) / largest).clamp_(min=tiny)
        quants = (padded / scales[:, :, None]).round_() + (largest + 1)
        minimums = None
    else:
        low, high = padded.aminmax(dim=2)
        if whole_zeros:
            low, high = low.clamp(max=0), high.clamp(min=0)
        scales = ((high - low) / ((1 << bits) - 1)).clamp_(min=tiny)
        if whole_zeros:
            low = (low / scales).round_() * scales
        quants = ((padded - low[:, :, None]) / scales[:, :, None]).round_()
        minimums = low
    quants = quants.clamp_(0, (1 << bits) - 1).to(torch.uint8).view(out_features, -1)[:, :in_features]
    return GroupedWeight(quants, scales, minimums, bits, size)


def whole_input(in_features: int) -> int:
    """The size of a group that all inputs belong to."""
    return -(-in_features // BLOCK_SIZES[1]) * BLOCK_SIZES[1]
