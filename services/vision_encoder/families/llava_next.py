"""LLaVA-NeXT (1.6) and LLaVA-OneVision: the whole picture in one tile, then as many tiles as its shape asks for.

The rows of the further tiles are put together to one large grid of patches; what comes from the black bars around the
picture is cut away again, and a learned row marks the end of each line.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn.functional import interpolate

from services.vision_encoder.errors import UnsupportedCheckpoint
from services.vision_encoder.families.features import (
    CLIP_L_336,
    TileFeatures,
    check_tile_size,
    load_tile_features,
)
from services.vision_encoder.families.interface import PreparedImage, fingerprint
from services.vision_encoder.families.tiled import Tiled
from services.vision_encoder.preprocessing.anyres import AnyRes, load_anyres
from services.vision_encoder.preprocessing.interface import Preprocessing
from services.vision_encoder.towers import TowerConfig, VisionTower
from services.vision_encoder.weights import WeightReader
from shared.cuda_capture import Capture
from shared.torch_io import Checkpoint
from shared.wire.images import ImageMetadata

# What the configs mean where a checkpoint is silent.
NEXT_RESOLUTIONS: Final = [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]]
ONEVISION_RESOLUTIONS: Final = [[384 * down, 384 * across] for down in range(1, 7) for across in range(1, 7)]
ONEVISION_TOWER: Final = {
    "model_type": "siglip_vision_model",
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_hidden_layers": 26,
    "num_attention_heads": 16,
    "image_size": 384,
    "patch_size": 14,
}


@dataclass(frozen=True, slots=True)
class Mosaic:
    """What becomes of the grid of patches that an image's tiles make together.

    rows, columns   those that hold the picture
    scaled_to       (height, width) that they are scaled to; None: they stay
    """

    rows: slice
    columns: slice
    scaled_to: tuple[int, int] | None

    @property
    def size(self) -> tuple[int, int]:
        return self.scaled_to or (self.rows.stop - self.rows.start, self.columns.stop - self.columns.start)


@dataclass(frozen=True, slots=True)
class OneTile:
    """The rows of one tile and one `newline` [hidden_size]: what low detail leaves of a picture."""

    tile: TileFeatures
    newline: Tensor

    @property
    def tower(self) -> VisionTower:
        return self.tile.tower

    @property
    def hidden_size(self) -> int:
        return self.tile.hidden_size

    @property
    def choices(self) -> Mapping[str, object]:
        return self.tile.choices

    def prepare_weights(self, device: torch.device, dtype: torch.dtype) -> None:
        """They are the whole model's and prepared with it."""

    def record_graphs(self, capture: Capture) -> None:
        """So are its graphs."""

    def __call__(self, tiles: Tensor, preprocessing: Preprocessing) -> Tensor:
        """8-bit [batch, 3, height, width] -> [batch, num_rows + 1, hidden_size]"""
        rows = self.tile(tiles, preprocessing)
        return torch.cat((rows, self.newline.expand(len(rows), 1, -1)), dim=1)


