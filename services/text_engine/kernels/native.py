"""The elementwise operations as compiled CPU kernels: `Kernels` over a loaded library, in bf16 and fp32.

Called several times per layer and step, so each method checks shapes with asserts only and makes one foreign call.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from services.text_engine.kernels.native_library import ELEMENT_TYPES, NativeLibrary


class NativeKernels:
    """Satisfies `kernels.interface.Kernels`. `add_rms_norm` and `rotary` overwrite their inputs; `rotary` is the
    CPU attention's."""

    def __init__(self, library: NativeLibrary) -> None:
        self._library = library

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        dim = x.shape[-1]
        rows = x if x.dim() == 2 and x.stride(1) == 1 else x.reshape(-1, dim).contiguous()
        out = torch.empty(x.shape, dtype=x.dtype)
        self._library.rms_norm(
            ELEMENT_TYPES[x.dtype],
            rows.data_ptr(),
            weight.data_ptr(),
            out.data_ptr(),
            rows.shape[0],
            dim,
            rows.stride(0),
            eps,
            torch.get_num_threads(),
        )
        return out

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        assert x.is_contiguous()
        assert residual.is_contiguous()
        assert x.shape == residual.shape
        num_rows, dim = x.shape
        self._library.add_rms_norm(
            ELEMENT_TYPES[x.dtype],
            x.data_ptr(),
            residual.data_ptr(),
            weight.data_ptr(),
            num_rows,
            dim,
            eps,
            torch.get_num_threads(),
        )
        return x, residual

    def rotary(
        self, query: torch.Tensor, key: torch.Tensor, cos_sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As `reference.rotary`, in place on strided views."""
        assert query.stride(2) == key.stride(2) == 1
        assert cos_sin.dtype == torch.float32
        assert cos_sin.is_contiguous()
        num_tokens, num_heads, _ = query.shape
        query_token_stride, query_head_stride, _ = query.stride()
        key_token_stride, key_head_stride, _ = key.stride()
        self._library.rotary(
            ELEMENT_TYPES[query.dtype],
            query.data_ptr(),
            key.data_ptr(),
            cos_sin.data_ptr(),
            num_tokens,
            num_heads,
            key.shape[1],
            cos_sin.shape[1],
            query_token_stride,
            query_head_stride,
            key_token_stride,
            key_head_stride,
            torch.get_num_threads(),
        )
        return query, key

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        return self._gated_product(self._library.silu_mul, gate_up)

    def gelu_tanh_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        return self._gated_product(self._library.gelu_tanh_mul, gate_up)

    def _gated_product(self, function: Callable[..., None], gate_up: torch.Tensor) -> torch.Tensor:
        assert gate_up.stride(1) == 1
        num_tokens, double = gate_up.shape
        out = torch.empty((num_tokens, double // 2), dtype=gate_up.dtype)
        function(
            ELEMENT_TYPES[gate_up.dtype],
            gate_up.data_ptr(),
            out.data_ptr(),
            num_tokens,
            double // 2,
            gate_up.stride(0),
            torch.get_num_threads(),
        )
        return out
