"""Mends Triton's interpreter where bf16 is concerned, so that kernels need no second form for it.

The interpreter keeps bf16 numbers as their bits in uint16. As of Triton 3.7 it multiplies and compares those bits as
if they were whole numbers, casts integers to bits instead of numbers, and cuts fp32 off where the hardware rounds to
nearest even.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch


def mend_bfloat16() -> None:
    """Idempotent; before any kernel runs."""
    import triton.language as tl  # late: TRITON_INTERPRET must be set before
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle, _get_np_dtype

    if getattr(InterpreterBuilder, "knows_bfloat16", False):
        return
    plain_cast, plain_fp_to_fp = InterpreterBuilder.cast_impl, InterpreterBuilder.create_fp_to_fp
    plain_binary, plain_dot = InterpreterBuilder.binary_op, InterpreterBuilder.create_dot

    def cast_impl(self: Any, src: Any, dst_type: Any) -> Any:
        source, target = src.dtype.scalar, dst_type.scalar
        if tl.bfloat16 not in (source, target):
            return plain_cast(self, src, dst_type)
        numbers = _widened(src.data) if source == tl.bfloat16 else src.data
        return TensorHandle(
            _rounded(numbers) if target == tl.bfloat16 else numbers.astype(_get_np_dtype(dst_type)), target
        )

    def create_fp_to_fp(self: Any, src: Any, dst_type: Any, rounding_mode: Any) -> Any:
        if {src.dtype.scalar, dst_type.scalar} == {tl.bfloat16, tl.float32}:
            return cast_impl(self, src, dst_type)
        return plain_fp_to_fp(self, src, dst_type, rounding_mode)

    def binary_op(self: Any, lhs: Any, rhs: Any, op: Any) -> Any:
        bitwise = (np.bitwise_and, np.bitwise_or, np.bitwise_xor)
        if lhs.dtype.scalar != tl.bfloat16 or op in bitwise:
            return plain_binary(self, lhs, rhs, op)
        result = op(_widened(lhs.data), _widened(rhs.data))
        return TensorHandle(result if result.dtype == bool else _rounded(result), tl.bfloat16)

    def create_dot(self: Any, a: Any, b: Any, d: Any, *rest: Any) -> Any:
        def widened(handle: Any) -> Any:
            return cast_impl(self, handle, tl.float32) if handle.dtype.scalar == tl.bfloat16 else handle

        return plain_dot(self, widened(a), widened(b), d, *rest)

    for method in (cast_impl, create_fp_to_fp, binary_op, create_dot):
        setattr(InterpreterBuilder, method.__name__, method)
    InterpreterBuilder.knows_bfloat16 = True


def _widened(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def _rounded(numbers: np.ndarray) -> np.ndarray:
    """To the nearest bf16, ties to even; its bits."""
    rounded = torch.from_numpy(np.ascontiguousarray(numbers.astype(np.float32))).to(torch.bfloat16)
    return rounded.view(torch.int16).numpy().view(np.uint16).reshape(numbers.shape)
