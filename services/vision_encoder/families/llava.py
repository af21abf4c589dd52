"""LLaVA-1.5, BakLLaVA, LLaVA-Interleave and VIP-LLaVA: one tile per image, one row per patch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from services.vision_encoder.families.features import (
    CLIP_L_336,
    TileFeatures,
    check_tile_size,
    load_tile_features,
)
from services.vision_encoder.families.interface import PreparedImage, fingerprint
from services.vision_encoder.preprocessing.single_tile import SingleTile, load_single_tile
from services.vision_encoder.towers import TowerConfig
from services.vision_encoder.weights import WeightReader
from shared.cuda_capture import Capture
from shared.torch_io import Checkpoint
from shared.wire import ImageMetadata


@dataclass(frozen=True, slots=True)
class Llava:
    features: TileFeatures
    preprocessing: SingleTile
    weights_digest: bytes

    @property
    def hidden_size(self) -> int:
        return self.features.hidden_size

    def describe(self, width: int, height: int) -> ImageMetadata:
        return ImageMetadata(num_tokens=self.features.num_rows, width=width, height=height)

    def fingerprint(self, dtype: torch.dtype, background: tuple[int, int, int]) -> str:
        return fingerprint(
            weights_digest=self.weights_digest,
            preprocessing=self.preprocessing,
            choices=self.features.choices,
            dtype=dtype,
            background=background,
        )

    def record_graphs(self, capture: Capture) -> None:
        self.features.record_graphs(capture)

    def prepare_weights(self, device: torch.device, dtype: torch.dtype) -> None:
        self.features.prepare_weights(device, dtype)

    def encode(self, images: Sequence[PreparedImage]) -> list[Tensor]:
        tiles = torch.cat([image.pixels for image in images])
        return list(self.features(tiles, self.preprocessing).unbind())


def load_llava(folder: Path, config: dict[str, Any]) -> Llava:
    return _load(
        folder,
        config,
        feature_layer=config.get("vision_feature_layer", -2),
        strategy=config.get("vision_feature_select_strategy", "default"),
    )


def load_vip_llava(folder: Path, config: dict[str, Any]) -> Llava:
    """Several layers, a norm before the projector, and always without the first position.

    The field was called `vision_feature_layers` when the published checkpoint was written.
    """
    layers = config.get("vision_feature_layers", config.get("vision_feature_layer", [-2, -5, -8, -11, 6]))
    return _load(folder, config, feature_layer=layers, strategy="default")


def _load(folder: Path, config: dict[str, Any], *, feature_layer: object, strategy: str) -> Llava:
    tower_config = TowerConfig.from_hf(config.get("vision_config") or CLIP_L_336)
    preprocessing = load_single_tile(
        folder, {"model_type": tower_config.model_type, "image_size": tower_config.image_size}
    )
    check_tile_size(preprocessing, tower_config)
    reader = WeightReader(Checkpoint(folder))
    features = load_tile_features(reader, config, tower_config, feature_layer=feature_layer, strategy=strategy)
    return Llava(features, preprocessing, reader.digest)
