"""What SmolVLM, Gemma 3 and InternVL share: a tower to its very end, then a connector that makes fewer rows."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from services.vision_encoder.families.features import TilePasses
from services.vision_encoder.preprocessing.interface import Preprocessing
from services.vision_encoder.towers import VisionTower
from services.vision_encoder.weights import prepare
from shared.cuda_capture import Capture


class Connector(nn.Module):
    """features [num_tiles, num_positions, tower width] -> [num_tiles, num_rows, output_size]"""

    num_rows: int
    output_size: int

    @property
    def choices(self) -> dict[str, object]:
        """For the fingerprint: what else changes rows and is not in the weights."""
        return {}


@dataclass(slots=True)
class ConnectedFeatures:
    """Tower, the norm behind it, and connector of one checkpoint."""

    tower: VisionTower
    post_layernorm: nn.Module
    connector: Connector
    passes: TilePasses = field(init=False)

    def __post_init__(self) -> None:
        self.passes = TilePasses(self.tower, self._rows)

    @property
    def hidden_size(self) -> int:
        return self.connector.output_size

    @property
    def choices(self) -> dict[str, object]:
        """For the fingerprint: what changes rows and is not in the weights."""
        return {
            "hidden_act": self.tower.config.hidden_act,
            "layer_norm_eps": self.tower.config.layer_norm_eps,
            "num_heads": self.tower.config.num_heads,
            "num_rows": self.connector.num_rows,
            **self.connector.choices,
        }

    def prepare_weights(self, device: torch.device, dtype: torch.dtype) -> None:
        for module in (self.tower, self.post_layernorm, self.connector):
            prepare(module, device, dtype)

    def record_graphs(self, capture: Capture) -> None:
        self.passes.record_graphs(capture)

    def __call__(self, tiles: Tensor, preprocessing: Preprocessing) -> Tensor:
        """8-bit tiles [num_tiles, 3, height, width] -> [num_tiles, num_rows, output_size]"""
        return self.passes(tiles, preprocessing)

    def _rows(self, pixels: Tensor) -> Tensor:
        [features] = self.tower(pixels)
        rows: Tensor = self.connector(self.post_layernorm(features))
        return rows


def shuffle_pixels(features: Tensor, grid_size: int, scale: int) -> Tensor:
    """Squares of scale x scale neighbours behind each other in one row.

    [num_tiles, grid_size ** 2, width] -> [num_tiles, (grid_size / scale) ** 2, scale ** 2 * width]
    """
    squares = grid_size // scale
    grid = torch.unflatten(features, 1, (squares, scale, squares, scale))
    return grid.transpose(2, 3).flatten(3).flatten(1, 2)
