"""The elementwise operations of a decoder layer, as one interface; a module of functions satisfies it.

`reference` is plain PyTorch (any device, the oracle), `native` the compiled CPU kernels, `triton_kernels` the GPU's.
The decoder gets one of them handed over and never asks which. Rotation belongs to attention, which may fuse it.
"""

from __future__ import annotations

from typing import Protocol

import torch


class Kernels(Protocol):
    """Statistics and sums in fp32, results in the input's dtype, as transformers computes them."""

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """x * rsqrt(mean(x^2) + eps) * weight over the last dimension. x [..., dim], weight [dim]."""
        ...

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(rms_norm(x + residual), x + residual); both [num_tokens, dim]. May reuse the inputs' memory."""
        ...

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """silu(gate) * up for gate_up [num_tokens, 2 * intermediate] -> [num_tokens, intermediate]."""
        ...

    def gelu_tanh_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """gelu(gate) * up, GELU in its tanh form; shapes as for `silu_mul`."""
        ...
