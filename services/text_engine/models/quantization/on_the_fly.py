"""`--quantization`: plain matrices, quantized as they are loaded.

int8 rounds each output's weights to 255 steps. int4 rounds each group of 32 to 16 steps between its smallest and its
largest weight. The head is always int8: its outputs are compared with one another, and 4 bits cost it more than they
save. The embedding stays as it is: a token reads one row of it. docs/quantization.md has the figures behind this.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Literal

import torch

from services.text_engine.kernels.grouped_weight import GroupedWeight, quantize

INT4_GROUP_SIZE = 32

# our name of a matrix, the matrix [out_features, in_features] -> the same, quantized
Quantize = Callable[[str, torch.Tensor], GroupedWeight]


def to_int8(_name: str, weight: torch.Tensor) -> GroupedWeight:
    return quantize(weight, bits=8, group_size=None, symmetric=True)


def to_int4(name: str, weight: torch.Tensor, *, whole_zeros: bool) -> GroupedWeight:
    if name == "lm_head.weight":
        return to_int8(name, weight)
    return quantize(weight, bits=4, group_size=INT4_GROUP_SIZE, symmetric=False, whole_zeros=whole_zeros)


def quantizer(kind: Literal["int8", "int4"], device: torch.device) -> Quantize:
    """The GPU's kernel wants a weight of zero to be one of the 16 steps; it costs a little of their width."""
    return to_int8 if kind == "int8" else partial(to_int4, whole_zeros=device.type == "cuda")
