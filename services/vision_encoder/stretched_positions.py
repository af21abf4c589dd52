"""Learned positions for pictures of any size: a square grid of them, stretched over a picture's grid of patches."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate


class StretchedPositions(nn.Module):
    """side   lines and columns of the learned grid"""

    def __init__(self, side: int, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(side, side, size))

    def forward(self, lines: int, columns: int) -> Tensor:
        """[lines, columns, size] fp32: corners on corners, linear between the four learned ones next to a patch."""
        grid = self.weight.float().permute(2, 0, 1)[None]
        stretched = interpolate(grid, size=(lines, columns), mode="bilinear", align_corners=True)
        return stretched[0].permute(1, 2, 0)
