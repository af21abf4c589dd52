"""Tiled: a family whose pictures become tiles of one size, each seen by itself; rows stand in the order of the tiles.

How a picture stands in the prompt is handed in: that is what such families differ in, beside their features.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from services.vision_encoder.families.interface import Family, PreparedImage, fingerprint
from services.vision_encoder.preprocessing.interface import Preprocessing
from shared.cuda_capture import Capture
from shared.wire.images import ImageMetadata


class Features(Protocol):
    """Tower and what follows it; `features.TileFeatures` or `connector.ConnectedFeatures`."""

    @property
    def tower(self) -> nn.Module: ...

    @property
    def hidden_size(self) -> int: ...

    @property
    def choices(self) -> Mapping[str, object]: ...

    def prepare_weights(self, device: torch.device, dtype: torch.dtype) -> None: ...

    def record_graphs(self, capture: Capture) -> None: ...

    def __call__(self, tiles: Tensor, preprocessing: Preprocessing) -> Tensor:
        """8-bit tiles [num_tiles, 3, height, width] -> [num_tiles, num_rows, hidden_size]"""
        ...


@dataclass(frozen=True, slots=True)
class Tiled:
    """Satisfies `Family`.

    describe   width, height of an upright image -> how it stands in the prompt
    """

    features: Features
    preprocessing: Preprocessing
    weights_digest: bytes
    describe: Callable[[int, int], ImageMetadata]
    low_detail: Family | None = None

    @property
    def reads_several_in_low_detail(self) -> bool:
        return False

    @property
    def tower(self) -> nn.Module:
        return self.features.tower

    @property
    def hidden_size(self) -> int:
        return self.features.hidden_size

    @property
    def num_row_parts(self) -> int:
        return 1

    def fingerprint(self, dtype: torch.dtype, background: tuple[int, int, int]) -> str:
        return fingerprint(
            weights_digest=self.weights_digest,
            preprocessing=self.preprocessing,
            choices=self.features.choices,
            dtype=dtype,
            background=background,
        )

    def prepare_weights(self, device: torch.device, dtype: torch.dtype) -> None:
        self.features.prepare_weights(device, dtype)

    def record_graphs(self, capture: Capture) -> None:
        self.features.record_graphs(capture)

    def encode(self, images: Sequence[PreparedImage]) -> list[Tensor]:
        rows = self.features(torch.cat([image.pixels for image in images]), self.preprocessing)
        return list(torch.unflatten(rows, 0, (len(images), -1)).flatten(1, 2).unbind())
