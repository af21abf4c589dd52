"""The norms of towers and connectors."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

NormKind = Literal["layer", "rms"]


class RmsNorm(nn.Module):
    """x * rsqrt(mean(x^2) + eps) in fp32, then * weight in x's dtype"""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(size))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * normed.to(x.dtype)


def make_norm(kind: NormKind, size: int, eps: float) -> nn.LayerNorm | RmsNorm:
    return RmsNorm(size, eps) if kind == "rms" else nn.LayerNorm(size, eps)
