"""The elementwise operations in plain PyTorch: any device, and the oracle that every other kernel is compared with.

The module satisfies `kernels.interface.Kernels`. Roundings are where transformers has them; nothing works in place.
"""

from __future__ import annotations

import torch
from torch.nn import functional


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x * rsqrt(mean(x^2) + eps) * weight over the last dimension. x [..., dim], weight [dim]."""
    x_fp32 = x.float()
    normed = x_fp32 * torch.rsqrt(x_fp32.square().mean(-1, keepdim=True) + eps)
    return normed.to(x.dtype) * weight


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(rms_norm(x + residual), x + residual); both [num_tokens, dim]."""
    total = x + residual
    return rms_norm(total, weight, eps), total


def rotary(query: torch.Tensor, key: torch.Tensor, cos_sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate the halves of each head (NeoX style), in fp32.

    query    [num_tokens, num_heads, head_dim], key [num_tokens, num_kv_heads, head_dim]
    cos_sin  [num_tokens, head_dim] fp32: at each token's position the cosines of the head_dim / 2 frequencies, then
             their sines
    """
    cos, sin = cos_sin[:, None].chunk(2, dim=-1)  # each [num_tokens, 1, head_dim / 2]
    return _rotate(query, cos, sin), _rotate(key, cos, sin)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up for gate_up [num_tokens, 2 * intermediate] -> [num_tokens, intermediate]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate) * up


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