@dataclass(slots=True)
class LlavaNext:
    """Both families; they differ in what happens to large mosaics and to several pictures.

    newline     [hidden_size], behind each line of patches
    max_tiles   a mosaic of more than 1.21 times the patches of so many tiles is scaled down; None: it never is
    reads_several_in_low_detail   LLaVA-OneVision: more than one picture in a conversation have one tile each, padded
                to a square instead of squeezed
    """

    features: TileFeatures
    preprocessing: AnyRes
    newline: Tensor
    max_tiles: int | None
    reads_several_in_low_detail: bool
    weights_digest: bytes

    @property
    def tower(self) -> VisionTower:
        return self.features.tower

    @property
    def hidden_size(self) -> int:
        return self.features.hidden_size

    @property
    def num_row_parts(self) -> int:
        return 1

    @property
    def low_detail(self) -> Tiled:
        """The whole picture in one tile."""
        num_tokens = self.features.num_rows + 1

        def describe(width: int, height: int) -> ImageMetadata:
            return ImageMetadata(num_tokens=num_tokens, width=width, height=height)

        whole = self.preprocessing.whole_picture(is_padded=self.reads_several_in_low_detail)
        return Tiled(OneTile(self.features, self.newline), whole, self.weights_digest, describe)

    def describe(self, width: int, height: int) -> ImageMetadata:
        num_lines, line_length = self._mosaic(width, height).size
        num_tokens = self.features.num_rows + num_lines * (line_length + 1)
        return ImageMetadata(num_tokens=num_tokens, width=width, height=height)

    def fingerprint(self, dtype: torch.dtype, background: tuple[int, int, int]) -> str:
        return fingerprint(
            weights_digest=self.weights_digest,
            preprocessing=self.preprocessing,
            choices=self.features.choices | {"max_tiles": self.max_tiles},
            dtype=dtype,
            background=background,
        )

    def record_graphs(self, capture: Capture) -> None:
        self.features.record_graphs(capture)

    def prepare_weights(self, device: torch.device, dtype: torch.dtype) -> None:
        self.features.prepare_weights(device, dtype)
        self.newline = self.newline.to(device, dtype)

    @torch.inference_mode()
    def encode(self, images: Sequence[PreparedImage]) -> list[Tensor]:
        tiles = self.features(torch.cat([image.pixels for image in images]), self.preprocessing)
        tiles_of_each = tiles.chunk(len(images))
        return [self._arrange(tiles, image) for tiles, image in zip(tiles_of_each, images, strict=True)]

    def _arrange(self, tiles: Tensor, image: PreparedImage) -> Tensor:
        """tiles [1 + down * across, num_rows, hidden_size] -> [num_tokens, hidden_size]"""
        mosaic = self._mosaic(image.width, image.height)
        side = self.features.tower.config.grid_size
        down, across = self.preprocessing.num_tiles(image.width, image.height)
        # [down, across, line in tile, column in tile, hidden] -> [line, column, hidden]
        patches = tiles[1:].reshape(down, across, side, side, -1).transpose(1, 2).flatten(2, 3).flatten(0, 1)
        patches = patches[mosaic.rows, mosaic.columns]
        if mosaic.scaled_to is not None:
            channels_first = patches.permute(2, 0, 1)[None]
            patches = interpolate(channels_first, mosaic.scaled_to, mode="bilinear")[0].permute(1, 2, 0)
        newlines = self.newline.expand(len(patches), 1, -1)
        return torch.cat((tiles[0], torch.cat((patches, newlines), dim=1).flatten(0, 1)))

    def _mosaic(self, width: int, height: int) -> Mosaic:
        side = self.features.tower.config.grid_size
        down, across = self.preprocessing.num_tiles(width, height)
        rows, columns = _without_bars((width, height), down * side, across * side)
        return Mosaic(rows, columns, self._scaled_size(rows.stop - rows.start, columns.stop - columns.start))

    def _scaled_size(self, num_lines: int, line_length: int) -> tuple[int, int] | None:
        if self.max_tiles is None:
            return None
        ratio = math.sqrt(num_lines * line_length / (self.max_tiles * self.features.tower.config.grid_size**2))
        return (int(num_lines // ratio), int(line_length // ratio)) if ratio > 1.1 else None


def _without_bars(image: tuple[int, int], num_lines: int, line_length: int) -> tuple[slice, slice]:
    """The lines and columns of a grid of patches that show the picture in its middle.

    Rounded exactly as the reference does; of a sliver nothing may be left.
    """
    width, height = image
    if width / height > line_length / num_lines:
        num_shown = int(round(height * (line_length / width), 7))
        bar = (num_lines - num_shown) // 2
        return slice(bar, num_lines - bar), slice(0, line_length)
    num_shown = int(round(width * (num_lines / height), 7))
    bar = (line_length - num_shown) // 2
    return slice(0, num_lines), slice(bar, line_length - bar)


def load_llava_next(folder: Path, config: dict[str, Any]) -> LlavaNext:
    return _load(
        folder,
        config,
        tower_config=TowerConfig.from_hf(config.get("vision_config") or CLIP_L_336),
        resolutions=config.get("image_grid_pinpoints") or NEXT_RESOLUTIONS,
        feature_layer=config.get("vision_feature_layer", -2),
        strategy=config.get("vision_feature_select_strategy", "default"),
        max_tiles=None,
        reads_several_in_low_detail=False,
    )


def load_llava_onevision(folder: Path, config: dict[str, Any]) -> LlavaNext:
    return _load(
        folder,
        config,
        tower_config=TowerConfig.from_hf(config.get("vision_config") or ONEVISION_TOWER),
        resolutions=config.get("image_grid_pinpoints") or ONEVISION_RESOLUTIONS,
        feature_layer=config.get("vision_feature_layer", -1),
        strategy=config.get("vision_feature_select_strategy", "full"),
        max_tiles=_max_tiles(config.get("vision_aspect_ratio", "anyres_max_9")),
        reads_several_in_low_detail=True,
    )


def _load(
    folder: Path,
    config: dict[str, Any],
    *,
    tower_config: TowerConfig,
    resolutions: object,
    feature_layer: object,
    strategy: str,
    max_tiles: int | None,
    reads_several_in_low_detail: bool,
) -> LlavaNext:
    preprocessing = load_anyres(folder, tile_size=tower_config.image_size, resolutions=resolutions)
    check_tile_size(preprocessing, tower_config)
    reader = WeightReader(Checkpoint(folder))
    features = load_tile_features(reader, config, tower_config, feature_layer=feature_layer, strategy=strategy)
    if features.num_rows != tower_config.grid_size**2:
        raise UnsupportedCheckpoint(
            f"vision_feature_select_strategy {strategy!r} leaves {features.num_rows} rows of a tile; tiles are put "
            f"together from {tower_config.grid_size} x {tower_config.grid_size}"
        )
    newline = reader.read(("", "model."), "image_newline", (features.hidden_size,))
    return LlavaNext(features, preprocessing, newline, max_tiles, reads_several_in_low_detail, reader.digest)


def _max_tiles(value: object) -> int:
    number = value.removeprefix("anyres_max_") if isinstance(value, str) else ""
    if not number.isdecimal() or int(number) == 0:
        raise UnsupportedCheckpoint(f"vision_aspect_ratio must be anyres_max_ and a number, not {value!r}")
    return int(number)
