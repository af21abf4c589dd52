"""SmolVLM and Idefics3: a picture in tiles and as a whole, pixels shuffled into channels, text between the tiles."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

from services.vision_encoder.errors import UnsupportedCheckpoint
from services.vision_encoder.families.connector import ConnectedFeatures, Connector, shuffle_pixels
from services.vision_encoder.families.siglip import load_siglip
from services.vision_encoder.families.tiled import Tiled
from services.vision_encoder.preprocessing.split_tiles import SplitTiles, load_split_tiles
from services.vision_encoder.towers import TowerConfig
from services.vision_encoder.weights import WeightReader
from shared.torch_io import Checkpoint
from shared.wire.images import ImageMetadata

CONNECTOR_PREFIXES: Final = ("model.connector.", "connector.")
FAKE_TOKEN: Final = "<fake_token_around_image>"  # noqa: S105 - a token's spelling
GLOBAL_IMAGE: Final = "<global-img>"

# What transformers assumes where a checkpoint's vision_config is silent.
TOWER_DEFAULTS: Final = {
    "hidden_size": 1152,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 16,
    "image_size": 224,
    "patch_size": 32,
    "hidden_act": "gelu_pytorch_tanh",
    "layer_norm_eps": 1e-6,
}


class PixelShuffle(Connector):
    """Squares of scale x scale neighbours become one row: [tiles, grid * grid, width] -> [tiles, rows, output_size]"""

    def __init__(self, grid_size: int, scale: int, tower_width: int, output_size: int) -> None:
        super().__init__()
        self.grid_size = grid_size
        self.scale = scale
        self.num_rows = (grid_size // scale) ** 2
        self.output_size = output_size
        self.proj = nn.Linear(tower_width * scale**2, output_size, bias=False)

    def forward(self, features: Tensor) -> Tensor:
        rows: Tensor = self.proj(shuffle_pixels(features, self.grid_size, self.scale))
        return rows


def _layout(rows: int, columns: int, per_tile: int) -> Iterator[str | int]:
    """Each tile's rows behind its name, the whole picture's last; a line break ends a row of tiles."""
    line_break = ""
    for row in range(1, rows + 1):
        for column in range(1, columns + 1):
            yield f"{line_break}{FAKE_TOKEN}<row_{row}_col_{column}>"
            yield per_tile
            line_break = ""
        line_break = "\n"
    yield f"{line_break * 2}{FAKE_TOKEN}{GLOBAL_IMAGE}"
    yield per_tile
    yield FAKE_TOKEN


def load_smolvlm(folder: Path, config: dict[str, Any]) -> Tiled:
    fields = TOWER_DEFAULTS | config.get("vision_config", {}) | {"model_type": "siglip_vision_model"}
    tower_config = TowerConfig.from_hf(fields)
    preprocessing = load_split_tiles(folder)
    reader = WeightReader(Checkpoint(folder))
    tower, post_layernorm = load_siglip(reader, tower_config)
    tower.config = dataclasses.replace(tower_config, image_size=preprocessing.tile_size)
    tile_positions = position_ids(tower.config.grid_size, tower_config.grid_size)
    tower.position_embedding = nn.Parameter(tower.position_embedding.detach()[tile_positions])
    connector = _load_connector(reader, tower.config, scale=int(config.get("scale_factor", 2)))

    features = ConnectedFeatures(tower, post_layernorm, connector)

    def reading(preprocessing: SplitTiles, low_detail: Tiled | None) -> Tiled:
        def describe(width: int, height: int) -> ImageMetadata:
            rows, columns = preprocessing.grid(width, height)
            per_tile = connector.num_rows
            return ImageMetadata(
                num_tokens=per_tile * (rows * columns + 1),
                width=width,
                height=height,
                layout=tuple(_layout(rows, columns, per_tile)),
            )

        return Tiled(features, preprocessing, reader.digest, describe, low_detail)

    whole = reading(dataclasses.replace(preprocessing, splits=False), None)
    return reading(preprocessing, whole) if preprocessing.splits else whole


def _load_connector(reader: WeightReader, tower_config: TowerConfig, scale: int) -> PixelShuffle:
    if tower_config.grid_size % scale:
        raise UnsupportedCheckpoint(
            f"scale_factor is {scale}; it must divide the {tower_config.grid_size} patches of a tile's side"
        )
    weight = reader.read(CONNECTOR_PREFIXES, "modality_projection.proj.weight")
    width = tower_config.hidden_size * scale**2
    if weight.shape[1] != width:
        raise UnsupportedCheckpoint(f"modality_projection takes {weight.shape[1]} values; the config means {width}")
    with torch.device("meta"):
        connector = PixelShuffle(tower_config.grid_size, scale, tower_config.hidden_size, weight.shape[0])
    connector.load_state_dict({"proj.weight": weight}, assign=True)
    return connector


def position_ids(grid_size: int, num_positions_per_side: int) -> Tensor:
    """[grid_size ** 2]: for each patch of a tile the trained position that is nearest in a picture of side 1.

    In the reference's fp32, whose rounding shifts some patches to their neighbour even where the sizes are equal.
    """
    boundaries = torch.arange(1 / num_positions_per_side, 1.0, 1 / num_positions_per_side)
    step = 1.0 / torch.tensor(grid_size)
    places = torch.clamp(torch.arange(grid_size, dtype=torch.float32) * step, max=1.0 - 1e-6)
    positions = torch.bucketize(places, boundaries, right=True)
    return (positions[:, None] * num_positions_per_side + positions).flatten()
