"""InternVL: a picture in stretched tiles and as a whole, four patches a row; one run of rows between `<img>` and
`</img>`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

from services.vision_encoder.errors import UnsupportedCheckpoint
from services.vision_encoder.families.connector import ConnectedFeatures, Connector, shuffle_pixels
from services.vision_encoder.families.features import check_tile_size, resolve_feature_layers
from services.vision_encoder.families.tiled import Tiled
from services.vision_encoder.preprocessing.stretched_tiles import StretchedTiles, load_stretched_tiles
from services.vision_encoder.projector import Projector
from services.vision_encoder.towers import TowerConfig, TowerTraits, VisionTower
from services.vision_encoder.weights import TOWER_PREFIXES, WeightReader, load_projector
from shared.torch_io import Checkpoint
from shared.wire.images import ImageMetadata

BEFORE_IMAGE: Final = "<img>"
AFTER_IMAGE: Final = "</img>"
PROJECTOR_NORM_EPS: Final = 1e-5

# What transformers assumes where a checkpoint's vision_config is silent.
TOWER_DEFAULTS: Final = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "image_size": (448, 448),
    "patch_size": (14, 14),
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-6,
    "norm_type": "layer_norm",
    "attention_bias": False,
    "use_qk_norm": False,
    "use_mean_pooling": True,
    "use_absolute_position_embeddings": True,
}


class ShuffledProjector(Connector):
    """Squares of patches, without the class token, normed and projected: [tiles, positions, width] -> [tiles, rows,
    output_size]
    """

    def __init__(self, grid_size: int, scale: int, projector: Projector) -> None:
        super().__init__()
        self.grid_size = grid_size
        self.scale = scale
        self.num_rows = (grid_size // scale) ** 2
        self.output_size = projector.output_size
        self.projector = projector

    @property
    def choices(self) -> dict[str, object]:
        return {"projector_hidden_act": self.projector.hidden_act}

    def forward(self, features: Tensor) -> Tensor:
        rows: Tensor = self.projector(shuffle_pixels(features[:, 1:], self.grid_size, self.scale))
        return rows


def load_internvl(folder: Path, config: dict[str, Any]) -> Tiled:
    if config.get("vision_feature_select_strategy", "default") != "default":
        raise UnsupportedCheckpoint("an InternVL tower needs vision_feature_select_strategy 'default'")
    vision = TOWER_DEFAULTS | (config.get("vision_config") or {})
    tower_config = TowerConfig.with_traits(_traits(vision), vision)
    feature_layer, *others = resolve_feature_layers(config.get("vision_feature_layer", -1), tower_config.num_layers)
    if others:
        raise UnsupportedCheckpoint("vision_feature_layer must be one layer, where patches are put together")
    preprocessing = load_stretched_tiles(folder)
    check_tile_size(preprocessing, tower_config)
    reader = WeightReader(Checkpoint(folder))
    tower = _load_tower(reader, tower_config, feature_layer)
    is_normed = not vision["use_mean_pooling"] and feature_layer == tower_config.num_layers
    connector = _load_connector(reader, config, tower_config)
    features = ConnectedFeatures(
        tower, _load_last_norm(reader, tower_config) if is_normed else nn.Identity(), connector
    )

    def reading(preprocessing: StretchedTiles, low_detail: Tiled | None) -> Tiled:
        def describe(width: int, height: int) -> ImageMetadata:
            num_tokens = preprocessing.num_tiles(width, height) * connector.num_rows
            return ImageMetadata(
                num_tokens=num_tokens, width=width, height=height, layout=(BEFORE_IMAGE, num_tokens, AFTER_IMAGE)
            )

        return Tiled(features, preprocessing, reader.digest, describe, low_detail)

    whole = reading(dataclasses.replace(preprocessing, min_tiles=1, max_tiles=1), None)
    return whole if preprocessing.max_tiles == 1 else reading(preprocessing, whole)


def _traits(vision: Mapping[str, Any]) -> TowerTraits:
    if vision["norm_type"] not in ("layer_norm", "rms_norm"):
        raise UnsupportedCheckpoint(
            f"vision_config.norm_type must be layer_norm or rms_norm, not {vision['norm_type']}"
        )
    if not vision["use_absolute_position_embeddings"]:
        raise UnsupportedCheckpoint("vision_config.use_absolute_position_embeddings must be true")
    return TowerTraits(
        has_class_token=True,
        has_pre_norm=False,
        has_patch_bias=True,
        has_qkv_bias=bool(vision["attention_bias"]),
        has_qk_norm=bool(vision["use_qk_norm"]),
        norm="rms" if vision["norm_type"] == "rms_norm" else "layer",
    )


def _load_tower(reader: WeightReader, config: TowerConfig, feature_layer: int) -> VisionTower:
    width, patch = config.hidden_size, config.patch_size

    def read(name: str, *shape: int) -> Tensor:
        return reader.read(TOWER_PREFIXES, name, shape)

    patches = "embeddings.patch_embeddings.projection"
    state = {
        "class_embedding": read("embeddings.cls_token", 1, 1, width).flatten(),
        "position_embedding": read("embeddings.position_embeddings", 1, config.num_positions, width)[0],
        "patch_embedding.weight": read(f"{patches}.weight", width, 3, patch, patch).flatten(1),
        "patch_embedding.bias": read(f"{patches}.bias", width),
    }
    for index in range(feature_layer):
        state |= {
            f"layers.{index}.{name}": tensor
            for name, tensor in _read_layer(reader, f"encoder.layer.{index}.", config).items()
        }
    with torch.device("meta"):
        tower = VisionTower(config, (feature_layer,))
    tower.load_state_dict(state, assign=True)
    return tower


def _read_layer(reader: WeightReader, prefix: str, config: TowerConfig) -> dict[str, Tensor]:
    """What a layer adds to the stream is scaled per channel: the matrix that gives it is, to the same effect."""
    width, inner, traits = config.hidden_size, config.intermediate_size, config.traits

    def read(name: str, *shape: int) -> Tensor:
        return reader.read(TOWER_PREFIXES, prefix + name, shape)

    def scaled(ours: str, theirs: str, scale: Tensor, num_inputs: int) -> dict[str, Tensor]:
        return {
            f"{ours}.weight": scale[:, None].float() * read(f"{theirs}.weight", width, num_inputs),
            f"{ours}.bias": scale.float() * read(f"{theirs}.bias", width),
        }

    projections = [f"attention.{name}_proj" for name in "qkv"]
    state = {"qkv_proj.weight": torch.cat([read(f"{name}.weight", width, width) for name in projections])}
    if traits.has_qkv_bias:
        state["qkv_proj.bias"] = torch.cat([read(f"{name}.bias", width) for name in projections])
    if traits.has_qk_norm:
        state |= {f"{name}.weight": read(f"attention.{name}.weight", width) for name in ("q_norm", "k_norm")}
    for ours, theirs in (("layer_norm1", "layernorm_before"), ("layer_norm2", "layernorm_after")):
        kinds = ("weight",) if traits.norm == "rms" else ("weight", "bias")
        state |= {f"{ours}.{kind}": read(f"{theirs}.{kind}", width) for kind in kinds}
    state |= scaled("out_proj", "attention.projection_layer", read("lambda_1", width), width)
    state |= {"fc1.weight": read("mlp.fc1.weight", inner, width), "fc1.bias": read("mlp.fc1.bias", inner)}
    state |= scaled("fc2", "mlp.fc2", read("lambda_2", width), inner)
    return state


def _load_last_norm(reader: WeightReader, config: TowerConfig) -> nn.LayerNorm:
    norm = nn.LayerNorm(config.hidden_size, config.layer_norm_eps, device="meta")
    shape = (config.hidden_size,)
    state = {kind: reader.read(TOWER_PREFIXES, f"layernorm.{kind}", shape) for kind in ("weight", "bias")}
    norm.load_state_dict(state, assign=True)
    return norm


def _load_connector(reader: WeightReader, config: Mapping[str, Any], tower_config: TowerConfig) -> ShuffledProjector:
    ratio = config.get("downsample_ratio", 0.5)
    scale = round(1 / ratio)
    if scale * ratio != 1 or tower_config.grid_size % scale:
        raise UnsupportedCheckpoint(
            f"downsample_ratio is {ratio}; it must put whole squares of the {tower_config.grid_size} patches of a "
            "tile's side together"
        )
    projector = load_projector(
        reader,
        tower_config.hidden_size * scale**2,
        str(config.get("projector_hidden_act", "gelu")),
        layer_norm_eps=PROJECTOR_NORM_EPS,
    )
    return ShuffledProjector(tower_config.grid_size, scale, projector)
