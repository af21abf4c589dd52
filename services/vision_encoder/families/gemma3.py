"""Gemma 3: one square picture, a fixed number of rows averaged from its patches, and rows that see each other."""

from __future__ import annotations

import math
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

from services.vision_encoder.errors import UnsupportedCheckpoint
from services.vision_encoder.families.connector import ConnectedFeatures, Connector
from services.vision_encoder.families.features import check_tile_size
from services.vision_encoder.families.siglip import load_siglip
from services.vision_encoder.families.tiled import Tiled
from services.vision_encoder.norms import RmsNorm
from services.vision_encoder.preprocessing.processor_file import (
    BILINEAR,
    HALF,
    processor_kind,
    read_normalization,
    read_processor,
    read_resample,
)
from services.vision_encoder.preprocessing.single_tile import SingleTile
from services.vision_encoder.towers import TowerConfig
from services.vision_encoder.weights import PROJECTOR_PREFIXES, WeightReader
from shared.torch_io import Checkpoint
from shared.wire.images import ImageMetadata

BEFORE_IMAGE: Final = "\n\n<start_of_image>"
AFTER_IMAGE: Final = "<end_of_image>\n\n"


class AveragePooling(Connector):
    """Squares of patches averaged, normed and projected: [tiles, grid * grid, width] -> [tiles, rows, output_size]"""

    def __init__(self, grid_size: int, rows_per_side: int, tower_width: int, output_size: int, eps: float) -> None:
        super().__init__()
        self.num_rows = rows_per_side**2
        self.output_size = output_size
        self._squares = (rows_per_side, grid_size // rows_per_side) * 2
        self.norm = RmsNorm(tower_width, eps)
        self.projection = nn.Linear(tower_width, output_size, bias=False)

    def forward(self, features: Tensor) -> Tensor:
        pooled = torch.unflatten(features, 1, self._squares).mean(dim=(2, 4)).flatten(1, 2)
        rows: Tensor = self.projection(self.norm(pooled))
        return rows


def load_gemma3(folder: Path, config: dict[str, Any]) -> Tiled:
    tower_config = TowerConfig.from_hf({"model_type": "siglip_vision_model"} | config.get("vision_config", {}))
    preprocessing = _load_preprocessing(folder)
    check_tile_size(preprocessing, tower_config)
    reader = WeightReader(Checkpoint(folder))
    tower, post_layernorm = load_siglip(reader, tower_config)
    connector = _load_connector(reader, tower_config, num_rows=int(config.get("mm_tokens_per_image", 256)))

    def describe(width: int, height: int) -> ImageMetadata:
        return ImageMetadata(
            num_tokens=connector.num_rows,
            width=width,
            height=height,
            layout=(BEFORE_IMAGE, connector.num_rows, AFTER_IMAGE),
            attention="bidirectional",
        )

    return Tiled(ConnectedFeatures(tower, post_layernorm, connector), preprocessing, reader.digest, describe)


def _load_connector(reader: WeightReader, tower_config: TowerConfig, num_rows: int) -> AveragePooling:
    rows_per_side = math.isqrt(num_rows)
    if rows_per_side**2 != num_rows or tower_config.grid_size % rows_per_side:
        raise UnsupportedCheckpoint(
            f"mm_tokens_per_image is {num_rows}; {tower_config.grid_size} x {tower_config.grid_size} patches cannot be "
            "averaged to so many"
        )
    width = tower_config.hidden_size
    projection = reader.read(PROJECTOR_PREFIXES, "mm_input_projection_weight")
    norm = reader.read(PROJECTOR_PREFIXES, "mm_soft_emb_norm.weight", (width,))
    if projection.shape[0] != width:
        raise UnsupportedCheckpoint(
            f"mm_input_projection_weight takes {projection.shape[0]} values; the tower: {width}"
        )
    with torch.device("meta"):
        connector = AveragePooling(
            tower_config.grid_size, rows_per_side, width, projection.shape[1], tower_config.layer_norm_eps
        )
    # Gemma's norms store what is added to 1, its projection input by output.
    state = {"norm.weight": 1.0 + norm.float(), "projection.weight": projection.T.contiguous()}
    connector.load_state_dict(state, assign=True)
    return connector


def _load_preprocessing(folder: Path) -> SingleTile:
    raw = read_processor(folder)
    kind = processor_kind(raw, "Gemma3ImageProcessor")
    if kind != "Gemma3ImageProcessor" or not raw.get("do_resize", True) or raw.get("do_pan_and_scan"):
        raise UnsupportedCheckpoint(
            f"the image processor must be a Gemma3ImageProcessor that resizes and does no pan and scan; it is a {kind}"
        )
    size = raw.get("size") or {"height": 224, "width": 224}
    return SingleTile(
        pad_colour=None,
        shortest_edge=None,
        resize_to=(int(size["height"]), int(size["width"])),
        crop_to=None,
        resample=read_resample(raw, default=BILINEAR),
        **asdict(read_normalization(raw, HALF, HALF)),
    )
