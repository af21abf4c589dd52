"""LLaVA-1.5, BakLLaVA, LLaVA-Interleave and VIP-LLaVA: one tile per image, one row per patch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from services.vision_encoder.families.features import (
    CLIP_L_336,
    check_tile_size,
    load_tile_features,
)
from services.vision_encoder.families.tiled import Tiled
from services.vision_encoder.preprocessing.single_tile import load_single_tile
from services.vision_encoder.towers import TowerConfig
from services.vision_encoder.weights import WeightReader
from shared.torch_io import Checkpoint
from shared.wire.images import ImageMetadata


def load_llava(folder: Path, config: dict[str, Any]) -> Tiled:
    return _load(
        folder,
        config,
        feature_layer=config.get("vision_feature_layer", -2),
        strategy=config.get("vision_feature_select_strategy", "default"),
    )


def load_vip_llava(folder: Path, config: dict[str, Any]) -> Tiled:
    """Several layers, a norm before the projector, and always without the first position.

    The field was called `vision_feature_layers` when the published checkpoint was written.
    """
    layers = config.get("vision_feature_layers", config.get("vision_feature_layer", [-2, -5, -8, -11, 6]))
    return _load(folder, config, feature_layer=layers, strategy="default")


def _load(folder: Path, config: dict[str, Any], *, feature_layer: object, strategy: str) -> Tiled:
    vision = config.get("vision_config") or CLIP_L_336
    tower_config = TowerConfig.from_hf(vision)
    preprocessing = load_single_tile(folder, vision | {"image_size": tower_config.image_size})
    check_tile_size(preprocessing, tower_config)
    reader = WeightReader(Checkpoint(folder))
    features = load_tile_features(reader, config, tower_config, feature_layer=feature_layer, strategy=strategy)

    def describe(width: int, height: int) -> ImageMetadata:
        return ImageMetadata(num_tokens=features.num_rows, width=width, height=height)

    return Tiled(features, preprocessing, reader.digest, describe)
