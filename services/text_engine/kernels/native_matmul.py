"""Matrix products with packed weights, compiled: a row's result is the same bit for bit in any batch."""

from __future__ import annotations

import torch

from services.text_engine.kernels.native_library import ELEMENT_TYPES, WEIGHT_TYPES, NativeLibrary, cpu_flags

LANE_BYTES = 4
WIDENED_DTYPES = (torch.bfloat16, torch.float16)  # of weights that are multiplied in fp32


def packing_pays(library: NativeLibrary, dtype: torch.dtype) -> bool:
    """Whether `PackedLinear` is this CPU's fastest product in `dtype`, by bench/matmul_cpu.py.

    Not in bf16 where the CPU has matrix tiles (Intel AMX), which torch uses and these kernels do not.
    """
    measured_faster = library.instruction_set in ("avx512bf16", "avx2")
    return measured_faster and not (dtype == torch.bfloat16 and "amx_bf16" in cpu_flags())


class PackedLinear:
    """y = x @ weight.T + bias, keeping the weight in the kernels' order only. Computes in the weight's dtype, or, with
    a weight in bf16 or fp16, in fp32: the weight keeps its size then and is widened, exactly, as it is read."""

    def __init__(
        self,
        library: NativeLibrary,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        *,
        dtype: torch.dtype | None = None,
    ) -> None:
        """weight [out_features, in_features], bias [out_features]; in bf16 in_features is even

        dtype   of x and y, bf16 or fp32; None: the weight's
        """
        self.out_features, self.in_features = weight.shape
        self.dtype = dtype or weight.dtype
        if self.dtype not in (weight.dtype, torch.float32):
            raise ValueError(f"{weight.dtype} weights are multiplied in their own dtype or in float32, not {dtype}")
        if self.in_features * self.dtype.itemsize % LANE_BYTES:
            raise ValueError(f"packed {self.dtype} weights need an even number of inputs, not {self.in_features}")
        self._matmul = library.matmul
        self._types = ELEMENT_TYPES[self.dtype], WEIGHT_TYPES[weight.dtype]
        self._bias = None if bias is None else bias.float()
        self._bias_pointer = None if self._bias is None else self._bias.data_ptr()
        weight = weight.contiguous()
        self._packed = torch.empty(library.packed_outputs(self.out_features) * self.in_features, dtype=weight.dtype)
        library.pack_weight(
            *self._types,
            weight.data_ptr(),
            self._packed.data_ptr(),
            self.out_features,
            self.in_features,
            torch.get_num_threads(),
        )

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [num_rows, in_features] -> [num_rows, out_features]"""
        num_rows, in_features = x.shape
        row_stride, column_stride = x.stride()
        assert x.dtype == self.dtype
        assert in_features == self.in_features
        assert column_stride == 1
        assert row_stride * x.itemsize % LANE_BYTES == 0  # rows are read in lanes
        y = torch.empty((num_rows, self.out_features), dtype=x.dtype)
        self._matmul(
            *self._types,
            x.data_ptr(),
            self._packed.data_ptr(),
            self._bias_pointer,
            y.data_ptr(),
            num_rows,
            self.out_features,
            in_features,
            row_stride,
            torch.get_num_threads(),
        )
        return y
