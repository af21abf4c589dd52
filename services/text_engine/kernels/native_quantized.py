"""Products with quantized weights on a CPU: compiled where there is a library, else a piece of the matrix at a time.

Either way the weights stay packed in memory. A row's result is the same bit for bit in any batch.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from services.text_engine.kernels.grouped_weight import BLOCK_SIZES, GroupedWeight, dequantize_rows
from services.text_engine.kernels.native_library import ELEMENT_TYPES, NativeLibrary

# Outputs that `UnpackingLinear` holds unpacked at once.
UNPACKED_ROWS = 512
# Of a normal fp16, with room for a minimum beside its scale.
LARGEST_EXPONENT = 14


class NativeQuantizedLinear:
    """y = x @ weight.T + bias, x bf16 or fp32 and rounded to int8 in blocks of 32 inputs (16, where groups are so
    small). native/quantized_matmul.cpp says how."""

    def __init__(self, library: NativeLibrary, weight: GroupedWeight, bias: torch.Tensor | None = None) -> None:
        """bias [out_features]"""
        self.out_features, self.in_features = weight.out_features, weight.in_features
        self._matmul = library.quantized_matmul
        self._bits = weight.bits
        self._group_size = weight.group_size
        self._block_size = next(size for size in reversed(BLOCK_SIZES) if weight.group_size % size == 0)
        self._input_order = weight.input_order
        self._bias = None if bias is None else bias.float()
        panel = library.quantized_panel()
        self._packed = pack_quants(weight.quants, weight.bits, panel, self._block_size)
        self._output_scales = _output_scales(weight, panel)
        self._scales = _pack_fp16(weight.scales, self._output_scales, panel)
        self._minimums = None if weight.minimums is None else _pack_fp16(weight.minimums, self._output_scales, panel)

    @property
    def size_bytes(self) -> int:
        tensors = (self._packed, self._scales, self._minimums, self._output_scales)
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [num_rows, in_features] -> [num_rows, out_features]"""
        if self._input_order is not None:
            x = x.index_select(1, self._input_order)
        num_rows, in_features = x.shape
        row_stride, column_stride = x.stride()
        assert in_features == self.in_features
        assert column_stride == 1
        y = torch.empty((num_rows, self.out_features), dtype=x.dtype)
        self._matmul(
            ELEMENT_TYPES[x.dtype],
            self._bits,
            x.data_ptr(),
            self._packed.data_ptr(),
            self._scales.data_ptr(),
            None if self._minimums is None else self._minimums.data_ptr(),
            self._output_scales.data_ptr(),
            None if self._bias is None else self._bias.data_ptr(),
            y.data_ptr(),
            num_rows,
            self.out_features,
            in_features,
            row_stride,
            self._block_size,
            self._group_size,
            torch.get_num_threads(),
        )
        return y


class UnpackingLinear:
    """y = x @ weight.T + bias on any device and in any dtype: exact, and slow, for where nothing else is."""

    def __init__(self, weight: GroupedWeight, bias: torch.Tensor | None = None) -> None:
        """bias [out_features]"""
        self.out_features, self.in_features = weight.out_features, weight.in_features
        self._group_size = weight.group_size
        self._input_order = weight.input_order
        self._bias = bias
        self._is_int4 = weight.bits == 4
        quants = weight.quants
        if self._is_int4:
            even, odd = functional.pad(quants, (0, self.in_features % 2)).view(self.out_features, -1, 2).unbind(2)
            quants = even | (odd << 4)
        self._quants = quants.contiguous()
        self._scales, self._minimums = weight.scales, weight.all_minimums()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [num_rows, in_features] -> [num_rows, out_features]"""
        if self._input_order is not None:
            x = x.index_select(1, self._input_order)
        y = torch.empty((x.shape[0], self.out_features), dtype=x.dtype, device=x.device)
        for first in range(0, self.out_features, UNPACKED_ROWS):
            rows = slice(first, first + UNPACKED_ROWS)
            quants = self._quants[rows]
            if self._is_int4:
                quants = torch.stack((quants & 15, quants >> 4), 2).flatten(1)[:, : self.in_features]
            weight = dequantize_rows(quants, self._scales[rows], self._minimums[rows], self._group_size)
            y[:, rows] = functional.linear(x, weight.to(x.dtype), None if self._bias is None else self._bias[rows])
        return y


def pack_quants(quants: torch.Tensor, bits: int, panel: int, block_size: int) -> torch.Tensor:
    """Words of four inputs, or of eight whose halves are the nibbles' two lanes, in panels of outputs.

    quants   [out_features, in_features] uint8
    returns  [num_panels, num_words, panel] int32
    """
    out_features, in_features = quants.shape
    padded = functional.pad(quants, (0, -in_features % block_size, 0, -out_features % panel))
    lanes = padded.view(torch.int32)  # [outputs, lanes]
    if bits == 4:
        lanes = lanes[:, ::2] | (lanes[:, 1::2] << 4)
    return lanes.view(-1, panel, lanes.shape[1]).transpose(1, 2).contiguous()


def _output_scales(weight: GroupedWeight, panel: int) -> torch.Tensor:
    """Powers of two that bring each output's largest scale and minimum to where fp16 is densest.

    returns  [out_features rounded up to panels] fp32
    """
    largest = weight.scales.abs().amax(1) * (1 << weight.bits)
    if weight.minimums is not None:
        largest = torch.maximum(largest, weight.minimums.abs().amax(1))
    exponents = torch.frexp(largest.clamp(min=torch.finfo(torch.float32).tiny)).exponent - LARGEST_EXPONENT
    scales = torch.ldexp(torch.ones_like(largest), exponents.clamp(min=-100))
    return functional.pad(scales, (0, -len(scales) % panel), value=1.0)


def _pack_fp16(values: torch.Tensor, output_scales: torch.Tensor, panel: int) -> torch.Tensor:
    """values [out_features, num_groups] -> [num_panels, num_groups, panel] fp16, to be multiplied by output_scales"""
    padded = functional.pad(values, (0, 0, 0, len(output_scales) - values.shape[0])) / output_scales[:, None]
    return padded.to(torch.float16).view(-1, panel, values.shape[1]).transpose(1, 2).contiguous()
